"""sentence-transformers' losses on several ranks, under DDP: the gradients of the one global loss."""

from __future__ import annotations

import itertools
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
from sentence_transformers.util import cos_sim, dot_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contrastile.integrations import sentence_transformers as ours

SCALE, STRENGTH = 5.0, 3.0
FURTHER = "query_to_query", "doc_to_query", "doc_to_doc"
MODES = None, "in_batch_negatives", "hard_negatives", "all_negatives"


def settings() -> Iterator[dict[str, Any]]:
    """Every choice that the library offers beside the similarity."""
    for many in range(len(FURTHER) + 1):
        for further in itertools.combinations(FURTHER, many):
            for partition in ("joint", "per_direction"):
                if partition == "joint" or not {"query_to_query", "doc_to_doc"} & set(further):
                    for mode in MODES:
                        yield {
                            "directions": ("query_to_doc", *further),
                            "partition_mode": partition,
                            "hardness_mode": mode,
                            "hardness_strength": STRENGTH if mode else 0.0,
                        }


def without_duplicates(model: Any, given: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The loss of the whole matrix, where a document equal to a query's own is no negative."""
    query, *keys = (nn.functional.normalize(model(dict(x))["sentence_embedding"], dim=1) for x in given)
    texts = torch.cat([x["input_ids"][:, 0] for x in given[1:]])
    equal = (texts[: len(query), None] == texts).fill_diagonal_(False)
    assert equal.sum() == 4
    logits = (SCALE * query @ torch.cat(keys).T).masked_fill(equal, -torch.inf)
    return nn.functional.cross_entropy(logits, torch.arange(len(query)))


def apart(kind: str, more: dict[str, Any], documents: int = 2, **choice: Any) -> float:
    """Ours with other numbers of rows on each rank, beside the library's loss of the whole batch, in bounds."""
    counts = [ROWS + 2 * rank for rank in range(dist.get_world_size())]
    many = 1 + documents
    starts = [many * sum(counts[:rank]) for rank in range(len(counts))]
    parts = [columns(many, count, start) for count, start in zip(counts, starts, strict=True)]
    if masked := "mask_duplicates" in more:
        parts[1][1]["input_ids"][2] = parts[1][2]["input_ids"][0] = parts[0][1]["input_ids"][1]
        for part in parts:
            part[2] = {name: nn.functional.pad(x, (0, 2)) for name, x in part[2].items()}
    whole = [{name: torch.cat([x[name] for x in column]) for name in column[0]} for column in zip(*parts, strict=True)]
    one, other = (SentenceTransformer(modules=[Table(many * sum(counts))], device="cpu") for _ in range(2))
    library = losses.MultipleNegativesRankingLoss(one, scale=SCALE, **choice)
    expected = without_duplicates(one, whole) if masked else library(whole, None)
    expected.backward()
    loss = getattr(ours, kind)(other, scale=SCALE, gather_across_devices=True, **choice, **more)
    # as the library's trainer does
    loss.model = DistributedDataParallel(other)
    found = loss(parts[dist.get_rank()], None)
    found.backward()
    far = max(abs(expected - found).item(), (one[0].embeddings.grad - other[0].embeddings.grad).abs().max().item())
    return far / allowed((2 * many + 1) * sum(counts), SCALE + STRENGTH)


def trials() -> Iterator[tuple[str, float]]:
    """Every choice of the loss, and the cached one, which passes on what it was given."""
    similarities = {1: cos_sim, 2: dot_score, 3: cos_sim}
    for choice, (documents, similarity) in itertools.product(settings(), similarities.items()):
        found = apart("MultipleNegativesRankingLoss", {}, documents, similarity_fct=similarity, **choice)
        yield f"{documents} of {choice}".replace(": ", " "), found
    both = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    given = {**both, "similarity_fct": dot_score, "hardness_mode": "all_negatives", "hardness_strength": 2.0}
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
