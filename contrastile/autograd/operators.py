"""The four ``torch.library`` operators, for those who must see one: compilers, tracers, modes, ``opcheck``.

``contrastile::softmax_loss`` and ``sigmoid_loss``, and the gradients of each, of a process alone. The gradients are
operators of their own, so that differentiating twice is refused instead of taking what was saved for constants. An
operator takes typed numbers and texts, of which it makes the plan, and always gives tensors: an empty one for None.
"""

# ruff: noqa: UP006, UP035
# torch 2.6 reads an operator's schema from its annotations, and knows List there, not list
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, List, Literal, cast

import torch
from torch import Tensor

from contrastile.autograd import bodies
from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Match, Options
from contrastile.plan import Plan
from contrastile.schedules import local
from contrastile.schedules.problem import VECTORS, Problem


def forward_mode(operator: str) -> RuntimeError:
    """The error for a tangent, which torch would take for 0."""
    return RuntimeError(
        f"contrastile::{operator} must be differentiated in reverse mode, got forward mode (torch.func.jvp, jacfwd, "
        "linearize, torch.autograd.forward_ad); use backward(), torch.func.grad or vjp"
    )


def second_derivative(operator: str) -> RuntimeError:
    """The error for a derivative of a gradient."""
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


Settings = tuple[str, str, int, int, str, int | None]


def settings_of(plan: Plan) -> Settings:
    """The numbers and texts of a plan, the last arguments of each operator but ``wants``; no tile is (0, 0)."""
    options = plan.options
    rows, columns = options.tile or (0, 0)
    return plan.problem.match, plan.name, rows, columns, options.precision, options.workspace


def _plan(
    kind: Literal["softmax", "sigmoid"],
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor | None,
    vectors: Sequence[Tensor | None],
    settings: Settings,
) -> Plan:
    """The plan that a caller's ``settings_of`` came from."""
    match, backend, tile_rows, tile_columns, precision, workspace = settings
    form = Problem(rows, (), scale, None, None, kind=kind, match=cast("Match", match))
    options = Options((tile_rows, tile_columns) if tile_rows else None, precision, workspace)
    return Plan(form.with_arrays((rows, scale, bias, *vectors, *columns)), backend, options, library_of(rows))


def filled(found: bodies.Found, like: Tensor) -> list[Tensor]:
    """What was found, with an empty tensor for None."""
    return [like.new_empty(0) if x is None else x for x in found]


def wanted(wants: Sequence[bool], *, biased: bool) -> local.Wanted:
    """Which gradients are wanted, from flags in the order of rows, column blocks, scale and, if ``biased``, bias."""
    rows, *columns, scale, bias = wants if biased else (*wants, False)
    return local.Wanted(rows, tuple(columns), scale, bias)


@torch.library.custom_op("contrastile::softmax_loss", mutates_args=())
def softmax_loss(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    match: str,
    backend: str,
    tile_rows: int,
    tile_columns: int,
    precision: str,
    workspace: int | None,
) -> tuple[Tensor, List[Tensor]]:
    """The softmax loss and the log-sum-exps that its gradients need: see ``bodies.LSES``.

    Nothing is kept: how much that is depends on the GPU, and a graph must know every size. Nor is anything replayed:
    what calls it may have graphs and memory pools of its own.
    """
    settings = match, backend, tile_rows, tile_columns, precision, workspace
    plan = _plan("softmax", rows, columns, scale, None, vectors, settings)
    loss, *state = filled(bodies.softmax_loss(plan), scale)
    return loss, state[: bodies.LSES]


@torch.library.custom_op("contrastile::softmax_gradients", mutates_args=())
def softmax_gradients(
    upstream: Tensor,
    lses: Sequence[Tensor],
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    match: str,
    backend: str,
    tile_rows: int,
    tile_columns: int,
    precision: str,
    workspace: int | None,
    wants: Sequence[bool],
) -> tuple[Tensor, List[Tensor], Tensor]:
    """Gradients of ``upstream * loss`` for the rows, each column block and the scale."""
    settings = match, backend, tile_rows, tile_columns, precision, workspace
    plan = _plan("softmax", rows, columns, scale, None, vectors, settings)
    found = bodies.softmax_gradients(plan, lses, upstream, wanted(wants, biased=False))
    d_rows, d_scale, *d_columns = filled(found, scale)
    return d_rows, d_columns, d_scale


@torch.library.custom_op("contrastile::sigmoid_loss", mutates_args=())
def sigmoid_loss(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor,
    vectors: Sequence[Tensor | None],
    match: str,
    backend: str,
    tile_rows: int,
    tile_columns: int,
    precision: str,
    workspace: int | None,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, List[Tensor]]:
    """The sigmoid loss and the sums behind its gradients, total, rows and columns: see ``bodies.sigmoid_loss``."""
    settings = match, backend, tile_rows, tile_columns, precision, workspace
    plan = _plan("sigmoid", rows, columns, scale, bias, vectors, settings)
    sums = wanted(wants, biased=True) if any(wants) else None
    value, total, row_sum, *column_sums = filled(bodies.sigmoid_loss(plan, sums), scale)
    return value, total, row_sum, column_sums


@torch.library.custom_op("contrastile::sigmoid_gradients", mutates_args=())
def sigmoid_gradients(
    upstream: Tensor,
    total: Tensor,
    row_sum: Tensor,
    column_sums: Sequence[Tensor],
    rows: Tensor,
    scale: Tensor,
    match: str,
    backend: str,
    tile_rows: int,
    tile_columns: int,
    precision: str,
    workspace: int | None,
    wants: Sequence[bool],
) -> tuple[Tensor, List[Tensor], Tensor, Tensor]:
    """Gradients of ``upstream * loss`` for the rows, each column block, the scale and the bias."""
    settings = match, backend, tile_rows, tile_columns, precision, workspace
    plan = _plan("sigmoid", rows, (), scale, None, [None] * VECTORS, settings)
    which = wanted(wants, biased=True)
    found = bodies.sigmoid_gradients(plan, rows, scale, (total, row_sum, *column_sums), upstream, which)
    d_rows, d_scale, d_bias, *d_columns = filled(found, scale)
    return d_rows, d_columns, d_scale, d_bias


@softmax_loss.register_fake
def _fake_softmax_loss(
    rows: Tensor, columns: Sequence[Tensor], scale: Tensor, vectors: Sequence[Tensor | None], *settings: Any
) -> tuple[Tensor, List[Tensor]]:
    def lses(count: Any) -> tuple[Tensor, Tensor]:
        return scale.new_empty(count, dtype=torch.float64), scale.new_empty(count, dtype=torch.float64)

    _, _, column_weight, *_ = vectors
    two_sided = column_weight is not None
    of_columns = lses(sum(x.shape[0] for x in columns)) if two_sided else (scale.new_empty(0), scale.new_empty(0))
    return torch.empty_like(scale), [*lses(rows.shape[0]), *of_columns]


@softmax_gradients.register_fake
def _fake_softmax_gradients(
    upstream: Tensor,
    lses: Sequence[Tensor],
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    *settings: Any,
) -> tuple[Tensor, List[Tensor], Tensor]:
    wants = settings[-1]
    given = [_like(x) if want else scale.new_empty(0) for x, want in zip([rows, *columns, scale], wants, strict=True)]
    return given[0], given[1:-1], given[-1]


@sigmoid_loss.register_fake
def _fake_sigmoid_loss(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor,
    vectors: Sequence[Tensor | None],
    *settings: Any,
) -> tuple[Tensor, Tensor, Tensor, List[Tensor]]:
    wants = settings[-1]

    def sums(x: Tensor, want: bool) -> Tensor:
        return scale.new_empty(x.shape if want else 0)

    blocks = [sums(x, want) for x, want in zip(columns, wants[1:], strict=False)]
    return scale.new_empty(()), sums(scale, any(wants)), sums(rows, wants[0] or wants[-2]), blocks


@sigmoid_gradients.register_fake
def _fake_sigmoid_gradients(
    upstream: Tensor,
    total: Tensor,
    row_sum: Tensor,
    column_sums: Sequence[Tensor],
    rows: Tensor,
    scale: Tensor,
    *settings: Any,
) -> tuple[Tensor, List[Tensor], Tensor, Tensor]:
    wants = settings[-1]
    given = [
        rows.new_empty(x.shape if want else 0) for x, want in zip([row_sum, *column_sums], wants[:-2], strict=True)
    ]
    d_scale, d_bias = (scale.new_empty(() if want else 0) for want in wants[-2:])
    return given[0], given[1:], d_scale, d_bias


def _like(x: Tensor) -> Tensor:
    """What a gradient of x looks like: contiguous, whatever x's strides."""
    return x.new_empty(x.shape)


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep the features as they came, and O(m + n) vectors."""
    rows, columns, scale, vectors, *ctx.settings = inputs
    _, lses = output
    ctx.save_for_backward(*lses, rows, scale, *vectors, *columns)


def _softmax_backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    wants = [ctx.needs_input_grad[0], *ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
    lses, (rows, scale, *rest) = ctx.saved_tensors[: bodies.LSES], ctx.saved_tensors[bodies.LSES :]
    vectors, columns = rest[:VECTORS], rest[VECTORS:]
    arriving = one_upstream("softmax_gradients", upstream)
    d_rows, d_columns, d_scale = softmax_gradients(arriving, lses, rows, columns, scale, vectors, *ctx.settings, wants)
    given = only(wants, [d_rows, *d_columns, d_scale])
    return given[0], given[1:-1], given[-1], *[None] * (1 + len(ctx.settings))


def _save_sigmoid(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Keep the rows and the sums, which come with the value."""
    rows, _, scale, _, _, *ctx.settings = inputs
    _, total, row_sum, column_sums = output
    ctx.save_for_backward(rows, scale, total, row_sum, *column_sums)


def _sigmoid_backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    rows, scale, total, row_sum, *column_sums = ctx.saved_tensors
    arriving = one_upstream("sigmoid_gradients", upstream)
    d_rows, d_columns, *numbers = sigmoid_gradients(arriving, total, row_sum, column_sums, rows, scale, *ctx.settings)
    given = only(ctx.settings[-1], [d_rows, *d_columns, *numbers])
    return given[0], given[1:-2], given[-2], given[-1], *[None] * (1 + len(ctx.settings))


def only(wants: Sequence[bool], given: Sequence[Tensor]) -> list[Tensor | None]:
    """What autograd is to have of the gradients: None for the empty ones."""
    return [x if want else None for x, want in zip(given, wants, strict=True)]


def _refusing(operator: str) -> Callable[..., Any]:
    def backward(ctx: Any, *upstream: Any) -> Any:
        raise second_derivative(operator)

    return backward


softmax_loss.register_autograd(_softmax_backward, setup_context=_save_softmax)
sigmoid_loss.register_autograd(_sigmoid_backward, setup_context=_save_sigmoid)
softmax_gradients.register_autograd(_refusing("softmax_gradients"))
sigmoid_gradients.register_autograd(_refusing("sigmoid_gradients"))
