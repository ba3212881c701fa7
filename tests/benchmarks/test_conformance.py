"""The record of published losses matches the adapters and reproducers, and a wrong loss fails in its cell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import conformance
import pytest
import torch
from conformance import COLUMNS, MEMORY, cell
from pages import defined, read, sections
from peers import adapters, stubs
from peers.adapters import PEERS
from sentence_tables import Table, columns

import contrastile
from contrastile.bench import plain
from contrastile.verify.arithmetic import gamma
from contrastile.verify.losses import Claims, check

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "benchmarks/peers/requirements.txt").read_text(), re.MULTILINE))


@pytest.fixture(autouse=True)
def kernels_stay_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable Triton's interpreter: otherwise the stand-ins would make every tensor claim to be on a GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def test_the_record_matches_the_adapters_the_reproducers_and_the_pinned_versions() -> None:
    record = json.loads(conformance.RESULT.read_text(encoding="utf-8"))
    packages = record["environment"]["packages"]
    assert {name: version for name, version in packages.items() if name != "triton"} == PINS
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
    facts = [row for path in sorted(conformance.FACTS.glob("*.py")) for row in conformance.read_reproducer(path)]
    assert [[row[name] for name in names] for row in record["facts"]] == [[x[name] for name in names] for x in facts]
    assert all(row["status"] == "reproduced" and row["version"] == PINS[row["package"]] for row in record["facts"])


def test_a_fact_that_is_not_reproduced_differs_from_one_that_fails(tmp_path: Path) -> None:
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
        (row,) = conformance.reproduce(path)
        assert row["status"] == status
        assert status != "fail" or "no room" in row["reason"]


def test_a_cell_has_the_worst_result_of_its_checks() -> None:
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


SWITCHING = sections(read("docs/how-to/switching.md"))
CALLS = re.findall(r"^\| `(.+?)`(?:, .*?)? \| (.+) \|$", SWITCHING["Call by call"], re.MULTILINE)
B, WIDTH, K = 9, 8, 2


# the packages' own warnings
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("theirs", "ours"), CALLS)
def test_a_call_equals_the_call_of_the_package_that_it_replaces(theirs: str, ours: str) -> None:
    """The table of docs/how-to/switching.md: losses and gradients in float64."""
    name = re.findall(r"([a-z_][\w.]*)\.[A-Z]", theirs)[0]
    package = name.partition(".")[0]
    stubs.install()
    for required in (name, "sentence_transformers"):
        pytest.importorskip(required, exc_type=ImportError)
    model = adapters.module("sentence_transformers").SentenceTransformer(modules=[Table((2 + K) * B)], device="cpu")
    embeddings = model[0].embeddings
    q, p, *h = torch.nn.functional.normalize(embeddings, dim=1).split(B)
    words, tq, tp = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, 4, 6), (B, 5), (B, 5)))
    scope = vars(contrastile) | defined(read("docs/how-to/own-loss.md"), contrastile=contrastile)
    scope |= defined(SWITCHING["NTXentLoss with labels"], torch=torch, contrastile=contrastile)
    scope |= {"nn": contrastile.nn, "unit": torch.nn.functional.normalize, package: adapters.module(package)}
    scope |= {"q": q, "p": p, "h": torch.stack(h, 1), "x": torch.cat([q, p]), "s": 4.5, "t": 1 / 4.5}
    scope |= {"labels": torch.arange(2 * B) % (B - 2), "b": torch.arange(B), "model": model, "inputs": columns(2, B)}
    scope |= {"words": words, "tokens": torch.arange(4).expand(B, 4), "tq": tq, "tp": tp}
    calls = [theirs, *re.findall("`(.+?)`", ours)]
    losses = [eval(call, dict(scope)) for call in calls]
    gradients = [torch.autograd.grad(loss, embeddings, retain_graph=True)[0] for loss in losses]
    # logits of at most 4.5, sums of fewer than 4 B of them, and features of norm 1.5
    error = gamma(2.0**-53 * (4 * WIDTH + 8 * B + 64)) * (1 + 4 * 4.5) * B
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        assert abs(loss - losses[0]).item() <= error
        assert (gradient - gradients[0]).abs().max().item() <= error * 4.5
