"""The features of transformers' image-text models, without the matrix of logits that their forward forms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import normalize

_TEXT = ("input_ids", "attention_mask", "position_ids", "token_type_ids")


class ImageTextFeatures(nn.Module):
    """A ``CLIPModel`` or ``SiglipModel`` that gives what a contrastive loss takes.

    Wrap this module in DDP, or hand it to a ``Trainer``, instead of the model: both call ``forward``.

    Args:
        model: has ``get_image_features``, ``get_text_features`` and ``logit_scale``; with ``logit_bias`` a sigmoid
            loss's model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        """(b, d) features of the images and of the texts, of unit length, the scale, and the bias if there is one.

        Args:
            **inputs: what the model's processor gives: ``pixel_values``, ``input_ids``, ``attention_mask``.
        """
        image = self.encode_image({name: x for name, x in inputs.items() if name not in _TEXT})
        text = self.encode_text({name: x for name, x in inputs.items() if name in _TEXT})
        numbers = [self.model.logit_scale.exp()]
        if hasattr(self.model, "logit_bias"):
            # a view: what leaves a forward is no parameter
            numbers.append(self.model.logit_bias.view_as(self.model.logit_bias))
        return (image, text, *numbers)

    def encode_image(self, inputs: dict[str, Tensor]) -> Tensor:
        """(b, d) features of unit length of the images' inputs, such as ``pixel_values``."""
        return _unit(self.model.get_image_features(**inputs))

    def encode_text(self, inputs: dict[str, Tensor]) -> Tensor:
        """(b, d) features of unit length of the texts' inputs, such as ``input_ids``."""
        return _unit(self.model.get_text_features(**inputs))


def _unit(features: Any) -> Tensor:
    # an output object since version 5 of transformers
    return normalize(features if isinstance(features, Tensor) else features.pooler_output, dim=-1)
