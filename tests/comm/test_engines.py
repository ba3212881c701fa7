"""Communicators over the processes of mpirun and torchrun."""

from __future__ import annotations

import json

import pytest
from launching import ENGINES, launch

RANKS = range(4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrong_deadline_is_told_to_all_and_every_primitive_gives_what_it_must(engine: str) -> None:
    ended = launch(engine, "agreement.py")
    assert ended.code == 0, ended.output
    everyone = [ended.said(rank) for rank in RANKS]
    told = [[json.loads(line) for line in said if line.startswith("[")] for said in everyone]
    assert told == [told[0]] * 4
    assert [deadline for deadline, _ in told[0]] == ["soon", "-3"]
    for deadline, text in told[0]:
        assert text.startswith(f"rank 3: deadline must be a positive number of seconds, got '{deadline}'"), text
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
