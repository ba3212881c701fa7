"""The same losses for eager calls: autograd functions over the bodies, without an operator's dispatch.

An operator's way through torch's dispatcher takes the host longer than the body does for a small batch. Bodies and
what is refused are the operators'. What is saved is theirs too and, where the backend keeps something for the
gradients, that: it is freed with the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from contrastile.autograd import bodies, operators
from contrastile.backends import eager

_C: Any = torch._C
# absent from a torch that has other names for them: then every call goes through the operators
_KNOWN = eager.transforms_can_be_seen(torch)


def direct(tensors: Iterable[Tensor | None]) -> bool:
    """See ``eager.direct``."""
    return eager.direct(torch, tensors)


@eager.asked_while_tracing
def transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    return _KNOWN and bool(_C._are_functorch_transforms_active())


def tangents(tensors: Iterable[Tensor | None]) -> bool:
    """Whether any of them carries a tangent: forward mode."""
    # no level is open, as a rule
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    unpack: Any = forward_ad.unpack_dual
    return any(x is not None and unpack(x).tangent is not None for x in tensors)


class SoftmaxLoss(torch.autograd.Function):
    """``operators.softmax_loss``, of which only the loss is given."""

    @staticmethod
    def forward(ctx: Any, how: str, blocks: int, keep: bool, rows: Tensor, scale: Tensor, *rest: Any) -> Tensor:
        """The loss; ``rest`` are the column blocks and the vectors, ``keep`` says that a backward will come."""
        inputs = rows, rest[:blocks], scale, rest[blocks:], how
        wanted = all(ctx.needs_input_grad[i] for i in (3, *range(5, 5 + blocks)))
        output = bodies.keeping_softmax_loss(*inputs, keep=keep and wanted, replay=True)
        operators.save_softmax(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        arriving = operators.one_upstream("softmax_gradients", *upstream).resolve_neg()
        _, _, _, rows, scale, *rest = ctx.needs_input_grad
        wants = [rows, *rest[: ctx.blocks], scale]
        found, inputs = operators.saved_softmax(ctx)
        if _seen(arriving):
            d_rows, d_columns, d_scale = operators.softmax_gradients(arriving, *found[:5], *inputs, wants)
        else:
            d_rows, d_columns, d_scale = bodies.kept_softmax_gradients(arriving, found, *inputs, wants, replay=True)
        rows, *columns, scale = operators.only(wants, [d_rows, *d_columns, d_scale])
        return None, None, None, rows, scale, *columns, *(None for _ in ctx.present)


class SigmoidLoss(torch.autograd.Function):
    """``operators.sigmoid_loss``, of which only the loss is given."""

    @staticmethod
    def forward(
        ctx: Any,
        how: str,
        wants: Sequence[bool],
        vectors: Sequence[Tensor | None],
        rows: Tensor,
        scale: Tensor,
        bias: Tensor,
        *columns: Tensor,
    ) -> Tensor:
        """The loss."""
        inputs = rows, columns, scale, bias, vectors, how, wants
        output = bodies.sigmoid_loss(*inputs)
        operators.save_sigmoid(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        (arriving,) = upstream
        arriving = arriving.resolve_neg()
        find = operators.sigmoid_gradients if _seen(arriving) else bodies.sigmoid_gradients
        d_rows, d_columns, *numbers = find(arriving, *operators.saved_sigmoid(ctx))
        rows, *columns, scale, bias = operators.only(ctx.wants, [d_rows, *d_columns, *numbers])
        return None, None, None, rows, scale, bias, *columns


def _seen(upstream: Tensor) -> bool:
    """Whether the operator must be: where gradients of gradients are asked for, it refuses them by name."""
    return torch.is_grad_enabled() or not direct((upstream,))
