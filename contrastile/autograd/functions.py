"""The same losses for eager calls: autograd functions over the bodies, without an operator's dispatch.

An operator's way through torch's dispatcher takes the host longer than the body does for a small batch. Nothing but
that differs: bodies, what is saved and what is refused are the operators'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastile.autograd import bodies, operators

_PLAIN = (Tensor, torch.nn.Parameter)
_C: Any = torch._C
# absent from a torch that has other names for them: then every call goes through the operators
_KNOWN = all(
    hasattr(_C, name)
    for name in ("_are_functorch_transforms_active", "_len_torch_dispatch_stack", "_get_tracing_state")
)


def direct(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing has to see an operator: no compiler, tracer, transform, mode, subclass or shape alone."""
    return (
        not torch.compiler.is_compiling()
        and _KNOWN
        and not _C._are_functorch_transforms_active()
        and not _C._len_torch_dispatch_stack()
        and _C._get_tracing_state() is None
        and all(x is None or (type(x) in _PLAIN and not x.is_meta) for x in tensors)
    )


class SoftmaxLoss(torch.autograd.Function):
    """``operators.softmax_loss``, of which only the loss is given."""

    @staticmethod
    def forward(ctx: Any, how: str, blocks: int, rows: Tensor, scale: Tensor, *rest: Any) -> Tensor:
        """The loss; ``rest`` are the column blocks and the vectors."""
        inputs = rows, rest[:blocks], scale, rest[blocks:], how
        output = bodies.softmax_loss(*inputs)
        operators.save_softmax(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        _, _, rows, scale, *rest = ctx.needs_input_grad
        wants = [rows, *rest[: ctx.blocks], scale]
        find = _chosen(bodies.softmax_gradients, operators.softmax_gradients, upstream)
        d_rows, d_columns, d_scale = find(*upstream, *operators.saved_softmax(ctx), wants)
        rows, *columns, scale = operators.only(wants, [d_rows, *d_columns, d_scale])
        return None, None, rows, scale, *columns, *(None for _ in ctx.present)


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
        find = _chosen(bodies.sigmoid_gradients, operators.sigmoid_gradients, upstream)
        d_rows, d_columns, *numbers = find(*upstream, *operators.saved_sigmoid(ctx))
        rows, *columns, scale, bias = operators.only(ctx.wants, [d_rows, *d_columns, *numbers])
        return None, None, None, rows, scale, bias, *columns


def _chosen(body: Any, operator: Any, upstream: tuple[Tensor, ...]) -> Any:
    """The operator where gradients of gradients are asked for, which it refuses by name, or where it must be seen."""
    return body if not torch.is_grad_enabled() and direct(upstream) else operator
