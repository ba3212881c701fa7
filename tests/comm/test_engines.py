"""Communicators over the processes of mpirun and torchrun."""

from __future__ import annotations

import json

import pytest
from launching import ENGINES, launch

RANKS = range(4)


# the others are asked of ranks in one process: tests/schedules/test_handshake.py
MESSAGES = {
    "deadline soon": "rank 3: deadline must be a positive number of seconds, got 'soon'",
    "deadline -3": "rank 3: deadline must be a positive number of seconds, got '-3'",
    "dtype": 'dtype must be the same on every rank, got "float32" on ranks 0, 1, 2, "float64" on rank 3',
    "empty": "the ranks must hold at least one row together, got none",
    "text too short": "rank 3: image and text must have as many rows as each other, got 5 and 4",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_losses_have_the_bits_of_one_process_and_every_primitive_gives_what_it_must(engine: str) -> None:
    ended = launch(engine, "agreement.py")
    assert ended.code == 0, ended.output
    everyone = [ended.said(rank) for rank in RANKS]
    told = [[json.loads(line) for line in said if line.startswith("[")] for said in everyone]
    assert told == [told[0]] * 4
    assert [name for name, _ in told[0]] == list(MESSAGES)
    for name, text in told[0]:
        assert text.startswith(MESSAGES[name]), text
    for said in everyone:
        # before the mismatches and after them: the group is as good as before
        assert said.count("as in one process") == 2, ended.output
    checks = [[line for line in said if line.endswith("in a world of 4")] for said in everyone]
    assert checks == [checks[0]] * 4
    assert len(checks[0]) == 8
    assert "gathers in a world of 4" in checks[0]
    assert [f"a world of {size} beside it" in said for size, said in zip((1, 3, 3, 3), everyone, strict=True)]
    assert [said[-2:] for said in everyone] == [["groups do not meet", "done"]] * 4
    assert ended.orphans == 0


@pytest.mark.slow
@pytest.mark.parametrize("words", [["mpi"], ["torch"], ["torch", "no clones"]], ids=" ".join)
def test_several_threads_may_use_groups_of_their_own_for_the_first_time_at_once(words: list[str]) -> None:
    engine, *more = words
    ended = launch(engine, "threads.py", *more, ranks=3)
    assert ended.code == 0, ended.output
    assert [ended.said(rank) for rank in range(3)] == [["as in one process", "one for each group", "done"]] * 3


@pytest.mark.slow
def test_real_trainers_have_the_gradients_of_the_global_loss() -> None:
    """DDP, FSDP2 and a sum by hand, with uneven parts of the batch."""
    ended = launch("torch", "train_towers.py")
    assert ended.code == 0, ended.output
    for rank in RANKS:
        found = dict(line.rsplit(": ", 1) for line in ended.said(rank))
        wrong = float(found.pop("wrong"))
        assert len(found) == 18
        assert all(float(ratio) < 1 for ratio in found.values()), found
        # 1 / n of the gradient
        assert wrong > 1000
    assert ended.orphans == 0
