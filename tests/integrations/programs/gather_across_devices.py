"""sentence-transformers' losses and ours on several ranks, under DDP, with ``gather_across_devices``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from sentence_tables import ROWS, Table, allowed, columns
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from contrastile.integrations import sentence_transformers as ours

SCALE, STRENGTH, MANY = 5.0, 3.0, 3
CHOICES: dict[str, dict[str, Any]] = {
    "one direction": {},
    "both": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    "all": {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
    **{
        mode: {"hardness_mode": mode, "hardness_strength": STRENGTH}
        for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")
    },
}


def reduced(kind: Any, **choice: Any) -> tuple[Tensor, Tensor]:
    """The mean of the ranks' losses, and the gradient after DDP."""
    model = SentenceTransformer(modules=[Table(dist.get_world_size() * MANY * ROWS)], device="cpu")
    loss = kind(model, scale=SCALE, gather_across_devices=True, **choice)
    # as the library's trainer does
    loss.model = DistributedDataParallel(model)
    value = loss(columns(MANY, start=dist.get_rank() * MANY * ROWS), None)
    value.backward()
    mean = value.detach().clone()
    dist.all_reduce(mean)
    gradient = model[0].embeddings.grad
    assert gradient is not None
    return mean / dist.get_world_size(), gradient


def uneven(**choice: Any) -> float:
    """Ours with other numbers of rows on each rank, beside the library's loss of the whole batch in one process."""
    counts = [ROWS + 2 * rank for rank in range(dist.get_world_size())]
    starts = [MANY * sum(counts[:rank]) for rank in range(len(counts))]
    parts = [columns(MANY, count, start) for count, start in zip(counts, starts, strict=True)]
    whole = [{name: torch.cat([x[name] for x in column]) for name in column[0]} for column in zip(*parts, strict=True)]
    one, other = (SentenceTransformer(modules=[Table(MANY * sum(counts))], device="cpu") for _ in range(2))
    expected = losses.MultipleNegativesRankingLoss(one, scale=SCALE, **choice)(whole, None)
    expected.backward()
    loss = ours.MultipleNegativesRankingLoss(other, scale=SCALE, gather_across_devices=True, **choice)
    loss.model = DistributedDataParallel(other)
    found = loss(parts[dist.get_rank()], None)
    found.backward()
    far = max(abs(expected - found).item(), (one[0].embeddings.grad - other[0].embeddings.grad).abs().max().item())
    return far / allowed((2 * MANY + 1) * sum(counts), SCALE + STRENGTH)


def trials() -> Iterator[tuple[str, float]]:
    """How far the library's result and ours are apart, in bounds."""
    rows = dist.get_world_size() * ROWS
    given = {name: ("MultipleNegativesRankingLoss", choice) for name, choice in CHOICES.items()}
    given["cached"] = "CachedMultipleNegativesRankingLoss", {"mini_batch_size": 3, **CHOICES["all"]}
    for name, (kind, choice) in given.items():
        (theirs, expected), (found, gradient) = (reduced(getattr(x, kind), **choice) for x in (losses, ours))
        far = max(abs(theirs - found).item(), (expected - gradient).abs().max().item())
        yield name, far / allowed((2 * MANY + 1) * rows, SCALE + STRENGTH)
    for mode in ("in_batch_negatives", "hard_negatives"):
        yield f"uneven, {mode}", uneven(**CHOICES["all"], **CHOICES[mode])
