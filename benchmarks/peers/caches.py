"""Gradient caches that are timed beside ``training.cached_step``: an optimizer step of a MiniLM by each.

All train the same encoder on the same random tokens, encode under the encoder's own autocast, compute InfoNCE from
queries to keys under the same autocast, and take the same AdamW step.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import contrastile
from contrastile import training
from contrastile.bench.plain import info_nce

SCALE, TOKENS = 20.0, 32
VOCABULARY, FIRST_WORD = 30522, 1000  # ids below are marks, padding among them
MINILM = {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
Inputs = tuple[Tensor, Tensor]
Step = Callable[[Inputs, int], Tensor]
"""(queries, keys), samples of a chunk -> the loss; adds to every parameter's ``.grad``."""


def cast(x: Tensor) -> Any:
    """Autocast to bfloat16."""
    return torch.autocast(x.device.type, torch.bfloat16)


class Encoder(nn.Module):
    """Token ids to embeddings: hidden states under autocast, their mean over the tokens, unit length.

    Args:
        width: MiniLM's gives a BERT of its shape, any other a linear map of each word. Both have random weights of a
            fixed seed, and no dropout.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        if width != MINILM["hidden_size"]:
            self.hidden: Any = nn.Sequential(nn.Embedding(VOCABULARY, width), nn.Linear(width, width))
        else:
            transformers = importlib.import_module("transformers")
            more = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": None}
            config = transformers.BertConfig(vocab_size=VOCABULARY, **MINILM, **more)
            self.hidden = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(samples, tokens) ids -> (samples, width) float32."""
        with cast(ids):
            found = self.hidden(ids)
        hidden = getattr(found, "last_hidden_state", found)
        return F.normalize(hidden.float().mean(dim=1), dim=1)


def ours(encoder: Encoder) -> Step:
    """``cached_step`` under autocast."""

    def step(inputs: Inputs, chunk: int) -> Tensor:
        with cast(inputs[0]):
            found: Tensor = training.cached_step(
                (encoder, encoder), inputs, contrastile.info_nce, scale=SCALE, chunk=chunk
            )
        return found

    return step


def sentence_transformers(encoder: Encoder) -> Step:
    """Its CachedMultipleNegativesRankingLoss, under autocast as its trainer has it."""
    package = importlib.import_module("sentence_transformers")
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    # the encoder as one of its modules
    module = nn.Module()
    module.encoder = encoder
    module.forward = lambda features, **_: {**features, "sentence_embedding": encoder(features["input_ids"])}
    device = str(next(encoder.parameters()).device)
    model = package.SentenceTransformer(modules=[module], device=device)

    def step(inputs: Inputs, chunk: int) -> Tensor:
        criterion = losses.CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=chunk)
        with cast(inputs[0]):
            loss: Tensor = criterion([{"input_ids": ids} for ids in inputs], None)
        loss.backward()
        return loss.detach()

    return step


def matrix(query: Tensor, key: Tensor) -> Tensor:
    """The loss by the matrix of logits."""
    with cast(query):
        found: Tensor = info_nce(query, key, SCALE)
    return found


def grad_cache(encoder: Encoder) -> Step:
    """The GradCache package, which leaves the loss to its caller: the matrix of logits, as its own loss has it."""
    # its files import each other as grad_cache, and are installed as gradcache
    sys.modules.setdefault("grad_cache", importlib.import_module("gradcache"))
    package = importlib.import_module("gradcache.grad_cache")
    return lambda inputs, chunk: package.GradCache([encoder, encoder], chunk, matrix)(*inputs)


def plain(encoder: Encoder) -> Step:
    """No cache: the activations of the whole batch, whatever the chunk."""

    def step(inputs: Inputs, chunk: int) -> Tensor:
        loss = matrix(encoder(inputs[0]), encoder(inputs[1]))
        loss.backward()
        return loss.detach()

    return step


CACHES: dict[str, Callable[[Encoder], Step]] = {
    "contrastile, cached_step": ours,
    "sentence-transformers, CachedMultipleNegativesRankingLoss": sentence_transformers,
    "GradCache": grad_cache,
    "PyTorch, no cache": plain,
}
"""Makes a step of an encoder; raises what the import of the package raises."""


def step(name: str, b: int, width: int, chunk: int, device: torch.device) -> Callable[[], Tensor]:
    """An optimizer step of b pairs in chunks by one of ``CACHES``; gives the loss."""
    encoder = Encoder(width).to(device)
    make = CACHES[name](encoder)
    # a rate of 0 is the same work, and leaves everybody the same weights
    optimiser = torch.optim.AdamW(encoder.parameters(), lr=0.0)
    ids = torch.randint(FIRST_WORD, VOCABULARY, (2, b, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)

    def call() -> Tensor:
        optimiser.zero_grad()
        loss = make((ids[0], ids[1]), chunk)
        optimiser.step()
        return loss

    return call
