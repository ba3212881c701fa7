"""The programs of docs/how-to/many-gpus.md, and the members that docs/how-to/write-communicator.md names."""

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
    """The output of a block of the page under its launcher."""
    program = folder / "train.py"
    program.write_text(BLOCKS[block], encoding="utf-8")
    completed = run(engine, RANKS, str(program))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.slow
def test_the_torchrun_program_trains(tmp_path: Path) -> None:
    losses = [
        float(x) for x in re.findall(r"^step \d: loss (\S+) of the whole batch$", printed("torch", 0, tmp_path), re.M)
    ]
    assert len(losses) == 3
    assert all(np.isfinite(losses))


def assert_printed_loss(output: str, features: list[Any], scale: float) -> None:
    """Assert that the loss, printed with four places, is that of the whole batch within the float32 bound."""
    image, text = (np.concatenate(shard).astype(np.float64) for shard in zip(*features, strict=True))
    problem = problems.clip(image, text, scale).problem
    exact, sizes = truth(problem), tuple(len(shard[0]) for shard in features)
    facts = load("numpy").accuracy("float32", "cpu")
    spreads = Spread(sizes, sizes, halved=True), Spread(sizes, (sum(sizes),))
    bound = max(float(bounds(problem, exact, facts, "float32", spread=spread).loss) for spread in spreads)
    (value,) = re.findall(r"^loss (\S+) of the whole batch", output, re.M)
    assert abs(float(value) - exact.outcome.loss) <= bound + np.spacing(np.float32(exact.outcome.loss)) + 5.01e-5


def drawn_features(ranks: int, rows: int, width: int) -> list[Any]:
    """The features that each rank of a program of the page draws."""
    return [
        np.random.default_rng(rank).standard_normal((2, rows + rank, width)).astype("float32") for rank in range(ranks)
    ]


def test_the_mpirun_program_has_the_loss_of_the_whole_batch(tmp_path: Path) -> None:
    features = [x @ np.eye(20, 8, dtype="float32") for x in drawn_features(RANKS, 300, 20)]
    assert_printed_loss(printed("mpi", 1, tmp_path), features, 0.5)


def test_the_queue_is_shared_among_ranks() -> None:
    scope: dict[str, Any] = {"contrastile": contrastile}
    exec(BLOCKS[2], scope)
    generator = torch.Generator().manual_seed(37)
    query, key, queue = (torch.randn(rows, 8, dtype=torch.float64, generator=generator) for rows in (5, 5, 11))
    query, key, queue = (torch.nn.functional.normalize(x, dim=1) for x in (query, key, queue))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loss = scope["queue_loss"](query, key, queue, 0, 1)
    finally:
        dist.destroy_process_group()
    # sums over 16 columns in another order, with logits up to 20: the bound of tests/test_switching.py
    tolerance = gamma(UNIT["float64"] * (8 + 16 + 5 + 16)) * (2 + 4 * 20.0)
    assert abs(loss - contrastile.info_nce(query, key, 20.0, negatives=queue)) <= tolerance


def test_the_page_names_every_member_of_a_communicator() -> None:
    from contrastile.comm.communicator import Communicator

    members = [name for name in vars(Communicator) if not name.startswith("_")]
    page = read("docs/how-to/write-communicator.md")
    assert [name for name in members if f"`{name}" not in page] == []
    assert "gather_bytes" in members
