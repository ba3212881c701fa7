"""open_clip's training loop, as it is, at a batch whose activations do not fit, and its command with these losses.

Its loss classes are in ``contrastile.nn``: ``ClipLoss``, ``CoCaLoss``, ``DistillClipLoss`` and ``SigLipLoss``.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import contrastile.nn
from contrastile.training import embed
from contrastile.training.cache import second_pass


def replace_losses() -> list[str]:
    """Have open_clip make this package's losses: call it before ``open_clip_train.main``.

    Returns:
        The names of the losses that stay open_clip's own, which are logged as a warning too.
    """
    # version 3.3 makes them in factory, by the names that it has imported; version 4 in its tasks, by those in loss
    loss, factory = (importlib.import_module(f"open_clip.{name}") for name in ("loss", "factory"))
    theirs = {name for name, x in vars(loss).items() if name.endswith("Loss") and isinstance(x, type)}
    ours = theirs & {name for name in vars(contrastile.nn) if name.endswith("Loss")}
    for name in ours:
        for module in (loss, factory):
            if hasattr(module, name):
                setattr(module, name, getattr(contrastile.nn, name))
    left = sorted(theirs - ours)
    logging.getLogger(__name__).warning("contrastile: these stay open_clip's own: %s", ", ".join(left) or "none")
    return left


class ChunkedModel(nn.Module):
    """A model that encodes a batch in chunks, without a graph, and again in the backward pass.

    For loops that call ``model(images, texts)``, a loss and ``loss.backward()``, such as open_clip's
    ``train_one_epoch``. The second pass draws the first one's random numbers, and DDP reduces once.

    Args:
        model: a model of open_clip, or DDP of one; its outputs have a row for each sample, or are numbers such as
            ``logit_scale``.
        chunk: pairs per chunk.
    """

    def __init__(self, model: nn.Module, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.chunk = chunk

    @property
    def module(self) -> nn.Module:
        """The model itself, without DDP: open_clip's loop clamps its ``logit_scale``."""
        inner: Any = self.model
        while isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        return inner  # type: ignore[no-any-return]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the model returns, a dict or a tuple; ``backward`` may go through it once.

        Args:
            *inputs: the images and texts of the whole batch, tensors or what ``training.cached_step`` takes.
            **named: likewise, by the names of the model's arguments.

        Raises:
            TypeError, ValueError: see ``contrastile.training.cached_step``.
        """
        if not torch.is_grad_enabled():
            return self.model(*inputs, **named)
        names: list[str] = []

        def encode(*chunk: Any) -> Any:
            found = self.model(*chunk[: len(inputs)], **dict(zip(named, chunk[len(inputs) :], strict=True)))
            if not isinstance(found, Mapping):
                return found
            names[:] = found
            return tuple(found.values())

        _, replay = embed(encode, (*inputs, *named.values()), self.chunk)
        outputs = second_pass(replay, replay.outputs)
        return dict(zip(names, outputs, strict=True)) if names else outputs
