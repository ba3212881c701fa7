"""The record of published losses is of the adapters and reproducers as they are, and a wrong loss fails in its cell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import conformance
import pytest
import torch
from conformance import COLUMNS, MEMORY, cell
from peers import adapters
from peers.adapters import PEERS

from contrastile.bench import plain
from contrastile.verify.losses import Claims, check

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "benchmarks/peers/requirements.txt").read_text(), re.MULTILINE))


@pytest.fixture(autouse=True)
def kernels_stay_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the stand-ins would make every tensor say that it is on one."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_the_record_is_of_the_adapters_the_reproducers_and_the_pinned_versions() -> None:
    record = json.loads(conformance.RESULT.read_text(encoding="utf-8"))
    packages = record["environment"]["packages"]
    assert {name: found for name, found in packages.items() if name != "triton"} == PINS
    assert [row["name"] for row in record["peers"]] == list(PEERS)
    for row in record["peers"]:
        peer = PEERS[row["name"]]
        stated = peer.package, peer.about, peer.claims.objective, peer.claims.dtypes[0]
        assert tuple(row[name] for name in ("package", "about", "objective", "dtype")) == stated
        if row["cells"]:
            assert list(row["cells"]) == [*COLUMNS, MEMORY]
            assert not any(cell["status"] == "untested" for cell in row["cells"].values()), row["name"]
        else:
            assert (peer.needs, row["reason"]) == (adapters.KERNEL, "not run: needs a GPU")
    names = ("fact", "says", "package", "case", "ranks")
    facts = [row for path in sorted(conformance.FACTS.glob("*.py")) for row in conformance.stated(path)]
    assert [[row[name] for name in names] for row in record["facts"]] == [[x[name] for name in names] for x in facts]
    assert all(row["status"] == "reproduced" and row["version"] == PINS[row["package"]] for row in record["facts"])


def test_a_fact_that_a_version_no_longer_shows_is_told_from_one_that_fails(tmp_path: Path) -> None:
    about = '"""It is so.\n\npackage: {}\ncase: value\n"""\n'
    programs = {
        "reproduced": "print('loss = 2, right 1')",
        "not reproduced": "print('loss = 1, right 1')",
        "fail": "raise OSError('no room')",
        "skip": "print('loss = 2, right 1')",
    }
    for status, program in programs.items():
        path = tmp_path / "fact.py"
        path.write_text(about.format("not-a-package" if status == "skip" else "numpy") + program)
        (row,) = conformance.shown(path)
        assert row["status"] == status
        assert status != "fail" or "no room" in row["reason"]


def test_a_cell_has_the_worst_of_its_checks() -> None:
    def halved(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        loss = plain.clip(image, text, scale)
        return loss / 2 + loss.detach() / 2

    def cells(loss: Any) -> dict[str, Any]:
        cases = ("smoke", "ragged", "hot", "ids", "nan", "shards")
        rows = list(check(loss, Claims(linear_memory=False), dtypes=("float32",), cases=cases))
        return {name: cell(rows, name) for name in COLUMNS}

    wrong, right = cells(halved), cells(plain.clip)
    failed = {name: cell for name, cell in wrong.items() if cell["status"] == "fail"}
    assert set(failed) == {"gradients", "scale gradient", "extreme logits", "ragged sizes"}
    assert all(cell["ratio"] > 100 and cell["checks"] >= cell["failed"] >= 1 for cell in failed.values())
    assert wrong["equal ids"] == {"status": "-", "reason": "equal ids"}
    assert not any(cell["status"] == "fail" for cell in right.values())
