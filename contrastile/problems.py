"""Each loss as a problem: its weights, targets and pairs over the general form. No loss has code of its own below.

With a group, rows and columns are this rank's part of the global batch, ``Handshake.meet`` says where it lies, and
weights are those of the global loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from contrastile import validation
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, state_dtype
from contrastile.backends.objectives import STATISTICS
from contrastile.comm.buffers import split
from contrastile.forms import Guide, counts_of, form_of, limits_of, negatives_of, threshold_of, without_padding
from contrastile.order import Order
from contrastile.schedules.handshake import ALONE, Handshake
from contrastile.schedules.local import Gradients
from contrastile.schedules.problem import Problem


@dataclass(frozen=True, slots=True)
class LossProblem:
    """A problem in the caller's library, and how its gradients become those of the loss's positional arguments."""

    library: ArrayLibrary
    problem: Problem
    pull_back: Callable[[Gradients], tuple[Array, ...]]


def clip(
    image: Array,
    text: Array,
    scale: Any,
    *,
    ids: Array | None = None,
    ids_are: str = "false_negatives",
    sum_positives: str = "outside",
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    threshold: float | None = None,
    threshold_is: str = "absolute",
    guide: Any = None,
    world: Handshake = ALONE,
) -> LossProblem:
    """Both directions, halved: u = v = 1 / (2b); the positive of row i is column i."""
    check = world.known or validation
    limit = threshold_of(threshold, threshold_is, guide)
    form, agreed = form_of(ids, ids_are, sum_positives, label_smoothing, margin, limit, weights=weights, name="ids")
    arrays, (rows, columns) = check.features(world.alone, image=image, text=text)
    check.paired("image", image, "text", text, "use info_nce for keys without a query")
    m, state = rows.shape[0], state_dtype(arrays.dtype(rows))
    same = None if ids is None else check.integers("ids", ids, m, "pair", arrays, rows)
    factor = check.scalar("scale", scale, arrays, state, rows)
    of_guide = check.guide(guide, (m, m), arrays, rows)
    each = None if weights is None else check.floats("weights", weights, m, "pair", arrays, rows)
    order = Order.of(arrays, same, ids_are, world.alone)
    same, rows, columns, each = order.take(same, rows, columns, each)
    of_guide = order.take(*of_guide)
    has = {"ids": ids is not None, "guide": _width(of_guide), **agreed}
    met = world.meet(arrays, rows, (columns,), (scale, factor), loss="clip_loss", **has)
    u, weight, target, positives = _equal(check, arrays, 0.5 / met.rows, met.start, met.start + m, state, rows)
    if each is not None:
        weight = _shares(world, arrays, each, state, 0.5)
    if ids_are == "positives":
        target, positives = _reciprocal(arrays, world.count_in(arrays, same, order.rising(same)), state), None
    limits = limits_of(world, arrays, limit, (rows, (columns,)), of_guide, factor)
    problem = Problem(
        rows=rows,
        columns=(columns,),
        scale=factor,
        row_weight=weight,
        row_target=target,
        column_weight=weight,
        column_target=target,
        positives=positives,
        row_ids=same,
        column_ids=same,
        placement=met.placement,
        whole=u if same is None and not agreed else None,
        row_limits=limits,
        column_limits=limits,
        row_guide=of_guide[0],
        column_guide=of_guide[1],
        **form,
    )
    both = order, order
    return LossProblem(
        arrays, problem, lambda g: (*_like(arrays, (image, text), (g.rows, g.columns[0]), both), g.scale)
    )


def info_nce(
    query: Array,
    key: Array,
    scale: Any,
    *,
    negatives: Array | Sequence[Array] | None = None,
    negative_counts: Array | None = None,
    share_negatives: bool = True,
    in_batch: bool = True,
    positives: Array | None = None,
    row_ids: Array | None = None,
    column_ids: Array | None = None,
    ids_are: str = "false_negatives",
    sum_positives: str = "outside",
    weights: Array | None = None,
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    threshold: float | None = None,
    threshold_is: str = "absolute",
    guide: Any = None,
    args: Sequence[str] = ("query", "key", "row_ids", "column_ids"),
    world: Handshake = ALONE,
) -> LossProblem:
    """One direction: u = 1 / m, no column weights; the key and each block of negatives share one log-sum-exp.

    Where ids give the positives, u = 1 / (queries that have one). Negatives, or keys, that count for one query alone
    are beside the blocks: see ``Problem.own_counts``.
    """
    check = world.known or validation
    limit = threshold_of(threshold, threshold_is, guide)
    form, agreed = form_of(row_ids, ids_are, sum_positives, label_smoothing, margin, limit, positives, weights, args[2])
    of_ids = ids_are == "positives"
    has: dict[str, Any] = {"ids": row_ids is not None, "positives": of_ids or positives is not None}
    has.update(smoothing=label_smoothing, guide=guide is not None)
    named, deep = negatives_of(negatives, negative_counts, share_negatives, in_batch, **has)
    arrays, (rows, *others) = check.features(world.alone, may_be_empty=named, **{args[0]: query, args[1]: key}, **named)
    columns, m = list(others), rows.shape[0]  # torch 2.6 traces the others as a tuple
    counts: Any = None if deep is None and in_batch else counts_of(check, arrays, rows, deep, negative_counts)
    own = columns.pop() if not share_negatives else None if in_batch else arrays.detached(rows[:0])
    n = sum(x.shape[0] for x in columns)
    state = state_dtype(arrays.dtype(rows))
    factor = check.scalar("scale", scale, arrays, state, rows)
    if negative_counts is not None and not validation.values_are_readable(arrays, counts):
        factor = _nan_if(arrays, ((counts < 0) | (counts > (deep[1][1] if deep else 0))).any(), factor)
    rows_of, of_columns = ids_of_both(check, arrays, rows, "query", (args[2], row_ids, m), (args[3], column_ids, n))
    if share_negatives and deep is not None:
        rows_of, of_columns = without_padding(arrays, columns, 1 + [*named].index(deep[0]), counts)
    if positives is None and not of_ids:
        check.paired("query", query, "key", key, "give positives= to say which key is whose")
    where = None if positives is None else check.integers("positives", positives, m, "query", arrays, rows)
    of_guide = check.guide(guide, (m, n), arrays, rows)
    each = None if weights is None else check.floats("weights", weights, m, "query", arrays, rows)
    orders = [Order(arrays)] * 2
    if of_ids and own is guide is None and len(columns) == 1:
        orders = [Order.of(arrays, ids, ids_are, world.alone) for ids in (rows_of, of_columns)]
        rows_of, rows, each = orders[0].take(rows_of, rows, each)
        of_columns, *columns = orders[1].take(of_columns, *columns)
    if world.alone:
        # a queue that nothing has entered yet; one that wants a gradient has one, of no rows
        columns = [x for i, x in enumerate(columns) if i == 0 or x.shape[0] or getattr(x, "requires_grad", False)]
    has = {"positives": where is not None, "row_ids": rows_of is not None, "guide": _width(of_guide)}
    if own is not None:
        has.update(share_negatives=bool(share_negatives), in_batch=bool(in_batch))
        wants = [bool(getattr(x, "requires_grad", False)) for x in (*columns[: not in_batch], own)]
        has["gradients of own columns"] = tuple(wants)
    met = world.meet(arrays, rows, columns[not in_batch :], (scale, factor), loss="info_nce", **has, **agreed)
    u, weight, target, same = _equal(check, arrays, 1.0 / met.rows, met.start, met.start + m, state, rows)
    plain = own is where is rows_of is None and not agreed and len(columns) == 1
    if each is not None or of_ids:
        if of_ids:
            count = world.count_in(arrays, rows_of, orders[1].rising(of_columns), of_rows=False)
            target = _reciprocal(arrays, count, state)
            counted = arrays.cast(count > 0, "float64")
            each = counted if each is None else counted * each
        weight = _shares(world, arrays, each, state)
    if where is not None:
        factor = _of_known(world, arrays, where, met.columns, factor)
    limits = limits_of(world, arrays, limit, (rows, columns), of_guide, factor, where)
    if where is None and not of_ids and in_batch:
        where = same
    placement = met.placement
    if own is not None and placement is not None and placement.exchange == "replicate":
        # to each rank every other rank's own negatives would have to travel
        placement = replace(placement, exchange="gather")
    problem = Problem(
        rows=rows,
        columns=tuple(columns) if own is None else (*columns, own),
        scale=factor,
        row_weight=weight,
        row_target=target,
        positives=where,
        row_ids=rows_of,
        column_ids=of_columns if in_batch or of_columns is None else of_columns[key.shape[0] :],
        placement=placement,
        whole=u if plain else None,
        row_limits=limits,
        row_guide=of_guide[0],
        column_guide=of_guide[1],
        own_counts=None if own is None else 0 * counts if share_negatives else counts,
        **form,
    )
    return LossProblem(
        arrays, problem, lambda g: (*_like(arrays, (query, key), (g.rows, g.columns[0]), orders), g.scale)
    )


def nt_xent(
    view_a: Array,
    view_b: Array,
    scale: Any,
    *,
    weights: Array | None = None,
    margin: float = 0.0,
    world: Handshake = ALONE,
) -> LossProblem:
    """The 2b views against themselves, each excluded from its own columns: u = 1 / (2b)."""
    check = world.known or validation
    form, agreed = form_of(None, margin=margin, weights=weights)
    arrays, both = check.features(world.alone, view_a=view_a, view_b=view_b)
    check.paired("view_a", view_a, "view_b", view_b, "give two views of every sample")
    views = arrays.concat(list(both))
    m, state = view_a.shape[0], state_dtype(arrays.dtype(views))
    factor = check.scalar("scale", scale, arrays, state, views)
    each = None if weights is None else check.floats("weights", weights, m, "sample", arrays, views)
    met = world.meet(arrays, views, (views,), (scale, factor), loss="nt_xent", **agreed)
    u, weight, target, itself = _equal(check, arrays, 1.0 / met.rows, met.start, met.start + 2 * m, state, views)
    if each is not None:
        weight = _shares(world, arrays, arrays.concat([each] * 2), state)
    problem = Problem(
        rows=views,
        columns=(),
        scale=factor,
        row_weight=weight,
        row_target=target,
        positives=check.once("partners", lambda: arrays.concat([itself[m:], itself[:m]])),
        excluded=itself,
        placement=met.placement,
        whole=None if agreed else u,
        **form,
    )
    return LossProblem(arrays, problem, lambda g: (*_like(arrays, (view_a, view_b), split(g.rows, (m, m))), g.scale))


def sup_con(
    features: Array,
    labels: Array,
    scale: Any,
    *,
    keys: Array | None = None,
    key_labels: Array | None = None,
    sum_positives: str = "outside",
    weights: Array | None = None,
    margin: float = 0.0,
    world: Handshake = ALONE,
) -> LossProblem:
    """Samples against themselves, self excluded, t = 1 / |P(i)|; u = 1 / (samples that have a positive)."""
    if keys is not None or key_labels is not None:
        if keys is None or key_labels is None:
            raise ValueError("keys and key_labels must be given together, got only one; give both, or neither")
        more: Any = {"row_ids": labels, "column_ids": key_labels, "ids_are": "positives", "weights": weights}
        named: Any = {"sum_positives": sum_positives, "args": ("features", "keys", "labels", "key_labels")}
        found = info_nce(features, keys, scale, **more, **named, margin=margin, world=world)
        return LossProblem(found.library, found.problem, lambda g: (found.pull_back(g)[0], g.scale))
    check = world.known or validation
    form, agreed = form_of(labels, "positives", sum_positives, margin=margin, weights=weights)
    arrays, (rows,) = check.features(world.alone, features=features)
    m, state = rows.shape[0], state_dtype(arrays.dtype(rows))
    labels = check.integers("labels", labels, m, "sample", arrays, rows)
    factor = check.scalar("scale", scale, arrays, state, rows)
    each = None if weights is None else check.floats("weights", weights, m, "sample", arrays, rows)
    order = Order.of(arrays, labels, "positives", world.alone)
    labels, rows, each = order.take(labels, rows, each)
    met = world.meet(arrays, rows, (rows,), (scale, factor), loss="sup_con", **agreed)
    count = world.count_in(arrays, labels, order.rising(labels))
    partners = arrays.cast(count - 1, state)
    counted = arrays.cast(partners > 0, "float64")
    if each is not None:
        counted = counted * each
    problem = Problem(
        rows=rows,
        columns=(),
        scale=factor,
        row_weight=_shares(world, arrays, counted, state),
        row_target=arrays.where(partners > 0, 1.0 / arrays.maximum(partners, 1.0), 0.0),
        excluded=arrays.arange(met.start, met.start + m, rows),
        row_ids=labels,
        column_ids=labels,
        placement=met.placement,
        whole=1.0 if weights is None and form["kind"] == "softmax" and form["margin"] is None else None,
        **form,
    )
    return LossProblem(arrays, problem, lambda g: (*_like(arrays, (features,), (g.rows,), (order,)), g.scale))


def sigmoid(
    image: Array,
    text: Array,
    scale: Any,
    bias: Any = 0.0,
    *,
    ids: Array | None = None,
    ids_are: str = "false_negatives",
    mean_positives: bool = False,
    weights: Array | None = None,
    world: Handshake = ALONE,
) -> LossProblem:
    """The additive loss over all pairs, divided by b: u = 1 / b; the positive of row i is column i."""
    check = world.known or validation
    if validation.flag("mean_positives", mean_positives) and ids_are != "positives":
        raise ValueError("mean_positives must be False for one positive each, got True; give ids_are='positives'")
    form, agreed = form_of(ids, ids_are, weights=weights, name="ids")
    arrays, (rows, columns) = check.features(world.alone, image=image, text=text)
    check.paired("image", image, "text", text, "every image needs its text")
    m, state = rows.shape[0], state_dtype(arrays.dtype(rows))
    same = None if ids is None else check.integers("ids", ids, m, "pair", arrays, rows)
    factor = check.scalar("scale", scale, arrays, state, rows)
    added = check.scalar("bias", bias, arrays, state, rows)
    each = None if weights is None else check.floats("weights", weights, m, "image", arrays, rows)
    order = Order.of(arrays, same, ids_are, world.alone)
    same, rows, columns, each = order.take(same, rows, columns, each)
    numbers = (scale, factor), (bias, added)
    has = {"ids": ids is not None, "mean_positives": bool(mean_positives)}
    met = world.meet(arrays, rows, (columns,), *numbers, loss="sigmoid_loss", **has, **agreed)
    u, weight, target, own = _equal(check, arrays, 1.0 / met.rows, met.start, met.start + m, state, rows)
    if mean_positives:
        each = arrays.full((m,), 1.0, "float64", rows) if each is None else each
        share = _reciprocal(arrays, world.count_in(arrays, same, order.rising(same)), "float64")
        parts = [_shares(world, arrays, each, state, part) for part in (share, 1.0 - share)]
        weight = arrays.module.stack(parts, -1)
    elif each is not None:
        weight = _shares(world, arrays, each, state)
    problem = Problem(
        rows=rows,
        columns=(columns,),
        scale=factor,
        bias=added,
        row_weight=weight,
        row_target=target,
        positives=None if ids_are == "positives" else own,
        row_ids=same,
        column_ids=same,
        placement=met.placement,
        whole=u if same is None and not agreed else None,
        **{**form, "kind": "sigmoid"},
    )
    both = order, order
    return LossProblem(
        arrays, problem, lambda g: (*_like(arrays, (image, text), (g.rows, g.columns[0]), both), g.scale, g.bias)
    )


def statistics(
    rows: Array,
    columns: Array | None,
    scale: Any,
    *,
    negatives: Array | Sequence[Array] | None = None,
    positives: Array | None = None,
    row_ids: Array | None = None,
    column_ids: Array | None = None,
    ids_are: str = "false_negatives",
    row_limits: Array | None = None,
    column_limits: Array | None = None,
    guide: Any = None,
    world: Handshake = ALONE,
) -> LossProblem:
    """N, P and D of the rows and of the columns: t = 1 / the number of positives."""
    check, itself = world.known or validation, columns is None
    form, agreed = form_of(row_ids, ids_are, positives=positives)
    match = "target" if ids_are == "positives" else "drop"
    of_others = {"negatives": negatives, "column_ids": column_ids, "positives": positives}
    of_others.update(row_limits=row_limits, column_limits=column_limits, guide=guide)
    for name, given in of_others.items():
        if itself and given is not None:
            raise ValueError(f"{name} must be None with columns=None, got one; give row_ids, or columns")
    if guide is not None and row_limits is column_limits is None:
        raise ValueError("guide must be None without limits, got one; give row_limits or column_limits, or both")
    named = {} if itself else {"columns": columns, **negatives_of(negatives)[0]}
    arrays, (rows, *blocks) = check.features(world.alone, may_be_empty=set(named) - {"columns"}, rows=rows, **named)
    m, n, state = rows.shape[0], sum(x.shape[0] for x in blocks), state_dtype(arrays.dtype(rows))
    factor = check.scalar("scale", scale, arrays, state, rows)
    of_columns = ("row_ids", row_ids, m) if itself else ("column_ids", column_ids, n)
    ids = ids_of_both(check, arrays, rows, "row", ("row_ids", row_ids, m), of_columns)
    limits = [
        None if x is None else arrays.cast(check.floats(name, x, size, of, arrays, rows), state)
        for name, x, size, of in (("row_limits", row_limits, m, "row"), ("column_limits", column_limits, n, "column"))
    ]
    where = None if positives is None else check.integers("positives", positives, m, "row", arrays, rows)
    if where is None and match == "drop" and not itself:
        check.paired("rows", rows, "columns", blocks[0], "give positives= to say which column is whose")
    of_guide = check.guide(guide, (m, n), arrays, rows)
    asked: dict[str, Any] = {"positives": where is not None, "ids": ids[0] is not None, "guide": _width(of_guide)}
    asked.update({"limits": tuple(x is not None for x in limits), "rows against themselves": itself})
    met = world.meet(arrays, rows, blocks or (rows,), (scale, factor), loss="statistics", **asked, **agreed)
    own = arrays.arange(met.start, met.start + m, rows)
    t, over = (arrays.full((size,), 1.0, state, rows) for size in (m, n))
    if match == "target":
        of_rows, of_columns = (arrays.sorted(x)[0] for x in ids)
        count = world.count_in(arrays, ids[0], of_columns, of_rows=itself)
        t = _reciprocal(arrays, count - 1 if itself else count, state)
        over = t if itself else _reciprocal(arrays, world.count_in(arrays, ids[1], of_rows), state)
    elif where is not None:
        factor = _of_known(world, arrays, where, met.columns, factor, least=-1)
        # several rows may have one column
        numbers = arrays.arange(met.start, met.start + n, rows)
        over = _reciprocal(arrays, world.count_in(arrays, numbers, arrays.sorted(where)[0]), state)
    problem = Problem(
        rows=rows,
        columns=tuple(blocks),
        scale=factor,
        row_weight=t,
        row_target=t,
        column_weight=None if itself else over,
        column_target=None if itself else over,
        positives=None if match == "target" or itself else own if where is None else where,
        excluded=own if itself else None,
        row_ids=ids[0],
        column_ids=ids[1],
        # what the ranks make of their statistics is differentiated as it stands: no factor
        placement=None if met.placement is None else replace(met.placement, reduction="sum"),
        row_limits=limits[0],
        column_limits=limits[1],
        row_guide=of_guide[0],
        column_guide=of_guide[1],
        **{**form, "kind": STATISTICS},
    )
    return LossProblem(arrays, problem, lambda g: ())


BUILDERS: dict[str, Callable[..., LossProblem]] = {
    "clip_loss": clip,
    "info_nce": info_nce,
    "nt_xent": nt_xent,
    "sup_con": sup_con,
    "sigmoid_loss": sigmoid,
}
"""What makes the problem of each loss of the front door, by the loss's name."""


def _width(guide: Guide) -> int | None:
    """Of the guide's features, which every rank must have alike."""
    return None if guide[0] is None else int(guide[0].shape[1])


def ids_of_both(check: Any, arrays: ArrayLibrary, rows: Array, of: str, *given: tuple[str, Any, int]) -> list[Any]:
    """The ids of the rows and of the columns, each given with its name and length; None twice where there are none."""
    (_, row_ids, _), (_, column_ids, _) = given
    if (row_ids is None) != (column_ids is None):
        raise ValueError("row_ids and column_ids must be given together, got only one; give both, or neither")
    return [
        None if x is None else check.integers(name, x, size, what, arrays, rows)
        for (name, x, size), what in zip(given, (of, "column"), strict=True)
    ]


def _of_known(
    world: Handshake, arrays: ArrayLibrary, where: Array, columns: int, scale: Array, least: int = 0
) -> Array:
    """The scale; where values cannot be read, NaN if a positive is out of range: so are all results and gradients then.

    Raises:
        ValueError: a positive that can be read is out of range; in a group, on every rank.
    """
    if validation.values_are_readable(arrays, where):
        world.confirm(validation.positives(where, columns, least))
        return scale
    return _nan_if(arrays, ((where < least) | (where >= columns)).any(), scale)


def _nan_if(arrays: ArrayLibrary, wrong: Array, scale: Array) -> Array:
    return scale * arrays.where(wrong, arrays.full((), float("nan"), arrays.dtype(scale), scale), 1.0)


def _shares(world: Handshake, arrays: ArrayLibrary, weights: Array, state: str, whole: Any = 1.0) -> Array:
    """The weights, float64, divided by their sum over all ranks, times ``whole``; 0 stays 0 where the sum is."""
    total = world.total(arrays, arrays.total(weights))
    return arrays.cast(whole * weights / arrays.where(weights == 0, 1.0, total), state)


def _reciprocal(arrays: ArrayLibrary, count: Array, state: str) -> Array:
    """1 / count, and 1 for a count of 0."""
    return 1.0 / arrays.maximum(arrays.cast(count, state), 1.0)


def _equal(
    check: Any, arrays: ArrayLibrary, number: float, start: int, stop: int, dtype: str, like: Array
) -> Sequence[Any]:
    """A number, weights of it, targets of 1, and positives in a row: columns ``start`` to ``stop`` - 1."""

    def made() -> Sequence[Any]:
        of = [arrays.full((stop - start,), value, dtype, like) for value in (number, 1.0)]
        return number, *of, arrays.arange(start, stop, like)

    found: Sequence[Any] = check.once("pairs", made)
    return found


def _like(
    arrays: ArrayLibrary, given: Sequence[Array], gradients: Sequence[Array], orders: Sequence[Order] = ()
) -> Iterator[Array]:
    """The gradients, taken in these orders, in the order and dtypes of what was given: autocast may take another."""
    if orders:
        gradients = [order.put(x) for order, x in zip(orders, gradients, strict=True)]
    return (arrays.cast(gradient, arrays.dtype(x)) for x, gradient in zip(given, gradients, strict=True))
