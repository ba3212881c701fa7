"""torch modules with open_clip's call signatures, so that a training loop changes one import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contrastile import losses

Tile = int | tuple[int, int] | None


class _Loss(torch.nn.Module):
    """What every loss module keeps: which backend computes it, and how large its tiles may be."""

    def __init__(self, *, backend: str = "auto", tile: Tile = None) -> None:
        super().__init__()
        self.backend, self.tile = backend, tile

    def extra_repr(self) -> str:
        """The settings, for print(module)."""
        return f"backend={self.backend!r}, tile={self.tile!r}"


class ClipLoss(_Loss):
    """Symmetric CLIP loss, called as open_clip's ``ClipLoss``: see ``contrastile.clip_loss``.

    Args:
        backend: "auto", or a name from ``contrastile.backends.names()``, or "module:attribute".
        tile: largest tile of logits to hold; None lets the backend choose.
    """

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, or ``{"contrastive_loss": loss}`` with ``output_dict``.

        Args:
            image_features: (b, d), normalised by the caller.
            text_features: (b, d).
            logit_scale: the factor itself, exp of the learned parameter, as open_clip passes it.
            logit_bias: a softmax does not feel it; its gradient is 0.
            output_dict: whether to return a dict.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError: see ``contrastile.clip_loss``.
        """
        loss = losses.clip_loss(image_features, text_features, logit_scale, backend=self.backend, tile=self.tile)
        if logit_bias is not None:
            # zero, but a parameter that took part: DDP would otherwise wait for its gradient
            loss = loss + 0.0 * logit_bias.sum()
        return _result(loss, output_dict)


class SigLipLoss(_Loss):
    """Sigmoid loss, called as open_clip's ``SigLipLoss``: see ``contrastile.sigmoid_loss``.

    Args:
        backend: "auto", or a name from ``contrastile.backends.names()``, or "module:attribute".
        tile: largest tile of logits to hold; None lets the backend choose.
    """

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float,
        output_dict: bool = False,
    ) -> Tensor | dict[str, Tensor]:
        """The loss, or ``{"contrastive_loss": loss}`` with ``output_dict``.

        Args:
            image_features: (b, d), normalised by the caller.
            text_features: (b, d).
            logit_scale: the factor itself, exp of the learned parameter, as open_clip passes it.
            logit_bias: added to every logit; SigLIP starts it at -10.
            output_dict: whether to return a dict.

        Raises:
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError: see ``contrastile.sigmoid_loss``.
        """
        loss = losses.sigmoid_loss(
            image_features, text_features, logit_scale, logit_bias, backend=self.backend, tile=self.tile
        )
        return _result(loss, output_dict)


def _result(loss: Any, output_dict: bool) -> Tensor | dict[str, Tensor]:
    return {"contrastive_loss": loss} if output_dict else loss
