"""``contrastile mutate``: caught, missed, equivalent and broken mutants."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from contrastile.cli import main
from contrastile.mutate import run
from contrastile.mutate.command import as_json, summary
from contrastile.mutate.registry import PACKAGE, Mutant, every
from contrastile.mutate.run import Done, MutationRun, Result, missing, plant, verdict

MUTANTS = {mutant.name: mutant for mutant in every()}
QUICK = [
    "schedule:upstream-squared",
    "exchange:tile-of-algorithm-3-as-printed",
    "numpy:tiles-overlap",
    "torch:log2-for-ln",
    "triton:log2-for-ln",
]
NUMPY = "backends/numpy/__init__.py"
HARMLESS = Mutant("numpy:harmless", "another comment", NUMPY, "in a fixed order", "in one order")
WRONG = Mutant("numpy:wrong", "", NUMPY, "x = float(block.scale)", "x = 1 + float(block.scale)")
SHORT = {"--case": ["ragged"], "--property": ["value"], "--dtype": ["float32"]}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce verify to one case, for mutants that it cannot catch."""
    words = [word for option, values in SHORT.items() for word in (option, *values)]
    monkeypatch.setattr(run, "arguments", lambda mutant, device: [words])


def run_one(mutant: Mutant) -> Result:
    (result,) = MutationRun([mutant], deadline=1200.0).all()
    return result


@pytest.mark.slow
def test_a_mutant_of_every_component_is_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    path = tmp_path / "mutants.json"
    assert main(["mutate", "--mutant", *QUICK, "--quiet", "--jobs", "2", "--json", str(path)]) == 0
    assert capsys.readouterr().out == f"PASS: {len(QUICK)} of {len(QUICK)} mutants caught\n"
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["verdict"] == "pass"
    assert [row["name"] for row in report["mutants"]] == QUICK
    for row in report["mutants"]:
        assert row["status"] == "caught"
        assert all(row[key] for key in ("case", "property", "dtype", "reason"))
        assert row["problems"] >= 1
        assert row["seconds"] > 0


SIDES = "sides = [[np.full("


def misfit(after: str) -> Mutant:
    return Mutant("numpy:misfit", "", NUMPY, SIDES, f"{after}; {SIDES}")


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("mutant", "status", "reason"),
    [
        (replace(HARMLESS, equivalent="a blank line"), "equivalent", "a blank line"),
        (replace(WRONG, equivalent="a claim"), "broken", "declared equivalent, but caught: "),
        (replace(HARMLESS, before="no such text"), "broken", "update the patch"),
        # an error of the patch itself is no catch
        (misfit("found = nowhere.to_be_found"), "broken", "raised NameError"),
        (misfit("found = ("), "broken", "SyntaxError"),
        (misfit("import nowhere"), "broken", "nowhere"),
    ],
)
def test_a_mutant_that_is_not_caught(mutant: Mutant, status: str, reason: str) -> None:
    result = run_one(mutant)
    assert (result.status, reason in result.reason) == (status, True)
    assert as_json([result])["verdict"] == "fail"


@pytest.mark.usefixtures("short")
def test_a_check_that_the_correct_code_fails_catches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(shutil.copytree(PACKAGE, tmp_path / "contrastile"))
    (package / WRONG.file).write_text(WRONG.applied(), encoding="utf-8")
    monkeypatch.setattr(run, "PACKAGE", package)
    result = run_one(MUTANTS["numpy:positives-among-negatives"])
    assert result.status == "broken"
    assert result.reason.startswith("the correct code fails there, too: statistics[")


@pytest.mark.usefixtures("short")
def test_a_run_that_takes_too_long_is_given_up() -> None:
    (result,) = MutationRun([HARMLESS], deadline=0.1).all()
    assert (result.status, result.reason) == ("missed", "verify had no verdict after 0.1 s")


@pytest.mark.parametrize(
    ("done", "status", "reason"),
    [
        (Done(0, [], "said"), "missed", "verify exited with code 0 and no verdict"),
        (Done(-11, [], "said"), "missed", "verify was killed by signal 11"),
        (Done(2, [], "said"), "broken", "said"),
        (Done(1, [{"status": "pass", "dtype": "float32", "case": "hot"}], "said"), "caught", "said"),
        (Done(None, [], "said"), "missed", "said"),
    ],
)
def test_the_verdict_is_that_of_verify(done: Done, status: str, reason: str) -> None:
    result = verdict(HARMLESS, done)
    assert (result.status, result.reason) == (status, reason)


def test_planting_removes_the_old_bytecode(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "__pycache__").mkdir(parents=True)
    (package / "a.py").write_text("x = 1\n", encoding="utf-8")
    for name in ("a.cpython-311.pyc", "ab.cpython-311.pyc"):
        (package / "__pycache__" / name).touch()
    plant(Mutant("", "", "a.py", "1", "2"), tmp_path / "copy", package)
    copy = tmp_path / "copy" / "package"
    assert (copy / "a.py").read_text(encoding="utf-8") == "x = 2\n"
    assert [file.name for file in (copy / "__pycache__").iterdir()] == ["ab.cpython-311.pyc"]
    assert (package / "a.py").read_text(encoding="utf-8") == "x = 1\n"


def test_cupy_needs_a_gpu() -> None:
    cupy = next(mutant for mutant in MUTANTS.values() if mutant.component == "cupy")
    assert missing(cupy, "cpu")


def test_the_list_names_every_mutant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mutate", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(MUTANTS)
    assert main(["mutate", "--list", "--component", "numpy"]) == 0
    assert capsys.readouterr().out.startswith("numpy:")


def test_the_report_counts_every_status() -> None:
    caught = verdict(HARMLESS, Done(1, [{"status": "pass", "dtype": "float32", "case": "hot"}], ""))
    missed = verdict(HARMLESS, Done(0, [], ""))
    equivalent = replace(missed, status="equivalent")
    assert summary([caught, equivalent]) == "PASS: 1 of 1 mutants caught, 1 equivalent"
    assert summary([caught], complete=False) == "INTERRUPTED: 1 of 1 mutants caught"
    assert as_json([caught], complete=False)["verdict"] == "interrupted"
    assert as_json([missed], complete=False)["verdict"] == "fail"
    assert summary([caught, missed, equivalent]) == "FAIL: 1 of 2 mutants caught, 1 equivalent"
    assert as_json([caught, missed])["counts"] == {"caught": 1, "missed": 1, "equivalent": 0, "broken": 0, "not run": 0}
