"""Communicators and contrastile verify over processes of mpirun and torchrun, and the errors when one rank fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from launching import ENGINES, PATIENCE, launch, run

from contrastile.verify.distributed import DISTRIBUTED

RANKS = range(4)


@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_report_a_wrong_deadline_and_every_primitive_is_right(engine: str) -> None:
    completed = launch(engine, "primitives.py")
    assert completed.code == 0, completed.output
    lines = [completed.lines(rank) for rank in RANKS]
    for number, deadline in enumerate(("soon", "-3")):
        (text,) = {own_lines[number] for own_lines in lines}
        assert text.startswith(f"rank 3: deadline must be a positive number of seconds, got '{deadline}'"), text
    checks = [[line for line in own_lines if line.endswith("in a world of 4")] for own_lines in lines]
    assert checks == [checks[0]] * 4
    assert len(checks[0]) == 8
    assert "gathers in a world of 4" in checks[0]
    assert [f"a world of {size} beside it" in own_lines for size, own_lines in zip((1, 3, 3, 3), lines, strict=True)]
    threads = ["threads have groups of their own"] * (2 if engine == "torch" else 1)
    assert [own_lines[-2 - len(threads) :] for own_lines in lines] == [["groups do not meet", *threads, "done"]] * 4
    assert completed.orphans == 0


ROOT = Path(__file__).parents[2]
BACKENDS = {"mpi": ["numpy", "torch"], "torch": ["torch"]}
CASES = ["ragged", "blocks", "sigmoid-ids", "views", "front-door", "mistakes", "sharded"]
QUICK = ["--case", *CASES, "--dtype", "float32", "--examples", "10"]


def verify(engine: str, *words: str, deadline: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run contrastile verify, which can import the ill backends, on all ranks."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    words = "-m", "contrastile", "verify", "--world", engine, *words
    return run(engine, len(RANKS), *words, CONTRASTILE_DEADLINE=str(deadline), PYTHONPATH=paths)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_four_processes_hold_every_property(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    completed = verify(engine, "--backend", *BACKENDS[engine], *QUICK, "--per-host", "2", "--json", str(path))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    # only rank 0 prints
    assert completed.stdout.count("PASS: ") == 1
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["verdict"] == "pass"
    assert {row["world"] for row in report["rows"]} == {len(RANKS)}
    assert {row["property"] for row in report["rows"]} == set(DISTRIBUTED)
    # a group carries no message after an error; only the case views has rows against themselves, and it is not small
    skipped = {(row["property"], row["case"]) for row in report["rows"] if row["status"] == "skip"}
    unsuitable = {("themselves", case) for case in ("ragged", "blocks", "sigmoid-ids")}
    unsuitable |= {(name, "views") for name in ("reduction", "delivery")}
    assert skipped == {("skipped-backward", "mistakes"), *unsuitable}
    assert all(row["status"] in ("pass", "skip") for row in report["rows"])
    assert sum(row["status"] == "pass" for row in report["rows"]) == 27 * len(BACKENDS[engine])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_rank_fails_every_rank_with_one_report(engine: str) -> None:
    backends = "ill_backends:broken", "ill_backends:raises"
    words = ["--case", "ragged", "--property", "ring", "delivery", "--dtype", "float64", "--quiet"]
    # the other ranks wait this long for the rank that has raised
    completed = verify(engine, "--backend", *backends, *words, deadline=30)
    # every rank exits with 1; mpirun may return 9, if it killed a rank because others aborted first
    assert completed.returncode in ((1,) if engine == "torch" else (1, 9)), completed.stdout + completed.stderr
    assert completed.stdout.count("FAIL: ") == 1
    assert "FAILED ill_backends:broken ring ragged float64" in completed.stdout
    assert "raised KeyError: 'rank 2 is ill'" in completed.stdout
    # the property delivery of the wrong backend, which passes, after a test that failed
    assert f"verify --world {engine} --backend ill_backends:broken" in completed.stdout


def test_a_command_that_cannot_run_prints_one_error() -> None:
    completed = verify("mpi", "--backend", "nope")
    assert completed.returncode == 2, completed.stdout + completed.stderr
    assert completed.stderr.count("contrastile verify: backend must be one of numpy, torch") == 1


DEADLINE = 12
"""The deadline where no time is measured: more seconds than a step takes on a busy machine."""
TIMED = 20
"""The deadline where a test measures that all ranks end in time; the longer, the less a busy machine matters."""
FAULTY = 2
OTHERS = (0, 1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("fault", "exchange"),
    [
        *((fault, "ring") for fault in ("killed", "raises", "leaves", "stalls")),
        *((fault, "two-level") for fault in ("killed", "stalls")),
    ],
)
def test_every_other_rank_ends_within_the_deadline(engine: str, fault: str, exchange: str) -> None:
    completed = launch(engine, "faults.py", fault, str(FAULTY), exchange, CONTRASTILE_DEADLINE=str(TIMED))
    assert completed.code not in (0, 124), completed.output
    assert completed.orphans == 0
    fault_time = next(float(line.split()[1]) for line in completed.lines(FAULTY) if line.startswith("fails"))
    for rank in OTHERS:
        for line in completed.lines(rank):
            error_time, kind, text = re.fullmatch(r"(\S+) (\w+): (.*)", line).groups()  # type: ignore[union-attr]
            assert kind == "ExchangeError"
            assert re.match(rf"rank {FAULTY} (did not answer|cannot be reached)", text), completed.output
            assert float(error_time) - fault_time < TIMED
    if fault == "stalls":
        # only their own deadlines end the ranks; the first that gives up may end the rest
        assert any(completed.lines(rank) for rank in OTHERS), completed.output


def test_ranks_out_of_step_raise_and_take_no_other_message() -> None:
    completed = launch("mpi", "faults.py", "out of step", str(FAULTY), "ring", CONTRASTILE_DEADLINE=str(DEADLINE))
    # the first rank that ends may end the rest before they print their errors
    lines = [line for rank in (*OTHERS, FAULTY) for line in completed.lines(rank) if not line.startswith("fails")]
    errors = [line.partition(" ExchangeError: ")[2] for line in lines]
    assert errors, completed.output
    for error in errors:
        others = r"ranks 0, 1, 3 are at the forward of call (\d+) \(clip_loss\) after \d+ messages"
        assert re.match(rf"{others}, rank 2 is at the forward of call \1 \(clip_loss\) after", error), error


@pytest.mark.slow
def test_a_rank_that_never_connects_is_named() -> None:
    completed = launch("torch", "faults.py", "absent", str(FAULTY), CONTRASTILE_DEADLINE=str(TIMED))
    for rank in OTHERS:
        assert "rank(s) 2 did not connect the group within 20 s" in completed.lines(rank)[0], completed.output


def test_ranks_end_without_mpi4py_as_the_main_module() -> None:
    completed = launch("plain mpi", "faults.py", "stalls", str(FAULTY), "two-level", CONTRASTILE_DEADLINE=str(DEADLINE))
    assert completed.code not in (0, 124), completed.output
    assert completed.orphans == 0
