"""Which loss the options of a call ask for, as a problem has it."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from contrastile import validation
from contrastile.backends.arrays import Array, ArrayLibrary

Guide = tuple[Array, Array]
"""The guide's features of the rows and of the columns; None twice where there is no guide."""

NO_GUIDE: Guide = (None, None)


class Threshold(NamedTuple):
    """By how much a negative's dot product may exceed the positive's; ``relative``: as a share of the positive's."""

    value: float
    relative: bool

    def of(self, arrays: ArrayLibrary, rows: Array, columns: Array, scale: Array, guide: Guide = NO_GUIDE) -> Array:
        """The limits of rows whose positives are the columns of the same numbers, without a gradient.

        They are logits, or dot products of the guide.
        """
        dtype, of_guide = arrays.dtype(scale), guide[0] is not None
        q, k = guide if of_guide else (rows, columns)
        own = arrays.row_dots(q, k[: rows.shape[0]], dtype)
        found = own * (1.0 + self.value) if self.relative else own + self.value
        return found if of_guide else arrays.detached(scale) * found


def threshold_of(
    threshold: Any, threshold_is: Any, positives: Array | None = None, guide: Any = None
) -> Threshold | None:
    """What two arguments of these names ask for; with a guide the threshold is 0 where it is left out.

    Raises:
        TypeError, ValueError: one of them is wrong, or other columns than the rows' own are positive.
    """
    if threshold_is not in ("absolute", "relative"):
        raise ValueError(
            f"threshold_is must be 'absolute' or 'relative', got {threshold_is!r}; say what is added to the positive's "
            "dot product: the threshold, or that share of it"
        )
    if threshold is None and guide is None:
        return None
    if positives is not None:
        name = "threshold" if guide is None else "guide"
        raise ValueError(
            f"{name} must be None with positives=, got both; give statistics() the row_limits of these positives"
        )
    threshold = 0.0 if threshold is None else threshold
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
            f"threshold and guide must be None with {other}, got {limit.value}: they leave out columns by the one "
            "positive of their row; leave one out"
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
