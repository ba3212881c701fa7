"""What docs/how-to/many-gpus.md and docs/how-to/write-communicator.md show does what they say of it."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import queues
import torch
import torch.distributed as dist
from launching import PATIENCE, run
from pages import blocks, read

import contrastile
from contrastile import problems
from contrastile.backends.registry import load
from contrastile.comm.communicator import ExchangeError
from contrastile.verify.arithmetic import Spread, gamma
from contrastile.verify.bounds import bounds
from contrastile.verify.rounding import UNIT
from contrastile.verify.runner import Row, Run
from contrastile.verify.selection import Selection
from contrastile.verify.truth import truth
from contrastile.verify.worlds import Threads

BLOCKS = blocks(read("docs/how-to/many-gpus.md"))
RANKS = 3


def printed(engine: str, block: int, folder: Path) -> str:
    """What a block of the page prints under its launcher."""
    program = folder / "train.py"
    program.write_text(BLOCKS[block], encoding="utf-8")
    ended = run(engine, RANKS, str(program))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_torchrun_program_trains(tmp_path: Path) -> None:
    losses = [
        float(x) for x in re.findall(r"^step \d: loss (\S+) of the whole batch$", printed("torch", 0, tmp_path), re.M)
    ]
    assert len(losses) == 3
    assert all(np.isfinite(losses))


def holds(output: str, drawn: list[Any], scale: float) -> None:
    """The loss that is printed to four places is that of the whole batch, within what float32 allows."""
    image, text = (np.concatenate(x).astype(np.float64) for x in zip(*drawn, strict=True))
    problem = problems.clip(image, text, scale).problem
    exact, sizes = truth(problem), tuple(len(x[0]) for x in drawn)
    facts = load("numpy").accuracy("float32", "cpu")
    ways = Spread(sizes, sizes, halved=True), Spread(sizes, (sum(sizes),))
    off = max(float(bounds(problem, exact, facts, "float32", spread=way).loss) for way in ways)
    (value,) = re.findall(r"^loss (\S+) of the whole batch", output, re.M)
    assert abs(float(value) - exact.outcome.loss) <= off + np.spacing(np.float32(exact.outcome.loss)) + 5.01e-5


def drawn_on(ranks: int, rows: int, width: int) -> list[Any]:
    """What each rank of a page's program draws."""
    return [
        np.random.default_rng(rank).standard_normal((2, rows + rank, width)).astype("float32") for rank in range(ranks)
    ]


def test_the_mpirun_program_has_the_loss_of_the_whole_batch(tmp_path: Path) -> None:
    holds(printed("mpi", 1, tmp_path), [x @ np.eye(20, 8, dtype="float32") for x in drawn_on(RANKS, 300, 20)], 0.5)


def test_the_queue_is_shared_out() -> None:
    scope: dict[str, Any] = {"contrastile": contrastile}
    exec(BLOCKS[2], scope)
    draw = torch.Generator().manual_seed(37)
    query, key, queue = (torch.randn(rows, 8, dtype=torch.float64, generator=draw) for rows in (5, 5, 11))
    query, key, queue = (torch.nn.functional.normalize(x, dim=1) for x in (query, key, queue))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loss = scope["queue_loss"](query, key, queue, 0, 1)
    finally:
        dist.destroy_process_group()
    # another order of sums over 16 columns of logits up to 20: as in tests/test_switching.py
    allowed = gamma(UNIT["float64"] * (8 + 16 + 5 + 16)) * (2 + 4 * 20.0)
    assert abs(loss - contrastile.info_nce(query, key, 20.0, negatives=queue)) <= allowed


COMMUNICATOR = read("docs/how-to/write-communicator.md")
T = TypeVar("T")


def on_every_rank(
    size: int, make: Callable[..., Any], program: Callable[[Any], T], deadline: float = PATIENCE
) -> list[T]:
    """What a program returns on each rank; a rank is a thread, and what it raises ends the test."""
    between = {(i, j): queue.SimpleQueue[bytes]() for i in range(size) for j in range(size) if i != j}
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: program(make(rank, size, between, deadline)), range(size)))


@dataclass
class Ranks(Threads):
    """Threads of which each has a communicator that ``make`` makes."""

    make: Callable[..., Any]

    can_be_late = False

    def run(self, program: Callable[[Any], T], *, late: bool = False) -> list[T]:
        return on_every_rank(self.size, self.make, program)


CASES = ["ragged", "blocks", "ids-drop", "sigmoid-ids", "labels", "zero-rows"]


def rows(size: int, make: Callable[..., Any], cases: list[str], dtypes: list[str]) -> list[Row]:
    world = Ranks(size, make)
    names = ["ring", "gather", "reduction"]
    return list(Run(Selection({"numpy": load("numpy")}, cases, names, dtypes, world=world)).rows())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ring_and_gather_over_it_are_within_their_bounds(size: int) -> None:
    found = rows(size, queues.Queues, CASES, ["float64", "float32"])
    assert {row["property"] for row in found} == {"ring", "gather", "reduction"}
    assert [row for row in found if row["status"] == "fail"] == []
    assert sum(row["status"] == "pass" for row in found) > 30


def test_a_rank_that_does_not_answer_is_named_and_the_group_carries_nothing_more() -> None:
    def program(comm: Any) -> str:
        if comm.rank == 1:
            return "absent"
        with pytest.raises(ExchangeError, match=r"^rank 1 did not answer \(deadline 5 s\)") as caught:
            comm.agree(np.zeros(1, np.int64))
        with pytest.raises(ExchangeError, match=r"can carry nothing more: rank 1 did not answer"):
            comm.agree(np.zeros(1, np.int64))
        return str(caught.value)

    first, absent, last = on_every_rank(3, queues.Queues, program, deadline=5.0)
    assert (absent, first) == ("absent", last)


def test_the_page_s_file_runs_as_a_program_of_several_processes() -> None:
    command = [sys.executable, queues.__file__]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    holds(ended.stdout, drawn_on(3, 100, 32), 0.5)


def test_the_page_names_every_member_of_a_communicator() -> None:
    from contrastile.comm.communicator import Communicator

    members = [name for name in vars(Communicator) if not name.startswith("_")]
    assert [name for name in members if f"`{name}" not in COMMUNICATOR] == []
    assert "make_pages.py: file examples/queues.py -->" in COMMUNICATOR
    assert "gather_bytes" in members
