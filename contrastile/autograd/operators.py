"""The four ``torch.library`` operators, so that ``torch.compile`` sees one node each and ``opcheck`` can check them.

``contrastile::softmax_loss`` and ``sigmoid_loss``, and the gradients of each. The gradients are operators of their own,
so that differentiating twice is refused instead of taking what was saved for constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastile.autograd import bodies
from contrastile.autograd.bodies import VECTORS

Inputs = tuple[Tensor, list[Tensor], Tensor, list[Tensor | None], str]
"""Of the softmax loss: rows, column blocks, scale, vectors and how."""


def forward_mode(operator: str) -> RuntimeError:
    """The error of whoever asks for a tangent: torch would take it for 0."""
    return RuntimeError(
        f"contrastile::{operator} must be differentiated in reverse mode, got forward mode (torch.func.jvp, jacfwd, "
        "linearize, torch.autograd.forward_ad); use backward(), torch.func.grad or vjp"
    )


def second_derivative(operator: str) -> RuntimeError:
    """The error of whoever differentiates a gradient."""
    return RuntimeError(
        f"contrastile::{operator} must not be differentiated itself, got a derivative of a gradient; take gradients "
        "without create_graph, and Hessians of a loss with full logits"
    )


def one_upstream(operator: str, upstream: Tensor) -> Tensor:
    """The upstream gradient; raise RuntimeError if it is a batch of them under torch's older, autograd's own vmap."""
    known = getattr(torch._C, "_functorch", None)
    if known is not None and known.is_legacy_batchedtensor(upstream):
        raise RuntimeError(
            f"contrastile::{operator} must be given one upstream gradient at a time, got a batch of them "
            "(is_grads_batched, vectorize=True); call autograd.grad in a loop, or torch.func.jacrev"
        )
    return upstream


def _fake_softmax_loss(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    how: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def lses(count: Any) -> tuple[Tensor, Tensor]:
        return scale.new_empty(count, dtype=torch.float64), scale.new_empty(count, dtype=torch.float64)

    two_sided = vectors[VECTORS.index("column_weight")] is not None
    sides = (
        *lses(rows.shape[0]),
        *(lses(sum(x.shape[0] for x in columns)) if two_sided else (scale.new_empty(0), scale.new_empty(0))),
    )
    # a process alone: no graph is compiled over several
    return torch.empty_like(scale), *sides, scale.new_empty(0)


def _fake_softmax_gradients(
    upstream: Tensor,
    row_negative_lse: Tensor,
    row_positive_lse: Tensor,
    column_negative_lse: Tensor,
    column_positive_lse: Tensor,
    gathered: Tensor,
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    how: str,
    wants: Sequence[bool],
) -> tuple[Tensor, list[Tensor], Tensor]:
    given = [_like(x) if want else scale.new_empty(0) for x, want in zip([rows, *columns, scale], wants, strict=True)]
    return given[0], given[1:-1], given[-1]


def _fake_sigmoid_loss(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor,
    vectors: Sequence[Tensor | None],
    how: str,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    def sums(x: Tensor, want: bool) -> Tensor:
        return scale.new_empty(x.shape if want else 0)

    blocks = [sums(x, want) for x, want in zip(columns, wants[1:], strict=False)]
    return scale.new_empty(()), sums(rows, wants[0] or wants[-2]), blocks, sums(scale, any(wants))


def _fake_sigmoid_gradients(
    upstream: Tensor,
    rows: Tensor,
    scale: Tensor,
    total: Tensor,
    row_sum: Tensor,
    column_sums: Sequence[Tensor],
    how: str,
    wants: Sequence[bool],
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    given = [
        rows.new_empty(x.shape if want else 0) for x, want in zip([row_sum, *column_sums], wants[:-2], strict=True)
    ]
    d_scale, d_bias = (scale.new_empty(() if want else 0) for want in wants[-2:])
    return given[0], given[1:], d_scale, d_bias


def _like(x: Tensor) -> Tensor:
    """What a gradient of x looks like: contiguous, whatever x's strides."""
    return x.new_empty(x.shape)


def save_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep what ``saved_softmax`` gives: the features as they came, all outputs but the loss, O(m + n) vectors."""
    rows, columns, scale, vectors, ctx.how = inputs
    ctx.blocks, ctx.present = len(columns), [x is not None for x in vectors]
    ctx.found = len(output) - 1
    ctx.save_for_backward(rows, scale, *output[1:], *columns, *(x for x in vectors if x is not None))


def saved_softmax(ctx: Any) -> tuple[tuple[Tensor, ...], Inputs]:
    """The outputs that were saved; the arguments of ``softmax_gradients`` between them and what is wanted."""
    rows, scale, *rest = ctx.saved_tensors
    found, rest = rest[: ctx.found], rest[ctx.found :]
    given = iter(rest[ctx.blocks :])
    vectors = [next(given) if here else None for here in ctx.present]
    return tuple(found), (rows, rest[: ctx.blocks], scale, vectors, ctx.how)


def save_sigmoid(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep what ``saved_sigmoid`` gives: the gradients' sums, which come with the value."""
    rows, _, scale, *_, ctx.how, ctx.wants = inputs
    _, row_sum, column_sums, total = output
    ctx.save_for_backward(rows, scale, total, row_sum, *column_sums)


def saved_sigmoid(ctx: Any) -> tuple[Any, ...]:
    """The arguments of ``sigmoid_gradients`` after the upstream gradient."""
    rows, scale, total, row_sum, *column_sums = ctx.saved_tensors
    return rows, scale, total, row_sum, column_sums, ctx.how, ctx.wants


def only(wanted: Sequence[bool], given: Sequence[Tensor]) -> list[Tensor | None]:
    """What autograd is to have of the gradients: None for the empty ones."""
    return [x if want else None for x, want in zip(given, wanted, strict=True)]


def _softmax_backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    wants = [ctx.needs_input_grad[0], *ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
    found, inputs = saved_softmax(ctx)
    rows, columns, scale = softmax_gradients(one_upstream("softmax_gradients", upstream), *found, *inputs, wants)
    given = only(wants, [rows, *columns, scale])
    return given[0], given[1:-1], given[-1], None, None


def _sigmoid_backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    rows, columns, *numbers = sigmoid_gradients(one_upstream("sigmoid_gradients", upstream), *saved_sigmoid(ctx))
    given = only(ctx.wants, [rows, *columns, *numbers])
    return given[0], given[1:-2], given[-2], given[-1], None, None, None


def _refusing(operator: str) -> Callable[..., Any]:
    def backward(ctx: Any, *upstream: Any) -> Any:
        raise second_derivative(operator)

    return backward


def _operator(body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    operator = torch.library.custom_op(f"contrastile::{body.__name__}", mutates_args=())(body)
    operator.register_fake(fake)
    return operator


softmax_loss = _operator(bodies.softmax_loss, _fake_softmax_loss)
softmax_gradients = _operator(bodies.softmax_gradients, _fake_softmax_gradients)
sigmoid_loss = _operator(bodies.sigmoid_loss, _fake_sigmoid_loss)
sigmoid_gradients = _operator(bodies.sigmoid_gradients, _fake_sigmoid_gradients)

softmax_loss.register_autograd(_softmax_backward, setup_context=save_softmax)
sigmoid_loss.register_autograd(_sigmoid_backward, setup_context=save_sigmoid)
softmax_gradients.register_autograd(_refusing("softmax_gradients"))
sigmoid_gradients.register_autograd(_refusing("sigmoid_gradients"))
