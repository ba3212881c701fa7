"""One rank makes another call than the others: the right numbers or one clear error. It takes processes."""

from __future__ import annotations

import re

import pytest
from launching import launch

# of what only silence shows; a start takes long on a busy machine, and is not counted
DEADLINE = 12
FAULTY = 1
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
    given = mistake, exchange, str(FAULTY)
    ended = launch(by, "mistakes.py", *given, ranks=3, CONTRASTILE_DEADLINE=str(DEADLINE))
    # mpirun may give the signal by which it ended another rank
    assert (ended.code == 0) == (mistake == "two models"), ended.output
    assert ended.orphans == 0
    assert "WrongError" not in ended.output
    said = [[line.partition(" ")[2] for line in ended.said(rank) if not line.startswith("fails")] for rank in range(3)]
    for rank, (lines, expected) in enumerate(zip(said, words, strict=True)):
        # the first rank that ends may have its launcher end the others before they can say anything
        for line in lines:
            told = GONE.sub("(did not answer)", line)
            assert told.startswith(expected or ("2 right", "4 right")), (rank, ended.output)
            told_of = "ExchangeError" in line or "MismatchError" in line
            assert told_of or rank == FAULTY or mistake == "two models", ended.output
    assert any(said), ended.output
