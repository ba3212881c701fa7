"""One rank fails, or makes another call than the others: what becomes of them, now and as it was recorded."""

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


# of what only silence shows; a start takes long on a busy machine, and is not counted
SILENCE = 30
MISTAKEN = 1
AT = (
    "ranks 0, 2 are at the backward of call {} (clip_loss), rank 1 is at the {} (clip_loss); "
    "every rank must make the same calls in the same order, forward and backward"
)
SKIPPED, SWAPPED = AT.format(3, "forward of call 4"), AT.format(5, "backward of call 6")
SCALES = "scale must be the same on every rank, got 14.25 on ranks 0, 2, 15.25 on rank 1; make the same call"
# whether a rank that ends first is silent or gone when the others ask is a matter of moments
GONE = re.compile(r"\(cannot be reached \(.*?\)\)")
WAITING = f"ranks 0, 1, 2 wait for each other (did not answer): {SKIPPED}"

# what every rank says; of those that end otherwise how many numbers were right, and what their errors begin with
CASES = [
    ("skipped backward", "gather", "mpi", [f"2 right, then ExchangeError: {SKIPPED}"] * 3),
    ("skipped backward", "gather", "torch", [f"2 right, then ExchangeError: {SKIPPED}"] * 3),
    ("skipped backward", "ring", "torch", [f"2 right, then ExchangeError: {SKIPPED}"] * 3),
    ("swapped backwards", "gather", "torch", [f"4 right, then ExchangeError: {SWAPPED}"] * 3),
    ("swapped backwards", "ring", "mpi", [f"4 right, then ExchangeError: {SWAPPED}"] * 3),
    ("swapped backwards", "ring", "torch", [f"4 right, then ExchangeError: {SWAPPED}"] * 3),
    ("skipped forward", "ring", "torch", ["4 right, then ExchangeError: rank 1 ", "4 right", None]),
    ("raised between", "gather", "torch", [None, "2 right, then RuntimeError: this rank has a defect", None]),
    ("broken backward", "gather", "mpi", [f"2 right, then ExchangeError: {WAITING}", None, None]),
    ("broken backward", "ring", "torch", [f"2 right, then ExchangeError: {WAITING}", None, None]),
    ("two models", "ring", "mpi", ["10 right"] * 3),
    ("two models", "gather", "torch", ["10 right"] * 3),
    ("another scale", "gather", "mpi", [f"2 right, then MismatchError: {SCALES}"] * 3),
    ("another scale", "ring", "torch", [f"2 right, then MismatchError: {SCALES}"] * 3),
    ("two models in another order", "gather", "torch", ["4 right, then ExchangeError: ", None, None]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mistake", "exchange", "by", "words"), CASES, ids=[" ".join(case[:3]) for case in CASES])
def test_no_number_is_wrong_and_every_rank_is_told(
    mistake: str, exchange: str, by: str, words: list[str | None]
) -> None:
    given = mistake, exchange, str(MISTAKEN)
    ended = launch(by, "mistakes.py", *given, ranks=3, CONTRASTILE_DEADLINE=str(SILENCE))
    # mpirun may give the signal by which it ended another rank
    assert (ended.code == 0) == (mistake == "two models"), ended.output
    assert ended.orphans == 0
    assert "WrongError" not in ended.output
    said = [[line.partition(" ")[2] for line in ended.said(rank)] for rank in range(3)]
    for rank, (lines, expected) in enumerate(zip(said, words, strict=True)):
        # the first rank that ends may have its launcher end the others before they can say anything
        for line in lines:
            told = GONE.sub("(did not answer)", line)
            assert told.startswith(expected or ("2 right", "4 right")), (rank, ended.output)
            told_of = "ExchangeError" in line or "MismatchError" in line
            assert told_of or rank == MISTAKEN or mistake == "two models", ended.output
    assert any(said), ended.output
