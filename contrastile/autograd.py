"""The torch operators over the block contract; nothing else in the package knows autograd.

Four ``torch.library`` operators, so that ``torch.compile`` sees one node each and ``opcheck`` can check them:
``contrastile::softmax_loss`` and ``sigmoid_loss``, and the gradients of each. A problem crosses
as features, scalars, one list of vectors (``VECTORS``) and one text, ``how`` (``How``). Saved for the backward: the
features as they came, O(m + n) vectors, and for the sigmoid loss its gradients (they come with the value, in one pass).

Gradients of gradients are not defined: differentiating twice raises torch's error for a missing derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from contrastile.backends.arrays import library_of, transfer
from contrastile.backends.contract import Backend, Match, Options
from contrastile.backends.registry import load
from contrastile.evaluation import native
from contrastile.exchange import local, schedule
from contrastile.exchange.placement import Placement, decode
from contrastile.exchange.problem import Problem

# the vectors of a Problem, in the order in which they cross
VECTORS = (
    "row_weight",
    "row_target",
    "column_weight",
    "column_target",
    "positives",
    "excluded",
    "row_ids",
    "column_ids",
)


@dataclass(frozen=True, slots=True)
class How:
    """What crosses an operator besides arrays.

    Attributes:
        match: what equal ids mean.
        backend: a name the registry knows.
        options: how to compute.
        placement: this rank's place, or None for a process alone.
    """

    match: Match
    backend: str
    options: Options
    placement: Placement | None

    def encode(self) -> str:
        """As text, which every version of torch can take through an operator."""
        # plain concatenation: a compiled graph follows it
        tile = self.options.tile or (0, 0)
        place = "" if self.placement is None else self.placement.encode()
        return f"{self.match}|{self.backend}|{self.options.precision}|{tile[0]}|{tile[1]}|{place}"


def _decode(text: str) -> How:
    match, backend, precision, height, width, place = text.split("|")
    tile = (int(height), int(width)) if int(height) else None
    options = Options(tile=tile, precision=precision)
    return How(cast("Match", match), backend, options, decode(place) if place else None)


def evaluate(problem: Problem, backend: str, options: Options) -> Tensor:
    """The loss, 0-d, differentiable in the rows, the columns, the scale and the bias.

    Args:
        problem: over torch tensors.
        backend: a name the registry knows.
        options: how to compute.
    """
    vectors = [getattr(problem, name) for name in VECTORS]
    columns = list(problem.columns)
    how = How(problem.match, backend, options, problem.placement).encode()
    if problem.kind == "softmax":
        loss, *_ = softmax_loss(problem.rows, columns, problem.scale, vectors, how)
        return cast("Tensor", loss)
    leaves = [problem.rows, *columns, problem.scale, problem.bias]
    wants = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in leaves]
    loss, *_ = sigmoid_loss(problem.rows, columns, problem.scale, problem.bias, vectors, how, wants)
    return cast("Tensor", loss)


def _problem(
    kind: Literal["softmax", "sigmoid"],
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor | None,
    vectors: Sequence[Tensor | None],
    how: How,
) -> Problem:
    named: dict[str, Any] = dict(zip(VECTORS, vectors, strict=True))
    named |= {"match": how.match, "placement": how.placement}
    return Problem(kind=kind, rows=rows, columns=tuple(columns), scale=scale, bias=bias, **named)


def _wanted(flags: Sequence[bool], columns: int, *, bias: bool) -> local.Wanted:
    return local.Wanted(flags[0], tuple(flags[1 : 1 + columns]), flags[1 + columns], bias and flags[2 + columns])


def _outside(backend: Backend, scale: Tensor, dtype: str) -> Callable[[Any], Tensor]:
    """The way of a backend's result into torch; what was not computed becomes an empty tensor."""

    def move(x: Any) -> Tensor:
        moved = transfer(x, backend.arrays, library_of(scale), dtype)
        return scale.new_empty(0) if moved is None else cast("Tensor", moved)

    return move


@torch.library.custom_op("contrastile::softmax_loss", mutates_args=())
def softmax_loss(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    how: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The softmax loss (0-d), the row LSE (m,), the column LSE (n,) and the gathered columns; empty where none."""
    way = _decode(how)
    chosen = load(way.backend)
    problem = _problem("softmax", rows, columns, scale, None, vectors, way)
    with native(problem, chosen) as (inside, source):
        saved = schedule.forward(inside, chosen, way.options)
        outside = _outside(chosen, scale, source.dtype(scale))
        features = _outside(chosen, scale, source.dtype(rows))
        return outside(saved.loss), outside(saved.row_lse), outside(saved.column_lse), features(saved.gathered)


@softmax_loss.register_fake
def _(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    how: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    two_sided = vectors[VECTORS.index("column_weight")] is not None
    n = sum(x.shape[0] for x in columns) if two_sided else 0
    # a process alone: no graph is compiled over several
    return torch.empty_like(scale), scale.new_empty(rows.shape[0]), scale.new_empty(n), scale.new_empty(0)


@torch.library.custom_op("contrastile::softmax_gradients", mutates_args=())
def softmax_gradients(
    upstream: Tensor,
    row_lse: Tensor,
    column_lse: Tensor,
    gathered: Tensor,
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    how: str,
    wants: Sequence[bool],
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Gradients of ``upstream * loss`` for the rows, each column block and the scale; empty where not wanted."""
    way = _decode(how)
    chosen = load(way.backend)
    problem = _problem("softmax", rows, columns, scale, None, vectors, way)
    wanted = _wanted(wants, len(columns), bias=False)
    with native(problem, chosen) as (inside, source):
        kept = gathered if gathered.numel() else None
        factor, *saved = (transfer(x, source, chosen.arrays) for x in (upstream, row_lse, column_lse, kept))
        found = schedule.backward(inside, local.Forward(factor, *saved), factor, wanted, chosen, way.options)
        matrix, number = (_outside(chosen, scale, source.dtype(x)) for x in (rows, scale))
        return matrix(found.rows), [matrix(x) for x in found.columns], number(found.scale)


@softmax_gradients.register_fake
def _(
    upstream: Tensor,
    row_lse: Tensor,
    column_lse: Tensor,
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


def _like(x: Tensor) -> Tensor:
    """What a gradient of x looks like: contiguous, whatever x's strides."""
    return x.new_empty(x.shape)


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    rows, columns, scale, vectors, ctx.how = inputs
    ctx.blocks, ctx.present = len(columns), [x is not None for x in vectors]
    ctx.save_for_backward(rows, scale, *output[1:], *columns, *(x for x in vectors if x is not None))


def _vectors(ctx: Any, rest: Sequence[Tensor]) -> list[Tensor | None]:
    given = iter(rest)
    return [next(given) if here else None for here in ctx.present]


def _softmax_backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    rows, scale, row_lse, column_lse, gathered, *rest = ctx.saved_tensors
    columns, vectors = rest[: ctx.blocks], _vectors(ctx, rest[ctx.blocks :])
    wants = [ctx.needs_input_grad[0], *ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
    d_rows, d_columns, d_scale = softmax_gradients(
        upstream, row_lse, column_lse, gathered, rows, columns, scale, vectors, ctx.how, wants
    )
    given = [x if want else None for x, want in zip([d_rows, *d_columns, d_scale], wants, strict=True)]
    return given[0], given[1:-1], given[-1], None, None


softmax_loss.register_autograd(_softmax_backward, setup_context=_save_softmax)


@torch.library.custom_op("contrastile::sigmoid_loss", mutates_args=())
def sigmoid_loss(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    bias: Tensor,
    vectors: Sequence[Tensor | None],
    how: str,
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """The sigmoid loss (0-d) and the ``local.Sums`` behind its gradients, in one pass; empty where not wanted."""
    way = _decode(how)
    chosen = load(way.backend)
    problem = _problem("sigmoid", rows, columns, scale, bias, vectors, way)
    wanted = _wanted(wants, len(columns), bias=True) if any(wants) else None
    with native(problem, chosen) as (inside, source):
        value, sums = schedule.sigmoid(inside, wanted, chosen, way.options)
        found = local.Sums(None, (None,) * len(columns), None) if sums is None else sums
        outside = _outside(chosen, scale, source.dtype(scale))
        return outside(value), outside(found.rows), [outside(x) for x in found.columns], outside(found.total)


@sigmoid_loss.register_fake
def _(
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


# an operator of its own, so that differentiating twice is refused instead of taking the sums for constants
@torch.library.custom_op("contrastile::sigmoid_gradients", mutates_args=())
def sigmoid_gradients(
    upstream: Tensor,
    rows: Tensor,
    scale: Tensor,
    total: Tensor,
    row_sum: Tensor,
    column_sums: Sequence[Tensor],
    how: str,
    wants: Sequence[bool],
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """Gradients of ``upstream * loss`` for the rows, each column block, the scale and the bias; empty if not wanted."""
    way = _decode(how)
    sums = local.Sums(row_sum, tuple(column_sums), total)
    wanted = _wanted(wants, len(column_sums), bias=True)
    found = schedule.finish(rows, scale, way.placement, sums, upstream, wanted, library_of(rows))
    given = [scale.new_empty(0) if x is None else x for x in (found.rows, *found.columns, found.scale, found.bias)]
    return given[0], given[1:-2], given[-2], given[-1]


@sigmoid_gradients.register_fake
def _(
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


def _save_sigmoid(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    rows, _, scale, *_, how, wants = inputs
    _, row_sum, column_sums, total = output
    ctx.how, ctx.wants = how, wants
    ctx.save_for_backward(rows, scale, total, row_sum, *column_sums)


def _sigmoid_backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Any, ...]:
    rows, scale, total, row_sum, *column_sums = ctx.saved_tensors
    wants = ctx.wants
    d_rows, d_columns, *numbers = sigmoid_gradients(upstream, rows, scale, total, row_sum, column_sums, ctx.how, wants)
    given = [x if want else None for x, want in zip([d_rows, *d_columns, *numbers], wants, strict=True)]
    return given[0], given[1:-2], given[-2], given[-1], None, None, None


sigmoid_loss.register_autograd(_sigmoid_backward, setup_context=_save_sigmoid)
