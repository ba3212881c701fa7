"""The features of transformers' image-text models, without the matrix of logits that their forward forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        return _features(self.model.get_image_features, inputs)

    def encode_text(self, inputs: dict[str, Tensor]) -> Tensor:
        """(b, d) features of unit length of the texts' inputs, such as ``input_ids``."""
        return _features(self.model.get_text_features, inputs)


def _features(get: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
    given = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    nothing = any(len(x) == 0 for x in given.values())
    if nothing:  # their attention cannot reshape a batch without samples, which a rank may have
        given = {name: x.new_full((1, *x.shape[1:]), not name.endswith("ids")) for name, x in given.items()}
    found = get(**{**inputs, **given})
    # an output object since version 5 of transformers
    unit = normalize(found if isinstance(found, Tensor) else found.pooler_output, dim=-1)
    return unit[:0] if nothing else unit
