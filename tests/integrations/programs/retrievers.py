"""Retrieval packages for ``matrix.py``: an encoder, and the loss of each package or of its recipe."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import tiny_models
import torch
from recipes import recipe
from torch import Tensor, nn

NEGATIVES = 2
Batch = dict[str, Tensor]


class Encoder(nn.Module):
    """An encoder from ids to the embedding of the first word."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = tiny_models.bert(20)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bert(ids).last_hidden_state[:, 0]


def tevatron(encoder: Any, batch: Batch, ours: bool) -> Tensor:
    from tevatron.modeling import DenseModel

    kind = recipe("Tevatron")["Dense"] if ours else DenseModel
    args = Namespace(negatives_x_device=ours, per_device_train_batch_size=len(batch["query"]))
    model = kind(encoder.bert, encoder.bert, None, None, Namespace(train_n_passages=1 + NEGATIVES), args)
    return model({"input_ids": batch["query"]}, {"input_ids": batch["passages"].flatten(0, 1)}).loss


def flag_embedding(encoder: Any, batch: Batch, ours: bool) -> Tensor:
    from FlagEmbedding.finetune.embedder.encoder_only.base import BiEncoderOnlyEmbedderModel

    kind = recipe("FlagEmbedding")["Embedder"] if ours else BiEncoderOnlyEmbedderModel
    model = kind(encoder.bert, negatives_cross_device=ours, temperature=0.1, normalize_embeddings=True)
    inputs = (
        {"input_ids": x, "attention_mask": torch.ones_like(x)}
        for x in (batch["query"], batch["passages"].flatten(0, 1))
    )
    return model(*inputs, teacher_scores=batch["teacher"].tolist()).loss


def nemo_automodel(encoder: Any, batch: Batch, ours: bool) -> Tensor:
    from nemo_automodel.components.loss.infonce import InfoNCELoss

    loss = recipe("NeMo Automodel")["Loss"]() if ours else InfoNCELoss(cross_device_negatives=False)
    passages = encoder(batch["passages"].flatten(0, 1)).unflatten(0, (-1, 1 + NEGATIVES))
    exists = torch.arange(NEGATIVES) < batch["counts"][:, None]
    return loss(encoder(batch["query"]), passages[:, 0], passages[:, 1:], exists)


def gradcache(encoder: Any, batch: Batch, ours: bool) -> Tensor:
    """The package's loss, or ours in the package's cache, which also makes the backward pass."""
    from gradcache.loss import SimpleContrastiveLoss

    inputs = batch["query"], batch["passages"].flatten(0, 1)
    if not ours:
        return SimpleContrastiveLoss(NEGATIVES)(*map(encoder, inputs))
    is_wrapped: Any = isinstance(encoder, nn.parallel.DistributedDataParallel)
    return recipe("GradCache")["cached"]([encoder, encoder], 4, "world")(*inputs, no_sync_except_last=is_wrapped)


class ModelWithLoss(nn.Module):
    """A model whose forward pass returns the loss, as most models of these packages do."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss, self.encoder = loss, Encoder()

    def forward(self, batch: Batch, ours: bool) -> Tensor:
        return self.loss(self.encoder, batch, ours)


def batch(pairs: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    sizes = {"query": (pairs, 6), "passages": (pairs, 1 + NEGATIVES, 6)}
    words = {name: torch.randint(5, 20, size, generator=generator) for name, size in sizes.items()}
    teacher = torch.randn(pairs, 1 + NEGATIVES, generator=generator)
    return {**words, "teacher": teacher, "counts": torch.arange(pairs) % (1 + NEGATIVES)}
