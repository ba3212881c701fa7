"""Which loss the options of a call ask for, as a problem has it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from contrastile import validation
from contrastile.backends.arrays import Array, ArrayLibrary


class Threshold(NamedTuple):
    """By how much a negative's dot product may exceed the positive's; ``relative``: as a share of the positive's."""

    value: float
    relative: bool

    def of(self, arrays: ArrayLibrary, rows: Array, columns: Array, scale: Array) -> Array:
        """The limits of rows whose positives are the columns of the same numbers: logits, without a gradient."""
        dtype = arrays.dtype(scale)
        own = arrays.row_dots(rows, columns, dtype)
        return arrays.detached(scale) * (own * (1.0 + self.value) if self.relative else own + self.value)


def threshold_of(threshold: Any, threshold_is: Any, positives: Array | None = None) -> Threshold | None:
    """What two arguments of these names ask for.

    Raises:
        TypeError, ValueError: one of them is wrong, or other columns than the rows' own are positive.
    """
    if threshold_is not in ("absolute", "relative"):
        raise ValueError(
            f"threshold_is must be 'absolute' or 'relative', got {threshold_is!r}; say what is added to the positive's "
            "dot product: the threshold, or that share of it"
        )
    if threshold is None:
        return None
    if positives is not None:
        raise ValueError(
            "threshold must be None with positives=, got both; give statistics() the row_limits of these positives"
        )
    most = sys.float_info.max
    return Threshold(validation.option("threshold", threshold, -most, most, "None"), threshold_is == "relative")


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
    if ids_are == "false_negatives" and sum_positives == "outside" and label_smoothing == margin == 0 and limit is None:
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
            f"threshold must be None with {other}, got {limit.value}: it leaves out columns by the one positive of "
            "their row; leave one out"
        )
    if smoothing and margin:
        raise ValueError("label_smoothing must be 0 with a margin, got both; leave one out")
    form = {
        "kind": "inside" if inside else "softmax",
        "match": match,
        "smoothing": smoothing,
        "margin": validation.option("margin", margin, -sys.float_info.max, sys.float_info.max) or None,
    }
    agreed = {"ids_are": ids_are, "sum_positives": sum_positives, "weights": weights is not None, "threshold": limit}
    return form, {**agreed, "label_smoothing": smoothing, "margin": form["margin"]}


class Negatives(NamedTuple):
    """The negatives of a call, as matrices.

    Attributes:
        matrices: (r, d) each, by the names that errors give them; those of one query each, as (m k, d), come last.
        given: of those in (m, k, d), if they are not shared or are counted, this shape and their name; else None.
        counts: (m,) how many of the k count, as the caller gave them, or None.
        share: whether they count for all queries.
        in_batch: whether a key counts for other queries than its own.
    """

    matrices: dict[str, Array]
    given: tuple[tuple[int, int, int], str] | None
    counts: Array | None
    share: bool
    in_batch: bool

    def parted(
        self, check: Any, arrays: ArrayLibrary, rows: Array, columns: list[Array]
    ) -> tuple[Array | None, Array | None, tuple[Array, Array] | None]:
        """The columns of one query each, which leave ``columns``, and their ``Problem.own_counts``; None if all share.

        Third come ids of rows and columns that leave out what lies beyond the counts in shared negatives, which becomes
        0 there; None if there is none.

        Args:
            check: see ``validation.Known``.
            arrays: the library of all these arrays.
            rows: (m, d).
            columns: the key, then the matrices.

        Raises:
            TypeError, ValueError: of another number of queries, or counts are not such, where they can be read.
        """
        m, counts, ids = rows.shape[0], None, None
        if self.given is not None:
            (queries, most, _), name = self.given
            if queries != m:
                raise ValueError(
                    f"{name} must have k negatives for each of {m} queries, got shape {self.given[0]}; pad them, and "
                    "say by negative_counts= how many count"
                )
            counts = arrays.full((m,), most, "int64", rows)
            if self.counts is not None:
                counts = check.integers("negative_counts", self.counts, m, "query", arrays, rows)
                if m and validation.values_are_readable(arrays, counts):
                    for worst in (int(counts.min()), int(counts.max())):
                        if not 0 <= worst <= most:
                            raise ValueError(
                                f"negative_counts must lie in 0..{most}, got {worst}; count the negatives of each query"
                            )
            if self.share:
                ids = _without_padding(arrays, columns, 1 + [*self.matrices].index(name), most, counts)
        if not self.share:
            return columns.pop(), counts, ids
        if self.in_batch:
            return None, None, ids
        return arrays.detached(rows[:0]), arrays.full((m,), 0, "int64", rows), ids

    def agreed(self, columns: Sequence[Array], own: Array | None) -> dict[str, Any]:
        """What every rank must have alike."""
        if own is None and self.given is None:
            return {}
        mine = () if own is None else (*columns[: not self.in_batch], own)
        wants = tuple(bool(getattr(x, "requires_grad", False)) for x in mine)
        counted = self.counts is not None
        return {"share_negatives": self.share, "in_batch": self.in_batch, "negative_counts": counted, "own": wants}


def _without_padding(
    arrays: ArrayLibrary, columns: list[Array], place: int, each: int, counts: Array
) -> tuple[Array, Array]:
    """Ids that leave out what lies beyond the counts in one block of columns, ``each`` of a row; it becomes 0 there."""
    x = columns[place]
    counted = (arrays.arange(0, each, x)[None] < counts[:, None]).reshape((-1,))
    columns[place] = arrays.cast(arrays.where(counted[:, None], x, 0.0), arrays.dtype(x))
    ids = [arrays.full((y.shape[0],), 1, "int64", x) for y in columns]
    ids[place] = arrays.cast(counted, "int64")
    return arrays.full((counts.shape[0],), 0, "int64", x), arrays.concat(ids)


def negatives_of(
    given: Array | Sequence[Array] | None,
    counts: Array | None = None,
    share: bool = True,
    in_batch: bool = True,
    *,
    ids: bool = False,
    positives: bool = False,
    smoothing: float = 0.0,
) -> Negatives:
    """What a call of info_nce gives as negatives; ``ids`` and ``positives`` say whether it gives those.

    Raises:
        ValueError: two arguments make no sense together, or none of the negatives is in (m, k, d) where one must be.
    """
    more = () if given is None else tuple(given) if isinstance(given, Sequence) else (given,)
    named = {f"negatives[{i}]": x for i, x in enumerate(more)}
    deep = {name: tuple(x.shape) for name, x in named.items() if len(getattr(x, "shape", ())) == 3}
    apart = not share or counts is not None
    for wrong, message in (
        (not in_batch and not named, "negatives must be given with in_batch=False, got none; leave in_batch out"),
        (
            not in_batch and positives,
            "in_batch must be True with positives= or ids_are='positives', got False: then the query's own key is its "
            "positive; leave one out",
        ),
        (
            smoothing and (apart or not in_batch),
            "label_smoothing must be 0 with share_negatives=False, negative_counts= or in_batch=False, got "
            f"{smoothing}: its share of the target is for all columns; leave one out",
        ),
        (
            share and counts is not None and ids,
            "negative_counts must be None with row_ids= where negatives are shared, got both; give "
            "share_negatives=False, or leave the padding out",
        ),
        (
            apart and len(deep) != 1,
            "negatives must hold one array of shape (queries, k, width) with share_negatives=False or "
            f"negative_counts=, got {len(deep)}; reshape or join them",
        ),
    ):
        if wrong:
            raise ValueError(message)
    matrices = {
        name: x.reshape((deep[name][0] * deep[name][1], deep[name][2])) if name in deep else x
        for name, x in named.items()
    }
    how = counts, share, in_batch
    if not apart:
        return Negatives(matrices, None, *how)
    ((name, shape),) = deep.items()
    own = {} if share else {name: matrices.pop(name)}
    return Negatives(matrices | own, (shape, name), *how)
