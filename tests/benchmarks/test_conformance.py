"""The conformance page says what its record says, and the record what the adapters and reproducers state."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import adapters, reproduce, stubs, table
from peers.adapters import PEERS, Peer

from contrastile.verify.losses import Claims, check

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "benchmarks/peers/requirements.txt").read_text(), re.MULTILINE))
FEW = ("smoke", "ragged", "hot", "ids", "nan", "shards")


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((ROOT / "docs" / "results" / "conformance.json").read_text(encoding="utf-8"))


def test_the_record_has_every_adapter_as_it_is_stated(record: dict[str, Any]) -> None:
    assert [row["name"] for row in record["peers"]] == list(PEERS)
    for row in record["peers"]:
        peer = PEERS[row["name"]]
        stated = peer.package, peer.about, peer.claims.objective, peer.claims.dtypes[0]
        assert tuple(row[name] for name in ("package", "about", "objective", "dtype")) == stated
        # verify may have had fewer cases when the record was made
        assert set(row["without"]) <= set(peer.without)
        if row["cells"]:
            assert list(row["cells"]) == [*table.COLUMNS, table.MEMORY]
            assert not any(cell["status"] == "untested" for cell in row["cells"].values()), row["name"]
        else:
            assert (peer.needs, row["reason"]) == (adapters.KERNEL, "not run: needs a GPU")


def test_the_record_has_the_versions_that_are_pinned(record: dict[str, Any]) -> None:
    assert {name: found for name, found in record["environment"]["packages"].items() if name != "triton"} == PINS


def test_the_record_has_every_reproducer_and_each_showed_its_fact(record: dict[str, Any]) -> None:
    stated = [(x.name, x.says, x.package, x.case, ranks) for x in reproduce.facts() for ranks in x.ranks]
    assert [tuple(row[x] for x in ("fact", "says", "package", "case", "ranks")) for row in record["facts"]] == stated
    assert {row["status"] for row in record["facts"]} == {"reproduced"}
    assert all(row["found"] != row["right"] and row["version"] == PINS[row["package"]] for row in record["facts"])
    columns = " ".join([*table.COLUMNS, table.MEMORY, "gradients under DDP"])
    assert all(row["case"] in columns for row in record["facts"])


@pytest.mark.parametrize("path", sorted(reproduce.FACTS.glob("*.py")), ids=lambda path: path.stem)
def test_a_reproducer_is_a_few_lines_that_need_torch_and_the_package(path: Path) -> None:
    """Beside imports, the group of ranks, the device and the line that is printed."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    given = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {each.module if isinstance(each, ast.ImportFrom) else each.names[0].name for each in given}
    assert not any("contrastile" in (name or "") or "peers" in (name or "") for name in names)
    body = [node for node in tree.body[1:] if not isinstance(node, ast.Import | ast.ImportFrom)]
    aside = ("dist.init_process_group", "rank, n = ", "torch.set_default_device", "print(")
    lines = [ast.unparse(node) for node in body]
    assert sum(not line.startswith(aside) for line in lines) <= 6, lines
    assert lines[-1].startswith("print(")


def test_a_fact_that_a_version_no_longer_shows_is_told_from_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "FACTS", tmp_path)
    about = '"""It is so.\n\npackage: {}\ncase: value\n"""\n'
    programs = {
        "shown": "print('loss = 2, right 1')",
        "mended": "print('loss = 1, right 1')",
        "silent": "raise OSError('no room')",
        "absent": "print('loss = 2, right 1')",
    }
    for name, program in programs.items():
        package = "not-a-package" if name == "absent" else "numpy"
        (tmp_path / f"{name}.py").write_text(about.format(package) + program)
    rows = {fact.name: next(reproduce.run(fact)) for fact in reproduce.facts()}
    assert {name: row["status"] for name, row in rows.items()} == {
        "shown": "reproduced",
        "mended": "not reproduced",
        "silent": "fail",
        "absent": "skip",
    }
    assert rows["shown"]["what"] == "loss"
    assert "no room" in rows["silent"]["reason"]
    assert rows["absent"]["reason"] == "not-a-package is not installed"


def test_an_unknown_fact_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="there is no fact nothing; there are gradcache_distributed, "):
        reproduce.facts(["nothing"])


def test_an_empty_module_stands_in_for_a_missing_one(tmp_path: Path) -> None:
    name = next((name for name in stubs.UNUSED if importlib.util.find_spec(name) is None), None)
    if name is None:
        pytest.skip(f"{', '.join(stubs.UNUSED)} are installed")
    program = tmp_path / "program.py"
    program.write_text(f"from {name}.some.part import Thing\nclass Mine(Thing.inner): ...\nprint(Mine().__class__)")
    command = [sys.executable, str(ROOT / "benchmarks/peers/stubs.py"), str(program)]
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "<class '__main__.Mine'>\n"), ended.stderr


def rows(loss: Any, claims: Claims) -> list[Any]:
    return list(check(loss, claims, dtypes=claims.dtypes, cases=FEW))


@pytest.mark.parametrize("name", PEERS)
def test_what_is_installed_is_called_rightly(name: str) -> None:
    """Every adapter states the arguments as its loss means them: ordinary pairs come out right."""
    peer = PEERS[name]
    if peer.package not in ("torch", "contrastile") and reproduce.installed(peer.package) is None:
        pytest.skip(f"{peer.package} is not installed")
    if not table.where(peer):
        pytest.skip(f"{name} needs a GPU")
    if peer.needs:
        pytest.skip(f"{name} runs a kernel: python benchmarks/conformance.py --only {name}")
    if "smoke" in peer.without:
        pytest.skip(f"{name} runs on ranks alone")
    dtypes = peer.claims.dtypes
    found = list(check(peer.make, dtypes=dtypes, cases=("smoke",), properties=("value", "gradients")))
    assert [row["status"] for row in found if row["case"] == "smoke"] == ["pass", "pass"], found


def halved(image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients are half of what they should be, and whose value is right."""
    loss = adapters.symmetric(scale * image @ text.T)
    return loss / 2 + loss.detach() / 2


def test_a_cell_has_the_worst_of_its_checks() -> None:
    claims = Claims(linear_memory=False)
    found = {name: table.cell(rows(halved, claims), column) for name, column in table.COLUMNS.items()}
    assert {name for name, cell in found.items() if cell["status"] == "pass"} == {"value", "NaN", "determinism"}
    failed = {name: cell for name, cell in found.items() if cell["status"] == "fail"}
    assert set(failed) == {"gradients", "scale gradient", "extreme logits", "ragged sizes"}
    assert all(cell["ratio"] > 100 and cell["checks"] >= cell["failed"] >= 1 for cell in failed.values())
    assert failed["ragged sizes"]["failed"] == 2
    # held to the gradients only where those are right
    assert found["strided views"]["status"] == "-"
    assert found["equal ids"] == {"status": "-", "reason": "equal ids"}
    assert found["DDP: value"] == {"status": "-", "reason": "several ranks"}
    right = {name: table.cell(rows(adapters.symmetric_of, claims), column) for name, column in table.COLUMNS.items()}
    assert not any(cell["status"] == "fail" for cell in right.values())


def test_memory_is_measured_as_a_power_of_the_batch() -> None:
    def power(loss: Any, largest_batch: int = 256) -> Any:
        return table.memory_growth(table.Loss.of(loss, Claims(largest_batch=largest_batch)), "float32", "cpu")["power"]

    assert power(adapters.symmetric_of) == 2
    assert power(PEERS["contrastile_torch"].make) == 1
    assert power(lambda image, text, scale: (image[:, 0, None, None] * text[:, :1] * text[:, 0]).sum() * scale, 64) == 3


def test_an_adapter_that_calls_wrongly_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(rank: int = 0, world_size: int = 1) -> Any:
        return lambda image, text, scale: image.no_such_thing()

    make.claims = Claims()  # type: ignore[attr-defined]
    wrong = replace(PEERS["torch_float32"], make=make, name="wrong")
    monkeypatch.setattr(table, "BATCHES", {"smoke": table.BATCHES["smoke"]})
    with pytest.raises(RuntimeError, match="wrong: the adapter is wrong: raised AttributeError"):
        table.measured(wrong)


def test_what_needs_a_gpu_is_not_run_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    needed: list[Peer] = [peer for peer in PEERS.values() if peer.needs == adapters.KERNEL]
    assert {peer.package for peer in needed} == {"torch", "cut-cross-entropy", "quack-kernels"}
    for peer in needed:
        assert table.in_a_process(peer.name)["reason"] == "not run: needs a GPU"
