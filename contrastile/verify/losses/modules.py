"""The modules of ``contrastile.nn`` as losses under test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from contrastile import losses
from contrastile.backends.contract import Array

Target = Callable[..., Any]

PRIMITIVES: dict[str, Any] = {"keep": 0}
"""Settings with which a small loss on a host is computed as any other is."""

ROWS = 64
"""The most rows of a loss whose arithmetic is plain, and of a rank."""


def module(loss: Target, settings: dict[str, Any], *, trains: bool = True) -> Target:
    """The modules of ``contrastile.nn``, which return a dict in training and a tensor in evaluation."""
    import torch

    from contrastile import nn

    kind = nn.ClipLoss if loss is losses.clip_loss else nn.SigLipLoss
    settings = settings | PRIMITIVES if trains else settings
    # what other modules were made with is theirs
    kind(world_size=2)
    kind(world_size=2, parameter_reduction="sum")
    group = settings.get("group")
    place: Any = {} if group is None else {"rank": torch.tensor(group.rank), "world_size": torch.tensor(group.size)}
    if kind is nn.SigLipLoss:
        place.pop("rank", None)
    made = functools.cache(lambda **options: kind(**place, **settings, **options).train(trains))

    def target(image: Array, text: Array, scale: Any, bias: Any = None, **more: Any) -> Any:
        # CLIP's bias shifts every logit, and changes nothing; DDP waits for its gradient
        shift = image.new_zeros([1] * (len(image) % 2)).requires_grad_(trains) if loss is losses.clip_loss else None
        arrays = {name: more.pop(name, None) for name in ("ids", "weights", "guide")}
        found = made(**more)(image, text, scale, bias if shift is None else shift, trains, **arrays)
        if not isinstance(found, dict if trains else torch.Tensor):
            raise ValueError(f"a module must return a dict in training alone, got {type(found).__name__}")
        if shift is not None and trains and torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad([*found.values()], shift, retain_graph=True, allow_unused=True)
            assert gradient is not None
        return found

    return target


def of_temperature(loss: Target, settings: dict[str, Any]) -> Target:
    """The modules of views, and of labels, which normalise their features."""
    from contrastile import nn

    kind, usual = (nn.NTXentLoss, 0.5) if loss is losses.nt_xent else (nn.SupConLoss, 0.1)
    assert kind().options == {"temperature": usual}, "what is left out must be what it is in the modules replaced"

    def target(features: Array, other: Array, scale: Any) -> Any:
        longer = (2 * x if x.is_floating_point() else x for x in (features, other))
        return kind(1 / float(scale), **(settings | PRIMITIVES))(*longer)

    return target


def captioned(loss: Target, settings: dict[str, Any]) -> Target:
    """CoCa's module, beside a caption of one token and padding, which counts as nothing."""
    from contrastile import nn

    def target(image: Array, text: Array, scale: Any, **more: Any) -> Any:
        given = {name: more.pop(name) for name in ("ids", "weights", "guide") if name in more}
        logits, labels = image.new_tensor([[[0, 0, 0], [0, 0, 9]]]), image.new_tensor([[1, 2]]).long()
        made = nn.CoCaLoss(2.0, 1.0, pad_id=2, **settings, **more)
        found, caption = made(image, text, logits, labels, scale, **given)
        assert caption > 2, "padding counts: of a token it is twice log 3"
        return found

    return target


def distilled(loss: Target, settings: dict[str, Any]) -> Target:
    """The module of distillation, whose teacher is certain of pairs that lie beside each other: it is their loss.

    Where gradients are differences of two they are computed in float64: what is held is above the backends.
    """
    import torch

    from contrastile import nn

    group = settings.get("group")
    rank, size = (0, 1) if group is None else (group.rank, group.size)

    def target(image: Array, text: Array, scale: Any) -> Any:
        own = torch.arange(len(image), device=image.device) + rank * ROWS
        teacher = torch.nn.functional.one_hot(own, max(len(image), size * ROWS)).double()
        given = image.double(), text.roll(1, 0).double(), scale, teacher, teacher.roll(1, 0), 200.0
        made = nn.DistillClipLoss(**{**settings, "backend": "torch", "precision": "auto"})
        # the fourth call of a signature on a GPU is replayed
        _, found = [made(*given) for _ in range(4 if image.is_cuda else 1)][-1]
        return found.to(torch.promote_types(image.dtype, torch.float32))

    return target
