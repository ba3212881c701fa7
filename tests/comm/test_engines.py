"""Communicators, trainers and contrastile verify over the processes of mpirun and torchrun; and when one rank fails."""

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
def test_a_wrong_deadline_is_told_to_all_and_every_primitive_gives_what_it_must(engine: str) -> None:
    ended = launch(engine, "primitives.py")
    assert ended.code == 0, ended.output
    everyone = [ended.said(rank) for rank in RANKS]
    for number, deadline in enumerate(("soon", "-3")):
        (text,) = {said[number] for said in everyone}
        assert text.startswith(f"rank 3: deadline must be a positive number of seconds, got '{deadline}'"), text
    checks = [[line for line in said if line.endswith("in a world of 4")] for said in everyone]
    assert checks == [checks[0]] * 4
    assert len(checks[0]) == 8
    assert "gathers in a world of 4" in checks[0]
    assert [f"a world of {size} beside it" in said for size, said in zip((1, 3, 3, 3), everyone, strict=True)]
    threads = ["threads have groups of their own"] * (2 if engine == "torch" else 1)
    assert [said[-2 - len(threads) :] for said in everyone] == [["groups do not meet", *threads, "done"]] * 4
    assert ended.orphans == 0


ROOT = Path(__file__).parents[2]
BACKENDS = {"mpi": ["numpy", "torch"], "torch": ["torch"]}
CASES = ["ragged", "blocks", "sigmoid-ids", "views", "front-door", "mistakes", "sharded"]
QUICK = ["--case", *CASES, "--dtype", "float32", "--examples", "10"]


def verify(engine: str, *words: str, deadline: float = PATIENCE) -> subprocess.CompletedProcess[str]:
    """Run it with the backends that are ill."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    words = "-m", "contrastile", "verify", "--world", engine, *words
    return run(engine, len(RANKS), *words, CONTRASTILE_DEADLINE=str(deadline), PYTHONPATH=paths)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_four_processes_hold_every_property(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    ended = verify(engine, "--backend", *BACKENDS[engine], *QUICK, "--per-host", "2", "--json", str(path))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    # rank 0 prints, and it alone
    assert ended.stdout.count("PASS: ") == 1
    read = json.loads(path.read_text(encoding="utf-8"))
    assert read["verdict"] == "pass"
    assert {row["world"] for row in read["rows"]} == {len(RANKS)}
    assert {row["property"] for row in read["rows"]} == set(DISTRIBUTED)
    # a group that has raised carries nothing more; of these cases one is of rows against themselves, and not small
    skipped = {(row["property"], row["case"]) for row in read["rows"] if row["status"] == "skip"}
    others = {("themselves", case) for case in ("ragged", "blocks", "sigmoid-ids")}
    others |= {(name, "views") for name in ("reduction", "delivery")}
    assert skipped == {("skipped-backward", "mistakes"), *others}
    assert all(row["status"] in ("pass", "skip") for row in read["rows"])
    assert sum(row["status"] == "pass" for row in read["rows"]) == 27 * len(BACKENDS[engine])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_what_one_rank_gets_wrong_fails_everywhere_with_one_report(engine: str) -> None:
    backends = "ill_backends:broken", "ill_backends:raises"
    words = ["--case", "ragged", "--property", "ring", "delivery", "--dtype", "float64", "--quiet"]
    # the other ranks wait so long for one that has raised
    ended = verify(engine, "--backend", *backends, *words, deadline=30)
    # every rank ends with 1; mpirun may tell of one that it ended itself, because others aborted first
    assert ended.returncode in ((1,) if engine == "torch" else (1, 9)), ended.stdout + ended.stderr
    assert ended.stdout.count("FAIL: ") == 1
    assert "FAILED ill_backends:broken ring ragged float64" in ended.stdout
    assert "raised KeyError: 'rank 2 is ill'" in ended.stdout
    # the sound property of the wrong backend, after a test that failed
    assert f"verify --world {engine} --backend ill_backends:broken" in ended.stdout


def test_what_cannot_run_says_so_once() -> None:
    ended = verify("mpi", "--backend", "nope")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.count("contrastile verify: backend must be one of numpy, torch") == 1


DEADLINE = 12
"""Seconds of what only ends: more than a step takes on a busy machine."""
TIMED = 20
"""Seconds where it is measured that all have ended by then: the more, the less a busy machine matters."""
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
    ended = launch(engine, "faults.py", fault, str(FAULTY), exchange, CONTRASTILE_DEADLINE=str(TIMED))
    assert ended.code not in (0, 124), ended.output
    assert ended.orphans == 0
    failed = next(float(line.split()[1]) for line in ended.said(FAULTY) if line.startswith("fails"))
    for rank in OTHERS:
        for line in ended.said(rank):
            when, kind, text = re.fullmatch(r"(\S+) (\w+): (.*)", line).groups()  # type: ignore[union-attr]
            assert kind == "ExchangeError"
            assert re.match(rf"rank {FAULTY} (did not answer|cannot be reached)", text), ended.output
            assert float(when) - failed < TIMED
    if fault == "stalls":
        # nobody else ends them; the first that gives up may end the rest
        assert any(ended.said(rank) for rank in OTHERS), ended.output


def test_ranks_out_of_step_meet_no_message_that_is_not_theirs() -> None:
    ended = launch("mpi", "faults.py", "out of step", str(FAULTY), "ring", CONTRASTILE_DEADLINE=str(DEADLINE))
    # whichever ends first may end the rest before they can say anything
    lines = [line for rank in (*OTHERS, FAULTY) for line in ended.said(rank) if not line.startswith("fails")]
    said = [line.partition(" ExchangeError: ")[2] for line in lines]
    assert said, ended.output
    for text in said:
        others = r"ranks 0, 1, 3 are at the forward of call (\d+) \(clip_loss\) after \d+ messages"
        assert re.match(rf"{others}, rank 2 is at the forward of call \1 \(clip_loss\) after", text), text


@pytest.mark.slow
def test_a_rank_that_never_connects_is_named() -> None:
    ended = launch("torch", "faults.py", "absent", str(FAULTY), CONTRASTILE_DEADLINE=str(TIMED))
    for rank in OTHERS:
        assert "rank(s) 2 did not connect the group within 20 s" in ended.said(rank)[0], ended.output


def test_without_mpi4py_as_the_main_module_ranks_end_too() -> None:
    ended = launch("plain mpi", "faults.py", "stalls", str(FAULTY), "two-level", CONTRASTILE_DEADLINE=str(DEADLINE))
    assert ended.code not in (0, 124), ended.output
    assert ended.orphans == 0
