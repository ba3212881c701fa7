"""sentence-transformers' losses on several ranks, under DDP: the gradients of the one global loss."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / x) for x in (".", "integrations", "comm/programs"))

import torch
import torch.distributed as dist
from engines import say
from sentence_tables import ROWS, Table, allowed, columns
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import dot_score
from torch import nn
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


def without_duplicates(model: Any, given: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The loss of the whole matrix, where a document equal to a query's own is no negative."""
    query, *keys = (nn.functional.normalize(model(dict(x))["sentence_embedding"], dim=1) for x in given)
    texts = torch.cat([x["input_ids"][:, 0] for x in given[1:]])
    equal = (texts[: len(query), None] == texts).fill_diagonal_(False)
    assert equal.sum() == 4
    logits = (SCALE * query @ torch.cat(keys).T).masked_fill(equal, -torch.inf)
    return nn.functional.cross_entropy(logits, torch.arange(len(query)))


def apart(kind: str, more: dict[str, Any], **choice: Any) -> float:
    """Ours with other numbers of rows on each rank, beside the library's loss of the whole batch, in bounds."""
    counts = [ROWS + 2 * rank for rank in range(dist.get_world_size())]
    starts = [MANY * sum(counts[:rank]) for rank in range(len(counts))]
    parts = [columns(MANY, count, start) for count, start in zip(counts, starts, strict=True)]
    if masked := "mask_duplicates" in more:
        parts[1][1]["input_ids"][2] = parts[1][2]["input_ids"][0] = parts[0][1]["input_ids"][1]
        for part in parts:
            part[2] = {name: nn.functional.pad(x, (0, 2)) for name, x in part[2].items()}
    whole = [{name: torch.cat([x[name] for x in column]) for name in column[0]} for column in zip(*parts, strict=True)]
    one, other = (SentenceTransformer(modules=[Table(MANY * sum(counts))], device="cpu") for _ in range(2))
    library = losses.MultipleNegativesRankingLoss(one, scale=SCALE, **choice)
    expected = without_duplicates(one, whole) if masked else library(whole, None)
    expected.backward()
    loss = getattr(ours, kind)(other, scale=SCALE, gather_across_devices=True, **choice, **more)
    # as the library's trainer does
    loss.model = DistributedDataParallel(other)
    found = loss(parts[dist.get_rank()], None)
    found.backward()
    far = max(abs(expected - found).item(), (one[0].embeddings.grad - other[0].embeddings.grad).abs().max().item())
    return far / allowed((2 * MANY + 1) * sum(counts), SCALE + STRENGTH)


def trials() -> Iterator[tuple[str, float]]:
    """Every choice of the loss, and the cached one, which passes on what it was given."""
    for name, choice in CHOICES.items():
        yield name, apart("MultipleNegativesRankingLoss", {}, **choice)
    given = {**CHOICES["both"], "similarity_fct": dot_score, "hardness_mode": "all_negatives", "hardness_strength": 2.0}
    more = {"mini_batch_size": 3, "settings": {"tile": 8}}
    yield "cached", apart("CachedMultipleNegativesRankingLoss", more, **given)
    for kind in ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"):
        yield f"duplicates, {kind}", apart(kind, {"mask_duplicates": True})


def main() -> None:
    # libraries warn of other versions of torch, and say how they start
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    for name, ratio in trials():
        say(dist.get_rank(), f"{name}: {ratio:.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
