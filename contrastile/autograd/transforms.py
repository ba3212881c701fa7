"""The same losses under torch.func's ``grad``, ``vjp`` and ``jacrev``, which see autograd functions and no operators.

What is not defined is refused by name: forward mode, gradients of gradients, a map over calls.
"""

# pyright: reportIncompatibleMethodOverride=false
# class methods, where torch has static ones: a refusal names its operator
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from contrastile.autograd import operators


class _Loss(torch.autograd.Function):
    """Of one batch, in reverse mode."""

    operator: ClassVar[str]

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> Any:
        """Refused."""
        raise operators.forward_mode(cls.operator)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *given: Any) -> Any:
        """Refused."""
        raise RuntimeError(
            f"contrastile::{cls.operator} must be called with one batch at a time, got {info.batch_size} of them under "
            "torch.func.vmap; call the loss in a loop"
        )


class _Gradients(torch.autograd.Function):
    """Gradients, which have none themselves."""

    operator: ClassVar[str]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @classmethod
    def backward(cls, ctx: Any, *upstream: Any) -> Any:
        """Refused."""
        raise operators.second_derivative(cls.operator)

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> Any:
        """Refused."""
        raise operators.second_derivative(cls.operator)

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[Any], *given: Any) -> Any:
        """One upstream gradient after the other: ``jacrev`` asks for all at once."""
        call: Any = cls

        def one(x: Any, dim: Any, i: int) -> Any:
            return x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x

        each = [
            call.apply(*(one(x, dim, i) for x, dim in zip(given, in_dims, strict=True))) for i in range(info.batch_size)
        ]
        return tuple(torch.stack(found) for found in zip(*each, strict=True)), (0,) * len(each[0])


class SoftmaxLoss(_Loss):
    """``operators.softmax_loss`` with flat arguments."""

    operator = "softmax_loss"

    @staticmethod
    def forward(how: str, blocks: int, rows: Tensor, scale: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """The loss and what its gradients need; ``rest`` are the column blocks and the vectors."""
        found: tuple[Tensor, ...] = operators.softmax_loss(rows, rest[:blocks], scale, rest[blocks:], how)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """See ``operators.save_softmax``."""
        how, blocks, rows, scale, *rest = inputs
        operators.save_softmax(ctx, (rows, rest[:blocks], scale, rest[blocks:], how), output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        _, _, rows, scale, *rest = ctx.needs_input_grad
        wants = [rows, *rest[: ctx.blocks], scale]
        found, (features, columns, factor, vectors, how) = operators.saved_softmax(ctx)
        gradients: Any = SoftmaxGradients
        given = gradients.apply(how, wants, ctx.blocks, upstream[0], *found, features, factor, *columns, *vectors)
        d_rows, *d_columns, d_scale = operators.only(wants, given)
        return None, None, d_rows, d_scale, *d_columns, *(None for _ in ctx.present)


class SoftmaxGradients(_Gradients):
    """``operators.softmax_gradients`` with flat arguments."""

    operator = "softmax_gradients"

    @staticmethod
    def forward(how: str, wants: Sequence[bool], blocks: int, *tensors: Any) -> tuple[Tensor, ...]:
        """The gradients of the rows, the column blocks and the scale."""
        state, (rows, scale, *rest) = tensors[:6], tensors[6:]
        d_rows, d_columns, d_scale = operators.softmax_gradients(
            *state, rows, rest[:blocks], scale, rest[blocks:], how, wants
        )
        return d_rows, *d_columns, d_scale


class SigmoidLoss(_Loss):
    """``operators.sigmoid_loss`` with flat arguments."""

    operator = "sigmoid_loss"

    @staticmethod
    def forward(how: str, blocks: int, rows: Tensor, scale: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """The loss and what its gradients need, all of them: which transform will ask for which is not known here."""
        wants = [True] * (blocks + 3)
        loss, row_sum, column_sums, total = operators.sigmoid_loss(
            rows, rest[:blocks], scale, bias, rest[blocks:], how, wants
        )
        return loss, row_sum, total, *column_sums

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """See ``operators.save_sigmoid``."""
        how, blocks, rows, scale, _, *rest = inputs
        _, row_sum, total, *column_sums = output
        wants = [True] * (blocks + 3)
        ctx.vectors = len(rest) - blocks
        operators.save_sigmoid(ctx, (rows, (), scale, how, wants), (None, row_sum, column_sums, total))
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        rows, scale, total, row_sum, column_sums, how, wants = operators.saved_sigmoid(ctx)
        gradients: Any = SigmoidGradients
        d_rows, *d_columns, d_scale, d_bias = gradients.apply(
            how, wants, upstream[0], rows, scale, total, row_sum, *column_sums
        )
        return None, None, d_rows, d_scale, d_bias, *d_columns, *[None] * ctx.vectors


class SigmoidGradients(_Gradients):
    """``operators.sigmoid_gradients`` with flat arguments."""

    operator = "sigmoid_gradients"

    @staticmethod
    def forward(how: str, wants: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the rows, the column blocks, the scale and the bias."""
        *given, sums = *tensors[:5], tensors[5:]
        d_rows, d_columns, d_scale, d_bias = operators.sigmoid_gradients(*given, sums, how, wants)
        return d_rows, *d_columns, d_scale, d_bias
