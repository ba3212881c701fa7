"""Our losses of sentence-transformers on several ranks, under DDP, beside the library's of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from sentence_tables import ROWS, Table, allowed, columns
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from torch.nn.parallel import DistributedDataParallel

from contrastile.integrations import sentence_transformers as ours

SCALE, STRENGTH, MANY = 5.0, 3.0, 3
ALL = {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")}
CHOICES: dict[str, dict[str, Any]] = {
    "one direction": {},
    "both": {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"},
    "all": ALL,
    **{
        mode: {**ALL, "hardness_mode": mode, "hardness_strength": STRENGTH}
        for mode in ("in_batch_negatives", "hard_negatives", "all_negatives")
    },
}


def apart(kind: str, more: dict[str, Any], **choice: Any) -> float:
    """Ours with other numbers of rows on each rank, beside the library's loss of the whole batch, in bounds."""
    counts = [ROWS + 2 * rank for rank in range(dist.get_world_size())]
    starts = [MANY * sum(counts[:rank]) for rank in range(len(counts))]
    parts = [columns(MANY, count, start) for count, start in zip(counts, starts, strict=True)]
    whole = [{name: torch.cat([x[name] for x in column]) for name in column[0]} for column in zip(*parts, strict=True)]
    one, other = (SentenceTransformer(modules=[Table(MANY * sum(counts))], device="cpu") for _ in range(2))
    expected = losses.MultipleNegativesRankingLoss(one, scale=SCALE, **choice)(whole, None)
    expected.backward()
    loss = getattr(ours, kind)(other, scale=SCALE, gather_across_devices=True, **choice, **more)
    # as the library's trainer does
    loss.model = DistributedDataParallel(other)
    found = loss(parts[dist.get_rank()], None)
    found.backward()
    far = max(abs(expected - found).item(), (one[0].embeddings.grad - other[0].embeddings.grad).abs().max().item())
    return far / allowed((2 * MANY + 1) * sum(counts), SCALE + STRENGTH)


def trials() -> Iterator[tuple[str, float]]:
    """Every choice of the loss, and the cached one."""
    for name, choice in CHOICES.items():
        yield name, apart("MultipleNegativesRankingLoss", {}, **choice)
    yield "cached", apart("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 3}, **CHOICES["all"])
