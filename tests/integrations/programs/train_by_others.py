"""Losses of sentence-transformers on several ranks, under DDP: the gradients are those of the global loss."""

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
from sentence_tables import ROWS, Table, columns, tolerance
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import cos_sim, dot_score
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from contrastile.integrations import sentence_transformers as ours

SCALE, STRENGTH = 5.0, 3.0
OTHER_DIRECTIONS = "query_to_query", "doc_to_query", "doc_to_doc"
MODES = None, "in_batch_negatives", "hard_negatives", "all_negatives"


def settings() -> Iterator[dict[str, Any]]:
    """All options of the library's loss except the similarity."""
    for count in range(len(OTHER_DIRECTIONS) + 1):
        for others in itertools.combinations(OTHER_DIRECTIONS, count):
            for partition in ("joint", "per_direction"):
                if partition == "joint" or not {"query_to_query", "doc_to_doc"} & set(others):
                    for mode in MODES:
                        yield {
                            "directions": ("query_to_doc", *others),
                            "partition_mode": partition,
                            "hardness_mode": mode,
                            "hardness_strength": STRENGTH if mode else 0.0,
                        }


def without_duplicates(model: Any, inputs: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The loss of the whole matrix, where a document that equals the query's positive is no negative."""
    query, *keys = (nn.functional.normalize(model(dict(x))["sentence_embedding"], dim=1) for x in inputs)
    texts = torch.cat([x["input_ids"][:, 0] for x in inputs[1:]])
    is_duplicate = (texts[: len(query), None] == texts).fill_diagonal_(False)
    assert is_duplicate.sum() == 4
    logits = (SCALE * query @ torch.cat(keys).T).masked_fill(is_duplicate, -torch.inf)
    return nn.functional.cross_entropy(logits, torch.arange(len(query)))


def relative_error(kind: str, options: dict[str, Any], documents: int = 2, **choice: Any) -> float:
    """The error of our loss on uneven shards, relative to its bound, against the library's loss of the whole batch."""
    counts = [ROWS + 2 * rank for rank in range(dist.get_world_size())]
    sides = 1 + documents
    starts = [sides * sum(counts[:rank]) for rank in range(len(counts))]
    shards = [columns(sides, count, start) for count, start in zip(counts, starts, strict=True)]
    if masks_duplicates := "mask_duplicates" in options:
        shards[1][1]["input_ids"][2] = shards[1][2]["input_ids"][0] = shards[0][1]["input_ids"][1]
        for part in shards:
            part[2] = {name: nn.functional.pad(x, (0, 2)) for name, x in part[2].items()}
    batch = [{name: torch.cat([x[name] for x in column]) for name in column[0]} for column in zip(*shards, strict=True)]
    theirs, mine = (SentenceTransformer(modules=[Table(sides * sum(counts))], device="cpu") for _ in range(2))
    library = losses.MultipleNegativesRankingLoss(theirs, scale=SCALE, **choice)
    expected = without_duplicates(theirs, batch) if masks_duplicates else library(batch, None)
    expected.backward()
    loss = getattr(ours, kind)(mine, scale=SCALE, gather_across_devices=True, **choice, **options)
    # the library's trainer sets this attribute, too
    loss.model = DistributedDataParallel(mine)
    value = loss(shards[dist.get_rank()], None)
    value.backward()
    error = max(abs(expected - value).item(), (theirs[0].embeddings.grad - mine[0].embeddings.grad).abs().max().item())
    return error / tolerance((2 * sides + 1) * sum(counts), SCALE + STRENGTH)


def trials() -> Iterator[tuple[str, float]]:
    """All options of the loss, and the cached loss, which passes its options on."""
    similarities = {1: cos_sim, 2: dot_score, 3: cos_sim}
    for choice, (documents, similarity) in itertools.product(settings(), similarities.items()):
        error = relative_error("MultipleNegativesRankingLoss", {}, documents, similarity_fct=similarity, **choice)
        yield f"{documents} of {choice}".replace(": ", " "), error
    directions = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    chosen = {**directions, "similarity_fct": dot_score, "hardness_mode": "all_negatives", "hardness_strength": 2.0}
    options = {"mini_batch_size": 3, "settings": {"tile": 8}}
    yield "cached", relative_error("CachedMultipleNegativesRankingLoss", options, **chosen)
    for kind in ("MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"):
        yield f"duplicates, {kind}", relative_error(kind, {"mask_duplicates": True})


def main() -> None:
    # libraries warn of other versions of torch, and log their start
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    for name, ratio in trials():
        say(dist.get_rank(), f"{name}: {ratio:.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
