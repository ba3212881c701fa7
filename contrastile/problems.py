"""Each loss as a problem: its weights, targets and pairs over the general form. No loss has code of its own below.

With a group, rows and columns are this rank's part of the global batch, ``Handshake.meet`` says where it lies, and
weights are those of the global loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from contrastile import validation
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import state_dtype
from contrastile.schedules.handshake import ALONE, Handshake
from contrastile.schedules.local import Gradients, both_sides
from contrastile.schedules.problem import EqualPairs, Problem

Array = Any

FEW = 256
"""Samples that a host takes in any order: all are one tile, and to sort them would take longer than it saves."""


@dataclass(frozen=True, slots=True)
class LossProblem:
    """A problem in the caller's library, and how its gradients become those of the loss's positional arguments."""

    library: ArrayLibrary
    problem: Problem
    pull_back: Callable[[Gradients], tuple[Array, ...]]


def clip(image: Array, text: Array, scale: Any, *, ids: Array | None = None, world: Handshake = ALONE) -> LossProblem:
    """Both directions, halved: u = v = 1 / (2b); the positive of row i is column i."""
    check = world.known or validation
    arrays, (rows, columns) = check.features(world.alone, image=image, text=text)
    check.paired("image", image, "text", text, "use info_nce for keys without a query")
    m, state = rows.shape[0], state_dtype(arrays.dtype(rows))
    same = None if ids is None else check.integers("ids", ids, m, "pair", arrays, rows)
    factor = check.scalar("scale", scale, arrays, state, rows)
    met = world.meet(arrays, rows, (columns,), (scale, factor), loss="clip_loss", ids=ids is not None)
    pairs = _equal(check, arrays, 0.5 / met.rows, met.start, met.start + m, state, rows)
    problem = Problem(
        rows=rows,
        columns=(columns,),
        scale=factor,
        row_weight=pairs.weight,
        row_target=pairs.target,
        column_weight=pairs.weight,
        column_target=pairs.target,
        positives=pairs.positives,
        row_ids=same,
        column_ids=same,
        placement=met.placement,
        equal=pairs,
    )
    return LossProblem(arrays, problem, lambda g: (*_like(arrays, (image, text), (g.rows, g.columns[0])), g.scale))


def info_nce(
    query: Array,
    key: Array,
    scale: Any,
    *,
    negatives: Array | Sequence[Array] | None = None,
    positives: Array | None = None,
    row_ids: Array | None = None,
    column_ids: Array | None = None,
    world: Handshake = ALONE,
) -> LossProblem:
    """One direction: u = 1 / m, no column weights; the key and each block of negatives share one log-sum-exp."""
    check = world.known or validation
    more: tuple[Array, ...]
    more = () if negatives is None else tuple(negatives) if isinstance(negatives, Sequence) else (negatives,)
    named = {f"negatives[{i}]": x for i, x in enumerate(more)}
    arrays, (rows, *columns) = check.features(world.alone, may_be_empty=named, query=query, key=key, **named)
    m, n = rows.shape[0], sum(x.shape[0] for x in columns)
    if world.alone:
        # a queue that nothing has entered yet; one that wants a gradient has one, of no rows
        columns = [x for i, x in enumerate(columns) if i == 0 or x.shape[0] or getattr(x, "requires_grad", False)]
    state = state_dtype(arrays.dtype(rows))
    factor = check.scalar("scale", scale, arrays, state, rows)
    if (row_ids is None) != (column_ids is None):
        raise ValueError("row_ids and column_ids must be given together, got only one; give both, or neither")
    rows_of = None if row_ids is None else check.integers("row_ids", row_ids, m, "query", arrays, rows)
    of_columns = None if column_ids is None else check.integers("column_ids", column_ids, n, "column", arrays, rows)
    if positives is None:
        check.paired("query", query, "key", key, "give positives= to say which key is whose")
        where = None
    else:
        where = check.integers("positives", positives, m, "query", arrays, rows)
    met = world.meet(
        arrays,
        rows,
        columns,
        (scale, factor),
        loss="info_nce",
        positives=where is not None,
        row_ids=row_ids is not None,
    )
    pairs = _equal(check, arrays, 1.0 / met.rows, met.start, met.start + m, state, rows)
    if where is None:
        where = pairs.positives
    else:
        if validation.values_are_readable(arrays, where):
            world.confirm(validation.positives(where, met.columns))
        else:
            # a positive that is out of range makes the loss and all gradients NaN, as a scale of NaN does
            outside = ((where < 0) | (where >= met.columns)).any()
            factor = factor * arrays.where(outside, arrays.full((), float("nan"), state, rows), 1.0)
    problem = Problem(
        rows=rows,
        columns=tuple(columns),
        scale=factor,
        row_weight=pairs.weight,
        row_target=pairs.target,
        positives=where,
        row_ids=rows_of,
        column_ids=of_columns,
        placement=met.placement,
        equal=pairs,
    )
    return LossProblem(arrays, problem, lambda g: (*_like(arrays, (query, key), (g.rows, g.columns[0])), g.scale))


def nt_xent(view_a: Array, view_b: Array, scale: Any, *, world: Handshake = ALONE) -> LossProblem:
    """The 2b views against themselves, each excluded from its own columns: u = 1 / (2b)."""
    check = world.known or validation
    arrays, both = check.features(world.alone, view_a=view_a, view_b=view_b)
    check.paired("view_a", view_a, "view_b", view_b, "give two views of every sample")
    views = arrays.concat(list(both))
    m, state = view_a.shape[0], state_dtype(arrays.dtype(views))
    factor = check.scalar("scale", scale, arrays, state, views)
    met = world.meet(arrays, views, (views,), (scale, factor), loss="nt_xent")
    pairs = _equal(check, arrays, 1.0 / met.rows, met.start, met.start + 2 * m, state, views)
    itself = pairs.positives
    problem = Problem(
        rows=views,
        columns=(),
        scale=factor,
        row_weight=pairs.weight,
        row_target=pairs.target,
        positives=check.once("partners", lambda: arrays.concat([itself[m:], itself[:m]])),
        excluded=itself,
        placement=met.placement,
    )

    def pull_back(g: Gradients) -> tuple[Array, ...]:
        sides = both_sides(g)
        return *_like(arrays, (view_a, view_b), (sides[:m], sides[m:])), g.scale

    return LossProblem(arrays, problem, pull_back)


def sup_con(features: Array, labels: Array, scale: Any, *, world: Handshake = ALONE) -> LossProblem:
    """Samples against themselves, self excluded, t = 1 / |P(i)|; u = 1 / (samples that have a positive).

    Samples are taken in the order of their labels: few tiles then hold a positive, and the others look for none. A
    few on a host stay as they are.
    """
    check = world.known or validation
    arrays, (rows,) = check.features(world.alone, features=features)
    m, state = rows.shape[0], state_dtype(arrays.dtype(rows))
    labels = check.integers("labels", labels, m, "sample", arrays, rows)
    ordered, order = arrays.sorted(labels)
    stay = world.alone and m <= FEW and arrays.device(rows) == "cpu"
    if not stay:
        labels, rows = ordered, arrays.take(rows, order)
    factor = check.scalar("scale", scale, arrays, state, rows)
    met = world.meet(arrays, rows, (rows,), (scale, factor), loss="sup_con")
    count = arrays.count_in(labels, ordered) if stay else world.count_in(arrays, ordered)
    partners = arrays.cast(count - 1, state)
    counted = arrays.cast(partners > 0, state)
    # a batch in which no label repeats has loss 0, not 0 / 0
    sharing = arrays.maximum(arrays.cast(world.total(arrays, arrays.total(counted)), state), 1.0)
    problem = Problem(
        rows=rows,
        columns=(),
        scale=factor,
        row_weight=counted / sharing,
        row_target=counted / arrays.maximum(partners, 1.0),
        excluded=arrays.arange(met.start, met.start + m, rows),
        row_ids=labels,
        column_ids=labels,
        match="target",
        placement=met.placement,
    )

    def pull_back(g: Gradients) -> tuple[Array, ...]:
        found = both_sides(g)
        return *_like(arrays, (features,), (found if stay else arrays.put(found, order),)), g.scale

    return LossProblem(arrays, problem, pull_back)


def sigmoid(
    image: Array, text: Array, scale: Any, bias: Any = 0.0, *, ids: Array | None = None, world: Handshake = ALONE
) -> LossProblem:
    """The additive loss over all pairs, divided by b: u = 1 / b; the positive of row i is column i."""
    check = world.known or validation
    arrays, (rows, columns) = check.features(world.alone, image=image, text=text)
    check.paired("image", image, "text", text, "every image needs its text")
    m, state = rows.shape[0], state_dtype(arrays.dtype(rows))
    same = None if ids is None else check.integers("ids", ids, m, "pair", arrays, rows)
    factor = check.scalar("scale", scale, arrays, state, rows)
    added = check.scalar("bias", bias, arrays, state, rows)
    numbers = (scale, factor), (bias, added)
    met = world.meet(arrays, rows, (columns,), *numbers, loss="sigmoid_loss", ids=ids is not None)
    pairs = _equal(check, arrays, 1.0 / met.rows, met.start, met.start + m, state, rows)
    problem = Problem(
        kind="sigmoid",
        rows=rows,
        columns=(columns,),
        scale=factor,
        bias=added,
        row_weight=pairs.weight,
        row_target=pairs.target,
        positives=pairs.positives,
        row_ids=same,
        column_ids=same,
        placement=met.placement,
    )
    return LossProblem(
        arrays, problem, lambda g: (*_like(arrays, (image, text), (g.rows, g.columns[0])), g.scale, g.bias)
    )


BUILDERS: dict[str, Callable[..., LossProblem]] = {
    "clip_loss": clip,
    "info_nce": info_nce,
    "nt_xent": nt_xent,
    "sup_con": sup_con,
    "sigmoid_loss": sigmoid,
}
"""What makes the problem of each loss of the front door, by the loss's name."""


def _equal(
    check: Any, arrays: ArrayLibrary, number: float, start: int, stop: int, dtype: str, like: Array
) -> EqualPairs:
    found: EqualPairs = check.once("pairs", lambda: EqualPairs.of(arrays, number, start, stop, dtype, like))
    return found


def _like(arrays: ArrayLibrary, given: Sequence[Array], gradients: Sequence[Array]) -> Iterator[Array]:
    """The gradients in the dtypes of what was given: autocast may have had the loss take it in another."""
    return (arrays.cast(gradient, arrays.dtype(x)) for x, gradient in zip(given, gradients, strict=True))
