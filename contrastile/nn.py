"""torch modules with open_clip's call signatures, so that a training loop changes one import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from contrastile import losses

Tile = int | tuple[int, int] | None


class _Loss(torch.nn.Module):
    """What every loss module keeps: how its loss is computed, and with whom."""

    def __init__(
        self,
        *,
        backend: str = "auto",
        tile: Tile = None,
        precision: str = "ieee",
        group: Any = None,
        exchange: str = "auto",
        parameter_reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.backend, self.tile, self.precision = backend, tile, precision
        self.group, self.exchange, self.parameter_reduction = group, exchange, parameter_reduction

    @property
    def _settings(self) -> dict[str, Any]:
        alone = {"backend": self.backend, "tile": self.tile, "precision": self.precision}
        together = {"exchange": self.exchange, "parameter_reduction": self.parameter_reduction}
        return alone | {"group": self.group} | together

    def extra_repr(self) -> str:
        """The settings that are not the usual ones, with backend and tile, for print(module)."""
        usual = {"precision": "ieee", "group": None, "exchange": "auto", "parameter_reduction": "mean"}
        shown = {name: value for name, value in self._settings.items() if usual.get(name, ...) != value}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class ClipLoss(_Loss):
    """Symmetric CLIP loss, called as open_clip's ``ClipLoss``: see ``contrastile.clip_loss``.

    Args:
        backend: "auto", or a name from ``contrastile.backends.names()``, or "module:attribute".
        tile: largest tile of logits to hold; None lets the backend choose.
        precision: see ``contrastile.clip_loss``.
        group: the processes that share the batch, e.g. "world"; None is this process alone.
        exchange: see ``contrastile.clip_loss``.
        parameter_reduction: see ``contrastile.clip_loss``; "mean" is right under DDP and FSDP.
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
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.clip_loss``.
        """
        loss = losses.clip_loss(image_features, text_features, logit_scale, **self._settings)
        if logit_bias is not None:
            # zero, but a parameter that took part: DDP would otherwise wait for its gradient
            loss = loss + 0.0 * logit_bias.sum()
        return _result(loss, output_dict)


class SigLipLoss(_Loss):
    """Sigmoid loss, called as open_clip's ``SigLipLoss``: see ``contrastile.sigmoid_loss``.

    Args:
        backend: "auto", or a name from ``contrastile.backends.names()``, or "module:attribute".
        tile: largest tile of logits to hold; None lets the backend choose.
        precision: see ``contrastile.sigmoid_loss``.
        group: the processes that share the batch, e.g. "world"; None is this process alone.
        exchange: see ``contrastile.sigmoid_loss``.
        parameter_reduction: see ``contrastile.sigmoid_loss``; "mean" is right under DDP and FSDP.
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
            TypeError, ValueError, BackendUnavailableError, UnsupportedProblemError, MismatchError, ExchangeError: see
                ``contrastile.sigmoid_loss``.
        """
        loss = losses.sigmoid_loss(image_features, text_features, logit_scale, logit_bias, **self._settings)
        return _result(loss, output_dict)


def _result(loss: Any, output_dict: bool) -> Tensor | dict[str, Tensor]:
    return {"contrastive_loss": loss} if output_dict else loss
