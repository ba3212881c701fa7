"""From the options of a call to the fields of its problem: the form of the loss, limits and negatives."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

from contrastile import validation
from contrastile.backends.arrays import Array, ArrayLibrary
from contrastile.schedules.handshake import Handshake

Guide = tuple[Array, Array]
"""The guide's features of the rows and of the columns; (None, None) without a guide."""

_LARGEST = validation.LARGEST["float64"]


class Threshold(NamedTuple):
    """How far a negative's dot product may exceed the positive's; if ``relative``, as a share of the positive's."""

    value: float
    relative: bool

    def limits(self, positive_dots: Array) -> Array:
        """The largest dot product that each row admits, from its positive's dot product."""
        return positive_dots * (1.0 + self.value) if self.relative else positive_dots + self.value


def threshold_of(threshold: Any, threshold_is: Any, guide: Any = None) -> Threshold | None:
    """The threshold of the arguments ``threshold`` and ``threshold_is``; with a guide it is 0 by default.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    if threshold_is not in ("absolute", "relative"):
        raise ValueError(
            f"threshold_is must be 'absolute' or 'relative', got {threshold_is!r}; say what is added to the positive's "
            "dot product: the threshold, or that share of it"
        )
    if threshold is None and guide is None:
        return None
    threshold = 0.0 if threshold is None else threshold
    value = validation.option("threshold", threshold, -_LARGEST, _LARGEST, "None")
    return Threshold(value, threshold_is == "relative")


def limits_of(
    world: Handshake,
    arrays: ArrayLibrary,
    rule: Threshold | None,
    features: tuple[Array, Sequence[Array]],
    guide: Guide,
    scale: Array,
    positives: Array | None = None,
) -> tuple[Array, Array | None]:
    """The scale, and the limits of the rows, without a gradient: logits, or dot products of the guide's features.

    ``positives`` are the indices of the rows' positives among the columns of all ranks; None means column i for row i.
    A scale that is not positive cannot scale a threshold; where it cannot be read, NaN takes its place: see ``nan_if``.

    Raises:
        ValueError: a readable scale is not positive, and the limits are logits.
    """
    if rule is None:
        return scale, None
    if guide[0] is None:
        if not validation.values_are_readable(arrays, scale):
            scale = nan_if(arrays, scale <= 0, scale)
        elif not (number := scale.item()) > 0:
            raise ValueError(f"scale must be positive with a threshold, got {number:g}; leave the threshold out")
    q, columns = features if guide[0] is None else (guide[0], (guide[1],))
    if positives is None:
        positive_dots = arrays.row_dots(q, columns[0][: q.shape[0]], arrays.dtype(scale))
    else:
        positive_dots = world.dots_at(arrays, q, columns, positives, arrays.dtype(scale))
    limits = rule.limits(positive_dots)
    return scale, limits if guide[0] is not None else arrays.detached(scale) * limits


def form_of(
    ids: Array | None,
    ids_are: str = "false_negatives",
    sum_positives: str = "outside",
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    rule: Threshold | None = None,
    positives: Array | None = None,
    weights: Array | None = None,
    name: str = "row_ids",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The problem's fields that the options set, and the options that ranks must agree on: those not at their default.

    Raises:
        TypeError, ValueError: an option is wrong, or two make no sense together.
    """
    are_zero = all(isinstance(value, Real) and value == 0 for value in (label_smoothing, margin))
    if ids_are == "false_negatives" and sum_positives == "outside" and are_zero and rule is None:
        return {}, {} if weights is None else {"weights": True}
    match = validation.match(ids_are)
    if match == "target" and ids is None:
        raise ValueError(f"{name} must be given with ids_are='positives', got none; give the ids, or leave ids_are out")
    if match == "target" and positives is not None:
        raise ValueError("positives must be None with ids_are='positives', got some; the ids say which columns are")
    if sum_positives not in ("outside", "inside"):
        raise ValueError(
            f"sum_positives must be 'outside' or 'inside' of the logarithm, got {sum_positives!r}; leave it out for "
            "SupCon's L_out"
        )
    is_inside = sum_positives == "inside"
    if is_inside and match == "drop":
        raise ValueError(
            "sum_positives must be 'outside' for one positive each, got 'inside'; give ids_are='positives'"
        )
    smoothing = validation.option("label_smoothing", label_smoothing, 0.0, 1.0) or None
    if smoothing and is_inside:
        raise ValueError(
            "label_smoothing must be 0 with sum_positives='inside', which has no targets, got both; leave one out"
        )
    if smoothing and match == "drop" and ids is not None:
        raise ValueError(
            f"label_smoothing must be 0 where {name} leave columns out, got {label_smoothing}: its share of the target "
            "is for all columns; leave one out, or give ids_are='positives'"
        )
    if rule is not None and (smoothing or match == "target"):
        other = "label_smoothing" if smoothing else "ids_are='positives'"
        raise ValueError(
            f"threshold and guide must be None with {other}, got {rule.value}: they leave out columns by the one "
            "positive of their row; leave one out"
        )
    if smoothing and margin:
        raise ValueError("label_smoothing must be 0 with a margin, got both; leave one out")
    form = {
        "kind": "inside" if is_inside else "softmax",
        "match": match,
        "smoothing": smoothing,
        "margin": validation.option("margin", margin, -_LARGEST, _LARGEST) or None,
    }
    options = {"ids_are": ids_are, "sum_positives": sum_positives, "weights": weights is not None}
    options.update(label_smoothing=smoothing, margin=form["margin"])
    # an error about ranks that differ names only options that were set
    agreed = {name: x for name, x in options.items() if x not in (None, False, "false_negatives", "outside")}
    return form, agreed if rule is None else {**agreed, "threshold": rule}


def ids_of_both(check: Any, arrays: ArrayLibrary, rows: Array, row: str, *sides: tuple[str, Any, int]) -> list[Any]:
    """The checked ids of rows and columns, each passed as (name, ids, length); two None without ids."""
    (_, row_ids, _), (_, column_ids, _) = sides
    if (row_ids is None) != (column_ids is None):
        raise ValueError("row_ids and column_ids must be given together, got only one; give both, or neither")
    return [
        None if ids is None else check.integers(name, ids, size, noun, arrays, rows)
        for (name, ids, size), noun in zip(sides, (row, "column"), strict=True)
    ]


PerQuery = tuple[str, tuple[int, int, int]]
"""The name and the shape, (m, k, d), of negatives that have counts or are not shared."""


def negatives_of(
    negatives: Array | Sequence[Array] | None, counts: Any = None, share: bool = True, in_batch: bool = True, **has: Any
) -> tuple[dict[str, Array], PerQuery | None]:
    """The negatives as matrices, by their names in error messages. Unshared ones, reshaped to (m k, d), come last.

    Args:
        negatives: (r, d), (m, k, d), or a sequence of arrays.
        counts: ``negative_counts`` of ``contrastile.info_nce``.
        share: whether negatives in (m, k, d) count for all queries.
        in_batch: whether a key counts for other queries than its own.
        **has: whether the call has ids, positives, smoothing and a guide.

    Raises:
        ValueError: two arguments exclude each other, or exactly one array in (m, k, d) is required and not given.
    """
    blocks = () if negatives is None else tuple(negatives) if isinstance(negatives, Sequence) else (negatives,)
    named = {f"negatives[{i}]": x for i, x in enumerate(blocks)}
    shapes = {name: tuple(x.shape) for name, x in named.items() if len(getattr(x, "shape", ())) == 3}
    share, in_batch = validation.flag("share_negatives", share), validation.flag("in_batch", in_batch)
    needs_per_query = not share or counts is not None
    if not in_batch and (has["positives"] or not named):
        raise ValueError(
            "in_batch must be True with positives=, with ids_are='positives' and without negatives, got False: a query "
            "then has its own key and the negatives alone; give negatives=, and leave the other two out"
        )
    if (needs_per_query or not in_batch) and has["smoothing"]:
        raise ValueError(
            "label_smoothing must be 0 with share_negatives=False, negative_counts= or in_batch=False, got "
            "more: its share of the target is for all columns; leave one out"
        )
    if (needs_per_query or not in_batch) and has["guide"]:
        raise ValueError(
            "guide must be None with share_negatives=False, negative_counts= or in_batch=False, got one: it is about "
            "columns that all queries share; leave one out"
        )
    if share and counts is not None and has["ids"]:
        raise ValueError(
            "negative_counts must be None with row_ids= where negatives are shared, got both; leave the padding out"
        )
    if needs_per_query and len(shapes) != 1:
        raise ValueError(
            "negatives must hold one array of shape (queries, k, width) with share_negatives=False or "
            f"negative_counts=, got shapes {[tuple(getattr(x, 'shape', ())) for x in blocks]}; reshape or join them"
        )
    # no -1: the width may be 0, which is refused later
    matrices = named | {name: named[name].reshape((m * k, width)) for name, (m, k, width) in shapes.items()}
    if not needs_per_query:
        return matrices, None
    (per_query,) = shapes.items()
    last = {} if share else {per_query[0]: matrices.pop(per_query[0])}
    return {**matrices, **last}, per_query


def counts_of(check: Any, arrays: ArrayLibrary, rows: Array, per_query: PerQuery | None, counts: Array | None) -> Array:
    """(m,) int64, the number of negatives of each row; 0 without negatives per query.

    Raises:
        TypeError, ValueError: the negatives do not fit the rows, or the counts are wrong; values only if readable.
    """
    name, (m, k, _) = per_query or ("", (rows.shape[0], 0, 0))
    if m != rows.shape[0]:
        raise ValueError(
            f"{name} must have k negatives for each of {rows.shape[0]} queries, got {m} times {k}; pad them, and "
            "say by negative_counts= how many count"
        )
    if counts is None:
        return arrays.full((m,), k if per_query else 0, "int64", rows)
    checked = check.integers("negative_counts", counts, m, "query", arrays, rows)
    for extreme in (checked.min(), checked.max()) if m and validation.values_are_readable(arrays, checked) else ():
        if not 0 <= int(extreme) <= k:
            raise ValueError(f"negative_counts must lie in 0..{k}, got {int(extreme)}; count each query's negatives")
    return checked


def without_padding(arrays: ArrayLibrary, columns: list[Array], index: int, counts: Array) -> list[Array]:
    """Set the negatives of one block beyond their query's count to 0; ids of rows and columns that leave them out."""
    block, m = columns[index], counts.shape[0]
    is_counted = (arrays.arange(0, block.shape[0] // max(m, 1), block)[None] < counts[:, None]).reshape((-1,))
    # CuPy's where returns float32 for bfloat16
    columns[index] = arrays.cast(arrays.where(is_counted[:, None], block, 0.0), arrays.dtype(block))
    column_ids = [arrays.full((column_block.shape[0],), 1, "int64", block) for column_block in columns]
    column_ids[index] = arrays.cast(is_counted, "int64")
    return [0 * counts, arrays.concat(column_ids)]


def scale_or_nan(
    world: Handshake,
    arrays: ArrayLibrary,
    positives: Array,
    columns: int,
    scale: Array,
    least: int = 0,
    padding: Array | None = None,
) -> Array:
    """The scale, or NaN if an unreadable positive is out of range or is padding: NaN spreads to all results.

    ``padding``: None, or this rank's column ids, which are 0 for padding alone: see ``without_padding``.

    Raises:
        ValueError: a readable positive is out of range or padding; in a group, on every rank.
    """
    is_readable = validation.values_are_readable(arrays, positives)
    if is_readable:
        world.confirm(validation.positives(positives, columns, least))
    else:
        scale = nan_if(arrays, ((positives < least) | (positives >= columns)).any(), scale)
    if padding is None:
        return scale
    ones = arrays.full((positives.shape[0], 1), 1.0, "float64", positives)
    is_padding = world.dots_at(arrays, ones, [arrays.cast(padding, "float64")[:, None]], positives, "float64") == 0
    if not is_readable:
        return nan_if(arrays, is_padding.any(), scale)
    rule = "positives must not name negatives beyond their query's count, got some; index all negatives, padding too"
    world.confirm(rule if is_padding.any() else None)
    return scale


def nan_if(arrays: ArrayLibrary, is_invalid: Array, scale: Array) -> Array:
    """The scale, or NaN if ``is_invalid``, 0-d bool."""
    return scale * arrays.where(is_invalid, arrays.full((), float("nan"), arrays.dtype(scale), scale), 1.0)
