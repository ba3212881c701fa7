"""Each loss as a problem: weights, targets and pairs of the general form. Lower layers have no code for one loss.

With a group, rows and columns are this rank's part of the global batch, whose position ``Handshake.meet`` returns.
Weights are those of the global loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from contrastile import validation
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, state_dtype
from contrastile.backends.objectives import STATISTICS
from contrastile.comm.buffers import split
from contrastile.forms import (
    Guide,
    counts_of,
    form_of,
    ids_of_both,
    limits_of,
    nan_if,
    negatives_of,
    scale_or_nan,
    threshold_of,
    without_padding,
)
from contrastile.order import Order, restored
from contrastile.schedules.handshake import ALONE, Handshake
from contrastile.schedules.local import Gradients
from contrastile.schedules.problem import Problem


class Taught(NamedTuple):
    """A teacher's scale, as it was given, and what else must be the same on all ranks: see ``teachers``."""

    scale: Any
    width: int
    share: float
    teachers: int


@dataclass(frozen=True, slots=True)
class LossProblem:
    """A problem in the caller's library, and the map from its gradients to those of the loss's positional arguments."""

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
    teacher: Taught | None = None,
    world: Handshake = ALONE,
) -> LossProblem:
    """Both directions, halved: u = v = 1 / (2b); the positive of row i is column i. ``teacher``: see ``teachers``."""
    check = world.known or validation
    rule = threshold_of(threshold, threshold_is, guide)
    form, options = form_of(ids, ids_are, sum_positives, label_smoothing, margin, rule, weights=weights, name="ids")
    arrays, (rows, columns) = check.features(world.alone, image=image, text=text)
    check.paired("image", image, "text", text, "use info_nce for keys without a query")
    m, state = rows.shape[0], state_dtype(arrays.dtype(rows))
    ids = None if ids is None else check.integers("ids", ids, m, "pair", arrays, rows)
    numbers, scale_0d, teacher_0d = _scales(check, arrays, state, rows, scale, teacher)
    guides = check.guide(guide, (m, m), arrays, rows)
    weights = None if weights is None else check.floats("weights", weights, m, "pair", arrays, rows)
    order = Order.of(arrays, ids, ids_are, world.alone)
    ids, rows, columns, weights = order.take(ids, rows, columns, weights)
    guides = order.take(*guides)
    traits = {"ids": ids is not None, "guide": _width(guides), "teacher": teacher and teacher[1:], **options}
    batch = world.meet(arrays, rows, (columns,), *numbers, loss="clip_loss", **traits)
    u, weight, target, positives = _pairs(check, arrays, 0.5 / batch.rows, batch.start, batch.start + m, state, rows)
    if weights is not None:
        weight = _normalized_weights(world, arrays, weights, state, 0.5)
    if ids_are == "positives":
        target, positives = _reciprocal(arrays, world.count_in(arrays, ids, order.rising(ids)), state), None
    scale_0d, limits = limits_of(world, arrays, rule, (rows, (columns,)), guides, scale_0d)
    problem = Problem(
        rows=rows,
        columns=(columns,),
        scale=scale_0d,
        row_weight=weight,
        row_target=target,
        column_weight=weight,
        column_target=target,
        positives=positives,
        row_ids=ids,
        column_ids=ids,
        placement=batch.placement,
        whole=u if ids is None and not options else None,
        row_limits=limits,
        column_limits=limits,
        row_guide=guides[0],
        column_guide=guides[1],
        bias=teacher_0d,
        **form,
    )
    return LossProblem(
        arrays, problem, lambda g: (*restored(arrays, (image, text), (g.rows, g.columns[0]), (order, order)), g.scale)
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
    teacher: Taught | None = None,
    args: Sequence[str] = ("query", "key", "row_ids", "column_ids"),
    world: Handshake = ALONE,
) -> LossProblem:
    """One direction: u = 1 / m, no column weights; the key and each block of negatives share one log-sum-exp.

    If ids define the positives, u = 1 / (queries that have a positive). Negatives or keys that count for one query
    alone are not among the shared blocks: see ``Problem.own_counts``.
    """
    check = world.known or validation
    rule = threshold_of(threshold, threshold_is, guide)
    form, options = form_of(row_ids, ids_are, sum_positives, label_smoothing, margin, rule, positives, weights, args[2])
    are_positives = ids_are == "positives"
    traits: dict[str, Any] = {"ids": row_ids is not None, "positives": are_positives or positives is not None}
    traits.update(smoothing=label_smoothing, guide=guide is not None)
    negatives, per_query = negatives_of(negatives, negative_counts, share_negatives, in_batch, **traits)
    arrays, (rows, *column_blocks) = check.features(
        world.alone, may_be_empty=negatives, **{args[0]: query, args[1]: key}, **negatives
    )
    columns, m = list(column_blocks), rows.shape[0]  # torch 2.6 traces the blocks as a tuple
    counts: Any = None if per_query is None and in_batch else counts_of(check, arrays, rows, per_query, negative_counts)
    own_block = columns.pop() if not share_negatives else None if in_batch else arrays.detached(rows[:0])
    n, state = sum(x.shape[0] for x in columns), state_dtype(arrays.dtype(rows))
    numbers, scale_0d, teacher_0d = _scales(check, arrays, state, rows, scale, teacher)
    if negative_counts is not None and not validation.values_are_readable(arrays, counts):
        scale_0d = nan_if(arrays, ((counts < 0) | (counts > (per_query[1][1] if per_query else 0))).any(), scale_0d)
    row_ids, column_ids = ids_of_both(check, arrays, rows, "query", (args[2], row_ids, m), (args[3], column_ids, n))
    if share_negatives and per_query is not None:
        row_ids, column_ids = without_padding(arrays, columns, 1 + [*negatives].index(per_query[0]), counts)
    if positives is None and not are_positives:
        check.paired("query", query, "key", key, "give positives= to say which key is whose")
    positives = None if positives is None else check.integers("positives", positives, m, "query", arrays, rows)
    guides = check.guide(guide, (m, n), arrays, rows)
    weights = None if weights is None else check.floats("weights", weights, m, "query", arrays, rows)
    orders = [Order(arrays)] * 2
    if are_positives and own_block is guide is None and len(columns) == 1:
        orders = [Order.of(arrays, ids, ids_are, world.alone) for ids in (row_ids, column_ids)]
        row_ids, rows, weights = orders[0].take(row_ids, rows, weights)
        column_ids, *columns = orders[1].take(column_ids, *columns)
    if world.alone:
        # drop an empty queue, unless it requires a gradient: its gradient has no rows
        columns = [x for i, x in enumerate(columns) if i == 0 or x.shape[0] or getattr(x, "requires_grad", False)]
    traits = {"positives": positives is not None, "row_ids": row_ids is not None, "guide": _width(guides)}
    traits["teacher"] = teacher and teacher[1:]
    if own_block is not None:
        traits.update(share_negatives=bool(share_negatives), in_batch=bool(in_batch))
        needs_gradient = [bool(getattr(x, "requires_grad", False)) for x in (*columns[: not in_batch], own_block)]
        traits["gradients of own columns"] = tuple(needs_gradient)
    batch = world.meet(arrays, rows, columns[not in_batch :], *numbers, loss="info_nce", **traits, **options)
    u, weight, target, diagonal = _pairs(check, arrays, 1.0 / batch.rows, batch.start, batch.start + m, state, rows)
    is_plain = own_block is positives is row_ids is None and not options and len(columns) == 1
    if weights is not None or are_positives:
        if are_positives:
            count = world.count_in(arrays, row_ids, orders[1].rising(column_ids), of_rows=False)
            target = _reciprocal(arrays, count, state)
            has_positive = arrays.cast(count > 0, "float64")
            weights = has_positive if weights is None else has_positive * weights
        weight = _normalized_weights(world, arrays, weights, state)
    if positives is not None:
        padding = None if negative_counts is None else column_ids
        scale_0d = scale_or_nan(world, arrays, positives, batch.columns, scale_0d, padding=padding)
    scale_0d, limits = limits_of(world, arrays, rule, (rows, columns), guides, scale_0d, positives)
    if positives is None and not are_positives and in_batch:
        positives = diagonal
    placement = batch.placement
    if own_block is not None and placement is not None and placement.exchange == "replicate":
        # "replicate" would send every rank's own negatives to all ranks
        placement = replace(placement, exchange="gather")
    problem = Problem(
        rows=rows,
        columns=tuple(columns) if own_block is None else (*columns, own_block),
        scale=scale_0d,
        row_weight=weight,
        row_target=target,
        positives=positives,
        row_ids=row_ids,
        column_ids=column_ids if in_batch or column_ids is None else column_ids[key.shape[0] :],
        placement=placement,
        whole=u if is_plain else None,
        row_limits=limits,
        row_guide=guides[0],
        column_guide=guides[1],
        own_counts=None if own_block is None else 0 * counts if share_negatives else counts,
        bias=teacher_0d,
        **form,
    )
    return LossProblem(
        arrays, problem, lambda g: (*restored(arrays, (query, key), (g.rows, g.columns[0]), orders), g.scale)
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
    form, options = form_of(None, margin=margin, weights=weights)
    arrays, features = check.features(world.alone, view_a=view_a, view_b=view_b)
    check.paired("view_a", view_a, "view_b", view_b, "give two views of every sample")
    views = arrays.concat(list(features))
    m, state = view_a.shape[0], state_dtype(arrays.dtype(views))
    scale_0d = check.scalar("scale", scale, arrays, state, views)
    weights = None if weights is None else check.floats("weights", weights, m, "sample", arrays, views)
    batch = world.meet(arrays, views, (views,), (scale, scale_0d), loss="nt_xent", **options)
    u, weight, target, itself = _pairs(check, arrays, 1.0 / batch.rows, batch.start, batch.start + 2 * m, state, views)
    if weights is not None:
        weight = _normalized_weights(world, arrays, arrays.concat([weights] * 2), state)
    problem = Problem(
        rows=views,
        columns=(),
        scale=scale_0d,
        row_weight=weight,
        row_target=target,
        positives=check.once("partners", lambda: arrays.concat([itself[m:], itself[:m]])),
        excluded=itself,
        placement=batch.placement,
        whole=None if options else u,
        **form,
    )
    return LossProblem(arrays, problem, lambda g: (*restored(arrays, (view_a, view_b), split(g.rows, (m, m))), g.scale))


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
        arguments: Any = {"row_ids": labels, "column_ids": key_labels, "ids_are": "positives", "weights": weights}
        more: Any = {"sum_positives": sum_positives, "args": ("features", "keys", "labels", "key_labels")}
        loss = info_nce(features, keys, scale, **arguments, **more, margin=margin, world=world)
        return LossProblem(loss.library, loss.problem, lambda g: (loss.pull_back(g)[0], g.scale))
    check = world.known or validation
    form, options = form_of(labels, "positives", sum_positives, margin=margin, weights=weights)
    arrays, (rows,) = check.features(world.alone, features=features)
    m, state = rows.shape[0], state_dtype(arrays.dtype(rows))
    labels = check.integers("labels", labels, m, "sample", arrays, rows)
    scale_0d = check.scalar("scale", scale, arrays, state, rows)
    weights = None if weights is None else check.floats("weights", weights, m, "sample", arrays, rows)
    order = Order.of(arrays, labels, "positives", world.alone)
    labels, rows, weights = order.take(labels, rows, weights)
    batch = world.meet(arrays, rows, (rows,), (scale, scale_0d), loss="sup_con", **options)
    count = world.count_in(arrays, labels, order.rising(labels))
    partners = arrays.cast(count - 1, state)
    weight = arrays.cast(partners > 0, "float64")
    if weights is not None:
        weight = weight * weights
    problem = Problem(
        rows=rows,
        columns=(),
        scale=scale_0d,
        row_weight=_normalized_weights(world, arrays, weight, state),
        row_target=arrays.where(partners > 0, 1.0 / arrays.maximum(partners, 1.0), 0.0),
        excluded=arrays.arange(batch.start, batch.start + m, rows),
        row_ids=labels,
        column_ids=labels,
        placement=batch.placement,
        whole=1.0 if weights is None and form["kind"] == "softmax" and form["margin"] is None else None,
        **form,
    )
    return LossProblem(arrays, problem, lambda g: (*restored(arrays, (features,), (g.rows,), (order,)), g.scale))


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
    form, options = form_of(ids, ids_are, weights=weights, name="ids")
    arrays, (rows, columns) = check.features(world.alone, image=image, text=text)
    check.paired("image", image, "text", text, "every image needs its text")
    m, state = rows.shape[0], state_dtype(arrays.dtype(rows))
    ids = None if ids is None else check.integers("ids", ids, m, "pair", arrays, rows)
    scale_0d = check.scalar("scale", scale, arrays, state, rows)
    bias_0d = check.scalar("bias", bias, arrays, state, rows)
    weights = None if weights is None else check.floats("weights", weights, m, "image", arrays, rows)
    order = Order.of(arrays, ids, ids_are, world.alone)
    ids, rows, columns, weights = order.take(ids, rows, columns, weights)
    numbers = (scale, scale_0d), (bias, bias_0d)
    traits = {"ids": ids is not None, "mean_positives": bool(mean_positives)}
    batch = world.meet(arrays, rows, (columns,), *numbers, loss="sigmoid_loss", **traits, **options)
    u, weight, target, diagonal = _pairs(check, arrays, 1.0 / batch.rows, batch.start, batch.start + m, state, rows)
    if mean_positives:
        weights = arrays.full((m,), 1.0, "float64", rows) if weights is None else weights
        share = _reciprocal(arrays, world.count_in(arrays, ids, order.rising(ids)), "float64")
        weight_pairs = [_normalized_weights(world, arrays, weights, state, factor) for factor in (share, 1.0 - share)]
        weight = arrays.module.stack(weight_pairs, -1)
    elif weights is not None:
        weight = _normalized_weights(world, arrays, weights, state)
    problem = Problem(
        rows=rows,
        columns=(columns,),
        scale=scale_0d,
        bias=bias_0d,
        row_weight=weight,
        row_target=target,
        positives=None if ids_are == "positives" else diagonal,
        row_ids=ids,
        column_ids=ids,
        placement=batch.placement,
        whole=u if ids is None and not options else None,
        **{**form, "kind": "sigmoid"},
    )
    orders = order, order
    return LossProblem(
        arrays, problem, lambda g: (*restored(arrays, (image, text), (g.rows, g.columns[0]), orders), g.scale, g.bias)
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
    check, is_symmetric = world.known or validation, columns is None
    form, options = form_of(row_ids, ids_are, positives=positives)
    match = "target" if ids_are == "positives" else "drop"
    column_arguments = {"negatives": negatives, "column_ids": column_ids, "positives": positives}
    column_arguments.update(row_limits=row_limits, column_limits=column_limits, guide=guide)
    for name, argument in column_arguments.items():
        if is_symmetric and argument is not None:
            raise ValueError(f"{name} must be None with columns=None, got one; give row_ids, or columns")
    if guide is not None and row_limits is column_limits is None:
        raise ValueError("guide must be None without limits, got one; give row_limits or column_limits, or both")
    inputs = {} if is_symmetric else {"columns": columns, **negatives_of(negatives)[0]}
    arrays, (rows, *blocks) = check.features(world.alone, may_be_empty=set(inputs) - {"columns"}, rows=rows, **inputs)
    m, n, state = rows.shape[0], sum(x.shape[0] for x in blocks), state_dtype(arrays.dtype(rows))
    scale_0d = check.scalar("scale", scale, arrays, state, rows)
    column_argument = ("row_ids", row_ids, m) if is_symmetric else ("column_ids", column_ids, n)
    ids = ids_of_both(check, arrays, rows, "row", ("row_ids", row_ids, m), column_argument)
    limits = [
        None if x is None else arrays.cast(check.floats(name, x, size, noun, arrays, rows), state)
        for name, x, size, noun in (("row_limits", row_limits, m, "row"), ("column_limits", column_limits, n, "column"))
    ]
    positives = None if positives is None else check.integers("positives", positives, m, "row", arrays, rows)
    if positives is None and match == "drop" and not is_symmetric:
        check.paired("rows", rows, "columns", blocks[0], "give positives= to say which column is whose")
    guides = check.guide(guide, (m, n), arrays, rows)
    traits: dict[str, Any] = {"positives": positives is not None, "ids": ids[0] is not None, "guide": _width(guides)}
    traits.update({"limits": tuple(x is not None for x in limits), "rows against themselves": is_symmetric})
    batch = world.meet(arrays, rows, blocks or (rows,), (scale, scale_0d), loss="statistics", **traits, **options)
    diagonal = arrays.arange(batch.start, batch.start + m, rows)
    t_rows, t_columns = (arrays.full((size,), 1.0, state, rows) for size in (m, n))
    if match == "target":
        row_keys, column_keys = (arrays.sorted(x)[0] for x in ids)
        count = world.count_in(arrays, ids[0], column_keys, of_rows=is_symmetric)
        t_rows = _reciprocal(arrays, count - 1 if is_symmetric else count, state)
        t_columns = t_rows if is_symmetric else _reciprocal(arrays, world.count_in(arrays, ids[1], row_keys), state)
    elif positives is not None:
        scale_0d = scale_or_nan(world, arrays, positives, batch.columns, scale_0d, least=-1)
        # several rows may share one positive
        column_numbers = arrays.arange(batch.start, batch.start + n, rows)
        t_columns = _reciprocal(arrays, world.count_in(arrays, column_numbers, arrays.sorted(positives)[0]), state)
    problem = Problem(
        rows=rows,
        columns=tuple(blocks),
        scale=scale_0d,
        row_weight=t_rows,
        row_target=t_rows,
        column_weight=None if is_symmetric else t_columns,
        column_target=None if is_symmetric else t_columns,
        positives=None if match == "target" or is_symmetric else diagonal if positives is None else positives,
        excluded=diagonal if is_symmetric else None,
        row_ids=ids[0],
        column_ids=ids[1],
        # "sum": each rank differentiates its own function of the statistics, without a factor for the trainer
        placement=None if batch.placement is None else replace(batch.placement, reduction="sum"),
        row_limits=limits[0],
        column_limits=limits[1],
        row_guide=guides[0],
        column_guide=guides[1],
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
"""The function that builds the problem of each public loss, by the loss's name."""


def _width(guide: Guide) -> int | None:
    """The width of the guide's features, which must be equal on all ranks."""
    return None if guide[0] is None else int(guide[0].shape[1])


def _scales(
    check: Any, arrays: ArrayLibrary, state: str, rows: Array, scale: Any, teacher: Taught | None
) -> tuple[Sequence[tuple[Any, Array]], Array, Array | None]:
    """The numbers for ``Handshake.meet``, and the scale and a teacher's scale, or None, as 0-d arrays."""
    scale_0d = check.scalar("scale", scale, arrays, state, rows)
    if teacher is None:
        return [(scale, scale_0d)], scale_0d, None
    teacher_0d = check.scalar("teacher[2]", teacher.scale, arrays, state, rows)
    return [(scale, scale_0d), (teacher.scale, teacher_0d)], scale_0d, teacher_0d


def _normalized_weights(world: Handshake, arrays: ArrayLibrary, weights: Array, state: str, factor: Any = 1.0) -> Array:
    """``factor`` times the float64 weights over their sum on all ranks; weights of 0 stay 0 if the sum is 0."""
    total = world.total(arrays, arrays.total(weights))
    # NaN in place of a sum that overflows
    return arrays.cast(factor * weights / arrays.where(weights == 0, 1.0, total + 0 * total), state)


def _reciprocal(arrays: ArrayLibrary, count: Array, state: str) -> Array:
    """1 / count, or 1 for a count of 0."""
    return 1.0 / arrays.maximum(arrays.cast(count, state), 1.0)


def _pairs(
    check: Any, arrays: ArrayLibrary, weight: float, start: int, stop: int, dtype: str, like: Array
) -> Sequence[Any]:
    """``weight``, and of rows with positives ``start`` to ``stop`` - 1: their weights, targets of 1, and positives."""

    def make_pairs() -> Sequence[Any]:
        weights_and_targets = [arrays.full((stop - start,), value, dtype, like) for value in (weight, 1.0)]
        return weight, *weights_and_targets, arrays.arange(start, stop, like)

    pairs: Sequence[Any] = check.once("pairs", make_pairs)
    return pairs
