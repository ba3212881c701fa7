"""Finds layers that break the gradient cache's rule: an embedding depends on its own sample alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm


def warn_of_coupled(modules: Sequence[nn.Module]) -> bool:
    """Warn of layers whose outputs depend on other samples or on the number of forwards; True if there are any."""
    has_coupled = False
    for module in modules:
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
                kind = type(layer).__name__
            elif layer.training and (
                (isinstance(layer, _SpectralNorm) and any(True for _ in layer.buffers()))
                or any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values())
            ):
                kind, name = "spectral_norm", f".{name}".partition(".parametrizations.")[0][1:]
            else:
                continue
            has_coupled = True
            warnings.warn(
                f"{kind} {name or 'itself'!r} computes a chunk otherwise than the whole batch, and its buffers, if "
                "any, move in both passes: the gradients are not those of the batch; call its .eval(), for which "
                "BatchNorm needs running averages, or use LayerNorm, GroupNorm or weight_norm",
                stacklevel=4,
            )
    return has_coupled
