"""What the torch operators compute, over tensors, lists and one text: no operator and no autograd here.

A problem crosses as features, scalars, one list of vectors (``VECTORS``) and one text, ``how`` (``How``). What is not
wanted, or is none, is an empty tensor: an operator always gives one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

from torch import Tensor

from contrastile.backends.arrays import ArrayLibrary, library_of, transfer, working_for
from contrastile.backends.contract import Backend, Match, Options
from contrastile.backends.registry import load
from contrastile.backends.replay import GRAPHS, fits
from contrastile.evaluation import native
from contrastile.schedules import local, schedule
from contrastile.schedules.placement import Placement, decode
from contrastile.schedules.problem import Problem

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


def _decode(text: str, replay: bool = False) -> How:
    settings, _, place = text.rpartition("|")
    match, backend, options = _settings(settings, replay)
    return How(match, backend, options, decode(place) if place else None)


# without the placement: what is kept here would outlive its communicator
@cache
def _settings(text: str, replay: bool) -> tuple[Match, str, Options]:
    match, _, settings = text.partition("|")
    # a backend may have any name
    backend, precision, height, width = settings.rsplit("|", 3)
    tile = (int(height), int(width)) if int(height) else None
    return cast("Match", match), backend, Options(tile=tile, precision=precision, replay=replay)


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


def _replayed(way: How, chosen: Backend, rows: Tensor, columns: Sequence[Tensor]) -> bool:
    """Whether the whole of it may come from a graph; of several processes only what lies between their messages."""
    alone = way.options.replay and way.placement is None
    return alone and chosen.replayable and fits(rows, sum(x.shape[0] for x in columns))


def _wanted(flags: Sequence[bool], columns: int, *, bias: bool) -> local.Wanted:
    return local.Wanted(flags[0], tuple(flags[1 : 1 + columns]), flags[1 + columns], bias and flags[2 + columns])


def _outside(backend: Backend, source: ArrayLibrary, scale: Tensor, like: Tensor | None) -> Callable[[Any], Tensor]:
    """The way of a backend's result into torch, in like's dtype; what was not computed becomes an empty tensor."""
    dtype = None if like is None else source.dtype(like)

    def move(x: Any) -> Tensor:
        return scale.new_empty(0) if x is None else cast("Tensor", transfer(x, backend.arrays, source, dtype))

    return move


def softmax_loss(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    how: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The softmax loss (0-d), and what its gradients need: see ``local.Forward``; empty where there is none.

    The log-sum-exps of the rows (m,) and of the columns (n,), each over negatives and over positives, and the gathered
    columns. Instead of the columns' two, a gather gives ``local.Forward.over``.
    """
    return keeping_softmax_loss(rows, columns, scale, vectors, how, keep=False)[:-1]


Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The loss, four log-sum-exps, the gathered columns, and what the backend has kept."""


def keeping_softmax_loss(
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    how: str,
    *,
    keep: bool,
    replay: bool = False,
) -> Forward:
    """``softmax_loss``, and what the backend has kept for ``kept_softmax_gradients`` if it may: see ``local.forward``.

    No operator gives what was kept: how much that is depends on the GPU, and a graph must know every size. Nor may it
    ``replay``: what calls it may have graphs and memory pools of its own.
    """
    way, blocks = _decode(how, replay), len(columns)
    chosen = load(way.backend)

    def compute(arrays: Sequence[Any], options: Options) -> Forward:
        rows, scale, *rest = arrays
        problem = _problem("softmax", rows, rest[:blocks], scale, None, rest[blocks:], way)
        with native(problem, chosen) as (inside, source):
            saved = schedule.forward(inside, chosen, options, keep=keep)
            outside, features = _outside(chosen, source, scale, scale), _outside(chosen, source, scale, rows)
            as_they_are = _outside(chosen, source, scale, None)
            columns = (saved.column_negative_lse, saved.column_positive_lse) if saved.over is None else saved.over
            rows_n, rows_p = as_they_are(saved.row_negative_lse), as_they_are(saved.row_positive_lse)
            columns_n, columns_p = map(as_they_are, columns)
            rest_of_it = features(saved.gathered), as_they_are(saved.kept)
            return outside(saved.loss), rows_n, rows_p, columns_n, columns_p, *rest_of_it

    arrays = rows, scale, *columns, *vectors
    if not _replayed(way, chosen, rows, columns):
        return compute(arrays, way.options)
    # what was kept would be copied, and held, in each of them
    found = GRAPHS.call(
        ("softmax_loss", how, keep, blocks),
        arrays,
        lambda given: compute(given, _settings(how.rpartition("|")[0], False)[2]),
        lambda found: found[-1].numel() > 0,
    )
    return cast("Forward", tuple(found))


def softmax_gradients(
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
    """Gradients of ``upstream * loss`` for the rows, each column block and the scale; empty where not wanted."""
    lses = row_negative_lse, row_positive_lse, column_negative_lse, column_positive_lse
    saved = *lses, gathered, scale.new_empty(0)
    return kept_softmax_gradients(upstream, saved, rows, columns, scale, vectors, how, wants)


def kept_softmax_gradients(
    upstream: Tensor,
    saved: Sequence[Tensor],
    rows: Tensor,
    columns: Sequence[Tensor],
    scale: Tensor,
    vectors: Sequence[Tensor | None],
    how: str,
    wants: Sequence[bool],
    *,
    replay: bool = False,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """``softmax_gradients`` from all that ``keeping_softmax_loss`` gave beside the loss."""
    way, blocks = _decode(how, replay), len(columns)
    chosen, wanted = load(way.backend), _wanted(wants, blocks, bias=False)
    *lses, gathered, kept = saved
    # a gather has what it knows of all columns there: see softmax_loss
    over_all = lses[2].ndim == 2

    def compute(arrays: Sequence[Any], options: Options) -> list[Tensor]:
        upstream, *state, rows, scale = arrays[:7]
        rest = arrays[7:]
        problem = _problem("softmax", rows, rest[:blocks], scale, None, rest[blocks:], way)
        with native(problem, chosen) as (inside, source):
            # .data: the backend may write there, and autograd must not take that for a change of what it saved
            more = gathered if gathered.numel() else None, kept.data if kept.numel() else None
            given = (transfer(x, source, chosen.arrays) for x in (upstream, *state, *more))
            factor, rows_n, rows_p, first, second, columns_there, kept_there = given
            columns_n, columns_p, over = (None, None, (first, second)) if over_all else (first, second, None)
            forward = local.Forward(factor, rows_n, rows_p, columns_n, columns_p, columns_there, over, kept_there)
            found = schedule.backward(inside, forward, factor, wanted, chosen, options)
            matrix, number = _outside(chosen, source, scale, rows), _outside(chosen, source, scale, scale)
            return [matrix(found.rows), *(matrix(x) for x in found.columns), number(found.scale)]

    arrays = upstream, *lses, rows, scale, *columns, *vectors
    if kept.numel() or not _replayed(way, chosen, rows, columns):
        d_rows, *d_columns, d_scale = compute(arrays, way.options)
    else:
        d_rows, *d_columns, d_scale = GRAPHS.call(
            ("softmax_gradients", how, tuple(wants), blocks),
            arrays,
            lambda given: compute(given, _settings(how.rpartition("|")[0], False)[2]),
        )
    return d_rows, d_columns, d_scale


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
        outside = _outside(chosen, source, scale, scale)
        return outside(value), outside(found.rows), [outside(x) for x in found.columns], outside(found.total)


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
    chosen, source = load(way.backend), library_of(rows)
    wanted = _wanted(wants, len(column_sums), bias=True)
    # the backend's arrays have passes over a whole matrix fused
    with working_for(source, chosen.arrays, rows):
        given = (upstream, rows, scale, total, row_sum, *column_sums)
        factor, features, by, slope, row_part, *column_parts = (transfer(x, source, chosen.arrays) for x in given)
        sums = local.Sums(row_part, tuple(column_parts), slope)
        found = schedule.finish(features, by, way.placement, sums, factor, wanted, chosen.arrays)
        matrix, number = _outside(chosen, source, scale, rows), _outside(chosen, source, scale, scale)
        return matrix(found.rows), [matrix(x) for x in found.columns], number(found.scale), number(found.bias)
