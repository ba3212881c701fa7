"""Which loss the options of a call ask for, as a problem has it."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

from contrastile import validation
from contrastile.backends.arrays import Array, ArrayLibrary
from contrastile.schedules.handshake import Handshake

Guide = tuple[Array, Array]
"""The guide's features of the rows and of the columns; None twice where there is no guide."""

_LARGEST = validation.LARGEST["float64"]


class Threshold(NamedTuple):
    """By how much a negative's dot product may exceed the positive's; ``relative``: as a share of the positive's."""

    value: float
    relative: bool

    def of(self, own: Array) -> Array:
        """The limits of rows whose positives have these dot products, as dot products."""
        return own * (1.0 + self.value) if self.relative else own + self.value


def threshold_of(threshold: Any, threshold_is: Any, guide: Any = None) -> Threshold | None:
    """What two arguments of these names ask for; with a guide the threshold is 0 where it is left out.

    Raises:
        TypeError, ValueError: one of them is wrong.
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
    threshold: Threshold | None,
    sides: tuple[Array, Sequence[Array]],
    guide: Guide,
    scale: Array,
    where: Array | None = None,
) -> Array | None:
    """The limits of the rows, logits or dot products of the guide, without a gradient.

    ``where`` are the numbers of the rows' positives among the columns of all ranks; None for the rows' own numbers.
    """
    if threshold is None:
        return None
    if guide[0] is None and validation.values_are_readable(arrays, scale) and not (number := scale.item()) > 0:
        raise ValueError(f"scale must be positive with a threshold, got {number:g}; leave the threshold out")
    q, columns = sides if guide[0] is None else (guide[0], (guide[1],))
    if where is None:
        own = arrays.row_dots(q, columns[0][: q.shape[0]], arrays.dtype(scale))
    else:
        own = world.dots_at(arrays, q, columns, where, arrays.dtype(scale))
    return threshold.of(own) if guide[0] is not None else arrays.detached(scale) * threshold.of(own)


def form_of(
    ids: Array | None,
    ids_are: str = "false_negatives",
    sum_positives: str = "outside",
    label_smoothing: float = 0.0,
    margin: float = 0.0,
    limit: Threshold | None = None,
    positives: Array | None = None,
    weights: Array | None = None,
    name: str = "row_ids",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What options make of a problem, and those that differ from the default: every rank must have the same.

    Raises:
        TypeError, ValueError: an option is wrong, or two make no sense together.
    """
    zeros = all(isinstance(x, Real) and x == 0 for x in (label_smoothing, margin))
    if ids_are == "false_negatives" and sum_positives == "outside" and zeros and limit is None:
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
    inside = sum_positives == "inside"
    if inside and match == "drop":
        raise ValueError(
            "sum_positives must be 'outside' for one positive each, got 'inside'; give ids_are='positives'"
        )
    smoothing = validation.option("label_smoothing", label_smoothing, 0.0, 1.0) or None
    if smoothing and inside:
        raise ValueError(
            "label_smoothing must be 0 with sum_positives='inside', which has no targets, got both; leave one out"
        )
    if smoothing and match == "drop" and ids is not None:
        raise ValueError(
            f"label_smoothing must be 0 where {name} leave columns out, got {label_smoothing}: its share of the target "
            "is for all columns; leave one out, or give ids_are='positives'"
        )
    if limit is not None and (smoothing or match == "target"):
        other = "label_smoothing" if smoothing else "ids_are='positives'"
        raise ValueError(
            f"threshold and guide must be None with {other}, got {limit.value}: they leave out columns by the one "
            "positive of their row; leave one out"
        )
    if smoothing and margin:
        raise ValueError("label_smoothing must be 0 with a margin, got both; leave one out")
    form = {
        "kind": "inside" if inside else "softmax",
        "match": match,
        "smoothing": smoothing,
        "margin": validation.option("margin", margin, -_LARGEST, _LARGEST) or None,
    }
    asked = {"ids_are": ids_are, "sum_positives": sum_positives, "weights": weights is not None}
    asked.update(label_smoothing=smoothing, margin=form["margin"])
    # ranks that differ hear of what they ask for, not of defaults
    agreed = {name: x for name, x in asked.items() if x not in (None, False, "false_negatives", "outside")}
    return form, agreed if limit is None else {**agreed, "threshold": limit}


Deep = tuple[str, tuple[int, int, int]]
"""The name and the shape, (m, k, d), of negatives that are counted, or not shared."""


def negatives_of(
    negatives: Array | Sequence[Array] | None, counts: Any = None, share: bool = True, in_batch: bool = True, **has: Any
) -> tuple[dict[str, Array], Deep | None]:
    """The negatives of a call as matrices, by the names that errors give them: those of one query each, (m k, d), last.

    Args:
        negatives: (r, d), (m, k, d), or a sequence of such.
        counts: see ``contrastile.info_nce``; share and in_batch likewise.
        share: whether those in (m, k, d) count for all queries.
        in_batch: whether a key counts for other queries than its own.
        **has: whether there are ids, positives, smoothing and a guide.

    Raises:
        ValueError: two arguments make no sense together, or there is not one array in (m, k, d) where one must be.
    """
    more = () if negatives is None else tuple(negatives) if isinstance(negatives, Sequence) else (negatives,)
    named = {f"negatives[{i}]": x for i, x in enumerate(more)}
    shapes = {name: tuple(x.shape) for name, x in named.items() if len(getattr(x, "shape", ())) == 3}
    share, in_batch = validation.flag("share_negatives", share), validation.flag("in_batch", in_batch)
    apart = not share or counts is not None
    if not in_batch and (has["positives"] or not named):
        raise ValueError(
            "in_batch must be True with positives=, with ids_are='positives' and without negatives, got False: a query "
            "then has its own key and the negatives alone; give negatives=, and leave the other two out"
        )
    if (apart or not in_batch) and has["smoothing"]:
        raise ValueError(
            "label_smoothing must be 0 with share_negatives=False, negative_counts= or in_batch=False, got "
            "more: its share of the target is for all columns; leave one out"
        )
    if (apart or not in_batch) and has["guide"]:
        raise ValueError(
            "guide must be None with share_negatives=False, negative_counts= or in_batch=False, got one: it is about "
            "columns that all queries share; leave one out"
        )
    if share and counts is not None and has["ids"]:
        raise ValueError(
            "negative_counts must be None with row_ids= where negatives are shared, got both; leave the padding out"
        )
    if apart and len(shapes) != 1:
        raise ValueError(
            "negatives must hold one array of shape (queries, k, width) with share_negatives=False or "
            f"negative_counts=, got shapes {[tuple(getattr(x, 'shape', ())) for x in more]}; reshape or join them"
        )
    found = {name: x.reshape((-1, x.shape[2])) if name in shapes else x for name, x in named.items()}
    if not apart:
        return found, None
    (deep,) = shapes.items()
    own = {} if share else {deep[0]: found.pop(deep[0])}
    return {**found, **own}, deep


def counts_of(check: Any, arrays: ArrayLibrary, rows: Array, deep: Deep | None, given: Array | None) -> Array:
    """(m,) int64, how many of its k negatives each row has; 0 where there are none.

    Raises:
        TypeError, ValueError: other rows than these have them, or counts are not such, where they can be read.
    """
    name, (m, most, _) = deep or ("", (rows.shape[0], 0, 0))
    if m != rows.shape[0]:
        raise ValueError(
            f"{name} must have k negatives for each of {rows.shape[0]} queries, got {m} times {most}; pad them, and "
            "say by negative_counts= how many count"
        )
    if given is None:
        return arrays.full((m,), most if deep else 0, "int64", rows)
    counts = check.integers("negative_counts", given, m, "query", arrays, rows)
    for worst in (counts.min(), counts.max()) if m and validation.values_are_readable(arrays, counts) else ():
        if not 0 <= int(worst) <= most:
            raise ValueError(f"negative_counts must lie in 0..{most}, got {int(worst)}; count each query's negatives")
    return counts


def without_padding(arrays: ArrayLibrary, columns: list[Array], place: int, counts: Array) -> list[Array]:
    """Ids of rows and columns that leave out what lies beyond (m,) counts in one of the blocks, which becomes 0."""
    x, m = columns[place], counts.shape[0]
    counted = (arrays.arange(0, x.shape[0] // max(m, 1), x)[None] < counts[:, None]).reshape((-1,))
    # CuPy chooses among bfloat16 in float32
    columns[place] = arrays.cast(arrays.where(counted[:, None], x, 0.0), arrays.dtype(x))
    each = [arrays.full((y.shape[0],), 1, "int64", x) for y in columns]
    each[place] = arrays.cast(counted, "int64")
    return [0 * counts, arrays.concat(each)]
