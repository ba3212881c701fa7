"""The features of transformers' image-text models, without the matrix of logits that their forward forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import normalize

_TEXT = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
_FORWARDED = {"base_model_prefix", "config", "device", "dtype", "enable_input_require_grads"}
_FORWARDED |= {f"{kind}_checkpointing_{verb}" for kind in ("gradient", "activation") for verb in ("enable", "disable")}
_FORWARDED |= {"is_gradient_checkpointing", "is_activation_checkpointing"}
"""Attributes that a ``Trainer`` and peft read from a model, besides ``forward`` and its weights."""


class ImageTextFeatures(nn.Module):
    """A ``CLIPModel``, ``SiglipModel`` or ``ClapModel`` whose forward returns the arguments of a contrastive loss.

    Wrap this module in DDP, or hand it to a ``Trainer``, instead of the model: both call ``forward``. It loads the
    model's own state dict as well as its own, whose names begin with ``model``.

    Args:
        model: has ``get_image_features`` or ``get_audio_features``, ``get_text_features`` and ``logit_scale``; with
            ``logit_bias`` a sigmoid loss's model. A ``ClapModel`` has two scales, of audio and of text.
    """

    accepts_loss_kwargs = False
    """Read by a ``Trainer``: it divides the loss, a mean, by the accumulated steps, with labels too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name) if name in _FORWARDED else super().__getattr__(name)

    @classmethod
    def from_pretrained(cls, *args: Any, **settings: Any) -> ImageTextFeatures:
        """The features of ``transformers.AutoModel.from_pretrained(...)``."""
        transformers: Any = import_module("transformers")  # the rest of this module does not need it
        return cls(transformers.AutoModel.from_pretrained(*args, **settings))

    def save_pretrained(self, folder: Any, *, state_dict: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """Save the wrapped model, for its own ``from_pretrained``; ``state_dict`` has the names of this module."""
        model_state = None if state_dict is None else {name.removeprefix("model."): x for name, x in state_dict.items()}
        self.model.save_pretrained(folder, state_dict=model_state, **settings)

    def forward(self, return_loss: bool = True, **inputs: Tensor) -> tuple[Tensor, ...]:
        """(b, d) features of images or audio and of texts, of unit length, the scales, and the bias if there is one.

        Args:
            return_loss: not used; its default tells a ``Trainer`` to ask ``compute_loss`` for an ``eval_loss``.
            **inputs: what the model's processor gives: ``pixel_values``, ``input_ids``, ``attention_mask``.
        """
        image = self.encode_image({name: x for name, x in inputs.items() if name not in _TEXT})
        text = self.encode_text({name: x for name, x in inputs.items() if name in _TEXT})
        scale_names = ("logit_scale", "logit_scale_a", "logit_scale_t")
        numbers = [getattr(self.model, name).exp() for name in scale_names if hasattr(self.model, name)]
        if hasattr(self.model, "logit_bias"):
            # a view, because a forward pass must not return a parameter itself
            numbers.append(self.model.logit_bias.view_as(self.model.logit_bias))
        return (image, text, *numbers)

    def encode_image(self, inputs: dict[str, Tensor]) -> Tensor:
        """(b, d) features of unit length of the inputs of images or audio, such as ``pixel_values``."""
        get_audio_features = getattr(self.model, "get_audio_features", None)
        return _features(get_audio_features or self.model.get_image_features, inputs)

    def encode_text(self, inputs: dict[str, Tensor]) -> Tensor:
        """(b, d) features of unit length of the texts' inputs, such as ``input_ids``."""
        return _features(self.model.get_text_features, inputs)


def _add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before loading, change the names in a state dict of the model itself to those of this module."""
    expected = module.state_dict(prefix=prefix)
    for name in [x for x in state_dict if x.startswith(prefix) and x not in expected]:
        prefixed = f"{prefix}model.{name.removeprefix(prefix)}"
        if prefixed in expected:
            state_dict[prefixed] = state_dict.pop(name)


def _features(get: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensor:
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    is_empty = any(len(x) == 0 for x in tensors.values())
    if is_empty:  # attention layers cannot reshape a batch without samples, which a rank may have
        tensors = {name: x.new_full((1, *x.shape[1:]), not name.endswith("ids")) for name, x in tensors.items()}
    output = get(**{**inputs, **tensors})
    # since version 5, transformers returns an output object
    features = normalize(output if isinstance(output, Tensor) else output.pooler_output, dim=-1)
    return features[:0] if is_empty else features
