"""What docs/how-to/many-gpus.md and docs/how-to/write-communicator.md show does what they say of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launching import run
from pages import blocks, read

import contrastile
from contrastile import problems
from contrastile.backends.registry import load
from contrastile.verify.arithmetic import Spread, gamma
from contrastile.verify.bounds import bounds
from contrastile.verify.rounding import UNIT
from contrastile.verify.truth import truth

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


def test_the_page_names_every_member_of_a_communicator() -> None:
    from contrastile.comm.communicator import Communicator

    members = [name for name in vars(Communicator) if not name.startswith("_")]
    page = read("docs/how-to/write-communicator.md")
    assert [name for name in members if f"`{name}" not in page] == []
    assert "gather_bytes" in members
