"""One rank fails, or makes another call than the others: what becomes of them."""

from __future__ import annotations

import re

import pytest
from launching import ENGINES, launch

DEADLINE = 12
"""Seconds of what only ends: more than a step takes on a busy machine."""
TIMED = 20
"""Seconds where it is measured that all have ended by then: the more, the less a busy machine matters."""
FAULTY = 2
OTHERS = (0, 1, 3)

# fault, where it happens
FAULTS = [("killed", "inside"), ("raises", "before"), ("leaves", "before"), ("stalls", "inside")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("fault", "where"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_every_other_rank_ends_within_the_deadline(engine: str, fault: str, where: str) -> None:
    ended = launch(engine, "faults.py", fault, where, str(FAULTY), CONTRASTILE_DEADLINE=str(TIMED))
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
    ended = launch("mpi", "faults.py", "out of step", "before", str(FAULTY), CONTRASTILE_DEADLINE=str(DEADLINE))
    # whichever ends first may end the rest before they can say anything
    lines = [line for rank in (*OTHERS, FAULTY) for line in ended.said(rank) if not line.startswith("fails")]
    said = [line.partition(" ExchangeError: ")[2] for line in lines]
    assert said, ended.output
    for text in said:
        others = r"ranks 0, 1, 3 are at the forward of call (\d+) \(clip_loss\) after \d+ messages"
        assert re.match(rf"{others}, rank 2 is at the forward of call \1 \(clip_loss\) after", text), text


@pytest.mark.slow
def test_a_rank_that_never_connects_is_named() -> None:
    ended = launch("torch", "faults.py", "absent", "before", str(FAULTY), CONTRASTILE_DEADLINE=str(TIMED))
    for rank in OTHERS:
        assert "rank(s) 2 did not connect the group within 20 s" in ended.said(rank)[0], ended.output


def test_without_mpi4py_as_the_main_module_ranks_end_too() -> None:
    ended = launch("plain mpi", "faults.py", "stalls", "inside", "2", CONTRASTILE_DEADLINE=str(DEADLINE))
    assert ended.code not in (0, 124), ended.output
    assert ended.orphans == 0
