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
    """Make open_clip use this package's losses; call this before ``open_clip_train.main``.

    Returns:
        The names of the losses that stay open_clip's own. They are also logged as a warning.
    """
    # version 3.3 makes losses in factory, by the names imported there; version 4 makes them in its tasks, from loss
    loss_module, factory_module = (importlib.import_module(f"open_clip.{name}") for name in ("loss", "factory"))
    library_names = {name for name, x in vars(loss_module).items() if name.endswith("Loss") and isinstance(x, type)}
    replaced_names = library_names & {name for name in vars(contrastile.nn) if name.endswith("Loss")}
    for name in replaced_names:
        for module in (loss_module, factory_module):
            if hasattr(module, name):
                setattr(module, name, getattr(contrastile.nn, name))
    kept_names = sorted(library_names - replaced_names)
    logging.getLogger(__name__).warning("contrastile: these stay open_clip's own: %s", ", ".join(kept_names) or "none")
    return kept_names


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

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The model's outputs, a dict or a tuple; one backward pass may go through them.

        Args:
            *inputs: the images and texts of the whole batch, as inputs of ``training.cached_step``.
            **named_inputs: further inputs, by the names of the model's parameters.

        Raises:
            TypeError, ValueError: see ``contrastile.training.cached_step``.
        """
        if not torch.is_grad_enabled():
            return self.model(*inputs, **named_inputs)
        names: list[str] = []

        def encode(*chunk: Any) -> Any:
            returned = self.model(*chunk[: len(inputs)], **dict(zip(named_inputs, chunk[len(inputs) :], strict=True)))
            if not isinstance(returned, Mapping):
                return returned
            names[:] = returned
            return tuple(returned.values())

        _, replay = embed(encode, (*inputs, *named_inputs.values()), self.chunk)
        outputs = second_pass(replay, replay.outputs)
        return dict(zip(names, outputs, strict=True)) if names else outputs
