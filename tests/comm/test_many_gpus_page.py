"""The two programs of docs/how-to/many-gpus.md run as printed, and say what one process says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launching import run

import contrastile
from contrastile import problems
from contrastile.backends import load
from contrastile.verify.arithmetic import Spread, gamma
from contrastile.verify.bounds import bounds
from contrastile.verify.rounding import UNIT
from contrastile.verify.truth import truth

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "many-gpus.md"
RANKS = 3


def printed(engine: str, block: int, folder: Path) -> str:
    """What a block of the page prints under its launcher."""
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)[block]
    program = folder / "train.py"
    program.write_text(found, encoding="utf-8")
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


def test_the_mpirun_program_has_the_loss_of_the_whole_batch(tmp_path: Path) -> None:
    drawn = [
        np.random.default_rng(rank).standard_normal((2, 300 + rank, 20)).astype("float32") for rank in range(RANKS)
    ]
    encoder = np.eye(20, 8, dtype="float32")
    image, text = (np.concatenate([x[side] @ encoder for x in drawn]) for side in (0, 1))
    problem = problems.clip(image, text, 0.5).problem
    exact = truth(problem)
    sizes = tuple(len(x[0]) for x in drawn)
    facts = load("numpy").accuracy("float32", "cpu")
    bound = bounds(problem, exact, facts, "float32", spread=Spread(sizes, sizes, halved=True))
    # the loss is given in float32
    off = float(bound.loss) + float(np.spacing(np.float32(exact.outcome.loss)))
    whole = printed("mpi", 1, tmp_path)
    assert any(whole.startswith(f"loss {exact.outcome.loss + by:.4f} of the whole batch") for by in (-off, off))


def test_the_queue_is_shared_out() -> None:
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)[2]
    scope: dict[str, Any] = {"contrastile": contrastile}
    exec(found, scope)
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
