"""The modules of ``contrastile.nn`` as losses under test."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from contrastile import losses
from contrastile.backends.contract import Array

Target = Callable[..., Any]

PRIMITIVES: dict[str, Any] = {"keep": 0}
"""Settings that compute a small loss on a CPU in the same way as any other loss."""

ROWS = 64
"""The largest number of rows of a loss of plain arithmetic, and of a rank."""


def module(loss: Target, settings: dict[str, Any], *, trains: bool = True) -> Target:
    """The modules of ``contrastile.nn``, which return a dict in training and a tensor in evaluation."""
    import torch

    from contrastile import nn

    kind = nn.ClipLoss if loss is losses.clip_loss else nn.SigLipLoss
    settings = settings | PRIMITIVES if trains else settings
    # The settings of other modules must not affect this one.
    kind(world_size=2)
    kind(world_size=2, parameter_reduction="sum")
    group = settings.get("group")
    ranks: Any = {} if group is None else {"rank": torch.tensor(group.rank), "world_size": torch.tensor(group.size)}
    if kind is nn.SigLipLoss:
        ranks.pop("rank", None)
    cached_module = functools.cache(lambda **options: kind(**ranks, **settings, **options).train(trains))

    def target(image: Array, text: Array, scale: Any, bias: Any = None, **options: Any) -> Any:
        # CLIP's bias shifts every logit, and does not change the loss. DDP still waits for its gradient.
        shift = image.new_zeros([1] * (len(image) % 2)).requires_grad_(trains) if loss is losses.clip_loss else None
        arrays = {name: options.pop(name, None) for name in ("ids", "weights", "guide")}
        output = cached_module(**options)(image, text, scale, bias if shift is None else shift, trains, **arrays)
        if not isinstance(output, dict if trains else torch.Tensor):
            raise ValueError(f"a module must return a dict in training alone, got {type(output).__name__}")
        if shift is not None and trains and torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad([*output.values()], shift, retain_graph=True, allow_unused=True)
            assert gradient is not None
        return output

    return target


def of_temperature(loss: Target, settings: dict[str, Any]) -> Target:
    """The modules ``NTXentLoss`` and ``SupConLoss``, which normalise their features."""
    from contrastile import nn

    kind, default = (nn.NTXentLoss, 0.5) if loss is losses.nt_xent else (nn.SupConLoss, 0.1)
    assert kind().options == {"temperature": default}, "what is left out must be what it is in the modules replaced"

    def target(first: Array, second: Array, scale: Any) -> Any:
        scaled = (2 * x if x.is_floating_point() else x for x in (first, second))
        return kind(1 / float(scale), **(settings | PRIMITIVES))(*scaled)

    return target


def captioned(loss: Target, settings: dict[str, Any]) -> Target:
    """CoCa's module, with a caption of one token and padding, which must not count."""
    from contrastile import nn

    def target(image: Array, text: Array, scale: Any, **options: Any) -> Any:
        arrays = {name: options.pop(name) for name in ("ids", "weights", "guide") if name in options}
        logits, labels = image.new_tensor([[[0, 0, 0], [0, 0, 9]]]), image.new_tensor([[1, 2]]).long()
        criterion = nn.CoCaLoss(2.0, 1.0, pad_id=2, **settings, **options)
        symmetric_loss, caption = criterion(image, text, logits, labels, scale, **arrays)
        assert caption > 2, "padding counts: of a token it is twice log 3"
        return symmetric_loss

    return target


def taught(loss: Target, settings: dict[str, Any]) -> Target:
    """A loss with a teacher that is certain of pairs in adjacent rows, so that it is the loss of these pairs.

    Its gradients are differences of two terms, so it computes in float64: the test is of the code above the backends.
    """
    import torch

    group = settings.get("group")
    rank, size = (0, 1) if group is None else (group.rank, group.size)

    def target(query: Array, key: Array, scale: Any) -> Any:
        columns = torch.arange(len(query), device=query.device) + rank * ROWS
        teacher = torch.nn.functional.one_hot(columns, max(len(query), size * ROWS)).double()
        arguments = query.double(), key.roll(1, 0).double(), scale
        keywords = {
            **settings,
            "backend": "torch",
            "precision": "auto",
            "teacher": (teacher, teacher.roll(1, 0), 200.0),
        }
        # On a GPU, the fourth call of a signature replays a graph.
        *_, value = [loss(*arguments, **keywords) for _ in range(4 if query.is_cuda else 1)]
        return value.to(torch.promote_types(query.dtype, torch.float32))

    return target
