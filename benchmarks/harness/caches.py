"""Gradient caches: the encoder that they train, and a step of each by name. What is not torch's is imported when asked.

Everybody encodes by the same encoder, whose forward brings its own autocast, and computes InfoNCE from queries to keys
under the same autocast. ``around`` takes the encoder's away, as trainers have it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import contrastile
from contrastile import training
from harness.peers import plain_info_nce

SCALE = 20.0
VOCABULARY, FIRST_WORD = 30522, 1000  # ids below are marks, padding among them
MINILM = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
Inputs = tuple[Tensor, Tensor]
Step = Callable[[Inputs, int], Tensor]
"""(queries, keys), samples of a chunk -> the loss; adds to every parameter's ``.grad``."""


class Encoder(nn.Module):
    """Token ids to embeddings: hidden states under autocast, their mean over the tokens, unit length.

    Args:
        tiny: a linear map of each word in place of a BERT of MiniLM's shape. Both have random weights of a fixed seed,
            and no dropout.
    """

    def __init__(self, *, tiny: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = 16 if tiny else MINILM["hidden_size"]
        self.autocast = self.brings_autocast = True
        if tiny:
            self.hidden: Any = nn.Sequential(nn.Embedding(VOCABULARY, self.width), nn.Linear(self.width, self.width))
        else:
            transformers = importlib.import_module("transformers")
            more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": None}
            config = transformers.BertConfig(vocab_size=VOCABULARY, **MINILM, **more)
            self.hidden = transformers.BertModel(config, add_pooling_layer=False)

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return next(self.parameters()).device

    def cast(self) -> Any:
        """Autocast to bfloat16, unless it is turned off."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast)

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, tokens) ids -> (samples, width) float32."""
        with self.cast() if self.brings_autocast else nullcontext():
            found = self.hidden(ids)
        hidden = getattr(found, "last_hidden_state", found)
        return F.normalize(hidden.float().mean(dim=1), dim=1)


class Features(nn.Module):
    """The encoder as a module of sentence-transformers."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """The features and their embedding."""
        return {**features, "sentence_embedding": self.encoder(features["input_ids"])}


def ours(encoder: Encoder) -> Step:
    """``cached_step`` under autocast."""

    def step(inputs: Inputs, chunk: int) -> Tensor:
        towers = encoder, encoder
        with encoder.cast():
            found: Tensor = training.cached_step(towers, inputs, contrastile.info_nce, scale=SCALE, chunk=chunk)
        return found

    return step


def by_hand(encoder: Encoder) -> Step:
    """A gradient cache of fifteen lines, which keeps no random state and knows one process."""

    def step(inputs: Inputs, chunk: int) -> Tensor:
        with torch.no_grad():
            features = [torch.cat([encoder(x) for x in ids.split(chunk)]) for ids in inputs]
        for embedded in features:
            embedded.requires_grad_()
        with encoder.cast():
            loss = contrastile.info_nce(features[0], features[1], SCALE)
        loss.backward()
        for ids, embedded in zip(inputs, features, strict=True):
            assert embedded.grad is not None
            for x, gradient in zip(ids.split(chunk), embedded.grad.split(chunk), strict=True):
                (encoder(x) * gradient).sum().backward()
        return loss.detach()

    return step


def sentence_transformers(encoder: Encoder) -> Step:
    """Its CachedMultipleNegativesRankingLoss, under autocast as its trainer has it."""
    package = importlib.import_module("sentence_transformers")
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    model = package.SentenceTransformer(modules=[Features(encoder)], device=str(encoder.device))

    def step(inputs: Inputs, chunk: int) -> Tensor:
        criterion = losses.CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=chunk)
        with encoder.cast():
            loss = criterion([{"input_ids": ids} for ids in inputs], None)
        loss.backward()
        found: Tensor = loss.detach()
        return found

    return step


def grad_cache(encoder: Encoder) -> Step:
    """The GradCache package, which leaves the loss to its caller: the matrix of logits, as its own loss has it."""
    # its files import each other as grad_cache, and are installed as gradcache
    sys.modules.setdefault("grad_cache", importlib.import_module("gradcache"))
    package = importlib.import_module("gradcache.grad_cache")

    def loss(query: Tensor, key: Tensor) -> Tensor:
        with encoder.cast():
            found: Tensor = plain_info_nce(query, key, SCALE)
        return found

    return lambda inputs, chunk: package.GradCache([encoder, encoder], chunk, loss)(*inputs)


def plain(encoder: Encoder) -> Step:
    """No cache: the activations of the whole batch, whatever the chunk."""

    def step(inputs: Inputs, chunk: int) -> Tensor:
        features = [encoder(ids) for ids in inputs]
        with encoder.cast():
            loss = plain_info_nce(features[0], features[1], SCALE)
        loss.backward()
        return loss.detach()

    return step


def around(make: Callable[[Encoder], Step], encoder: Encoder) -> Step:
    """A step of an encoder that brings no autocast: what of the call its author has put under one alone has it."""
    step = make(encoder)

    def under(inputs: Inputs, chunk: int) -> Tensor:
        encoder.brings_autocast = False
        try:
            return step(inputs, chunk)
        finally:
            encoder.brings_autocast = True

    return under


OURS, PLAIN = "contrastile, cached_step", "PyTorch, no cache"
CACHES: dict[str, Callable[[Encoder], Step]] = {
    OURS: ours,
    "fifteen lines around info_nce": by_hand,
    "sentence-transformers, CachedMultipleNegativesRankingLoss": sentence_transformers,
    "GradCache": grad_cache,
    "autocast around the call: contrastile, cached_step": partial(around, ours),
    "autocast around the call: sentence-transformers": partial(around, sentence_transformers),
}
"""Makes a step of an encoder; raises what the import of the package raises."""
