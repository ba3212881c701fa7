"""Outcomes compared with the oracle's, in units of the bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from contrastile.oracle.arrays import FloatArray, float64
from contrastile.verify.truth import Outcome

GRADIENT = ("rows", "columns", "scale", "bias")
_STORED = "rows", "columns"


class Point(TypedDict):
    """An error measured at one size, beside what it is compared with: see ``growth``."""

    axis: str
    x: float
    error: float
    plain: float
    probable: float
    bound: float


@dataclass(frozen=True, slots=True)
class Worst:
    """The element with the largest error / bound.

    Attributes:
        ratio: error / bound; inf where it is wrong by any bound.
        field: the outcome's field, with the block's number for columns: "loss", "rows", "columns[1]".
        index: of the element in the field; None of a failure that is no element's error, which ``field`` then tells.
        error: absolute error.
        bound: absolute bound.
        beyond: the largest (error - r) / (bound - r) of all elements, r the unavoidable rounding of the stored result;
            below 1 where the ratio is. None where nothing is stored in a dtype coarser than the state: then the ratio
            says as much.
        point: where it was measured, for the report's plots.
    """

    ratio: float
    field: str
    index: tuple[int, ...] | None
    error: float
    bound: float
    beyond: float | None = None
    point: Point | None = None

    @property
    def excess(self) -> float:
        """``beyond``, or else the ratio: what the arithmetic used of its bound, the result's own rounding left out."""
        return self.ratio if self.beyond is None else self.beyond

    def __str__(self) -> str:
        if self.index is None:
            return self.field
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.field}{where}: error {self.error:.3g}, bound {self.bound:.3g}"


NOTHING = Worst(0.0, "nothing", (), 0.0, 0.0)
"""Before anything has been compared."""


def wrong(reason: str) -> Worst:
    """A failure that is no element's error."""
    return Worst(np.inf, reason, None, np.inf, 0.0)


Comparisons = Iterator[tuple[str, Worst]]
"""The comparisons of a property, each with a label."""


def parts(outcome: Outcome, fields: Sequence[str] = ("loss", *GRADIENT)) -> Iterator[tuple[str, FloatArray | None]]:
    """The named fields, one array at a time; columns block by block."""
    for name in fields:
        value = getattr(outcome, name)
        if isinstance(value, tuple):
            yield from ((f"{name}[{c}]", each) for c, each in enumerate(value))
        else:
            yield name, value


def compare(got: Outcome, truth: Outcome, bound: Outcome, fields: Sequence[str] = ("loss", *GRADIENT)) -> Worst:
    """The largest |got - truth| / bound over all elements of the fields, and where it is.

    Where the truth is not finite the value must be equal: NaN for NaN, inf for the same inf. A value that is not finite
    where the truth is, a missing element and a bound of NaN have ratio inf. An error of 0 has ratio 0, whatever the
    bound. Fields that the truth lacks are not compared.
    """
    found = []
    bounds = dict(parts(bound, fields))
    values = dict(parts(got, fields))
    for name, expected in parts(truth, fields):
        if expected is not None:
            rounding = bound.rounding if name.partition("[")[0] in _STORED else (0.0, 0.0)
            found.append(_compare_one(name, values.get(name), expected, bounds.get(name), rounding))
    return largest(found)


def largest(found: Sequence[Worst]) -> Worst:
    """The first of largest ratio, with the largest ``beyond`` of all; ``NOTHING`` of none."""
    if not found:
        return NOTHING
    worst = max(found, key=lambda each: each.ratio)
    excess = max(each.excess for each in found)
    return worst if excess == worst.excess else replace(worst, beyond=excess)


def _compare_one(
    name: str, got: FloatArray | None, truth: FloatArray, bound: FloatArray | None, rounding: tuple[float, float]
) -> Worst:
    if got is None or bound is None:
        return wrong(f"{name} is missing")
    if np.shape(got) != np.shape(truth):
        return wrong(f"{name} has shape {np.shape(got)}, not {np.shape(truth)}")
    if np.size(truth) == 0:
        return Worst(0.0, name, (), 0.0, 0.0)
    got, truth = np.asarray(got), np.asarray(truth)
    with np.errstate(all="ignore"):
        same = (got == truth) | (np.isnan(got) & np.isnan(truth))
        error = np.where(same, 0.0, np.abs(got - truth))
        # a bound of inf says nothing about values that are not finite
        ratio = np.where(same, 0.0, error / np.broadcast_to(bound, truth.shape))
        hopeless = ~same & (~np.isfinite(got) | ~np.isfinite(truth) | np.isnan(ratio))
    ratio = np.where(hopeless, np.inf, ratio)
    index = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    where = tuple(int(i) for i in index)
    beyond = None
    if any(rounding):
        unavoidable = np.where(np.isfinite(truth), _half_ulp(truth, *rounding), 0.0)
        with np.errstate(all="ignore"):
            more = np.where(error > unavoidable, (error - unavoidable) / (bound - unavoidable), 0.0)
        # never on another side of 1 than the ratio
        beyond = float(np.where(ratio < 1, np.clip(more, 0.0, ratio), ratio).max())
    return Worst(
        float(ratio[index]), name, where, float(error[index]), float(np.broadcast_to(bound, truth.shape)[index]), beyond
    )


def _half_ulp(x: FloatArray, unit: float, underflow: float) -> FloatArray:
    """Half the spacing of a dtype's numbers at x: the largest error of rounding x to it."""
    _, exponent = np.frexp(x)
    return float64(np.maximum(np.ldexp(unit, exponent - 1), underflow))


def identical(got: Outcome, expected: Outcome, fields: Sequence[str] = ("loss", *GRADIENT)) -> Worst:
    """Ratio 0 when all of the fields have equal bits, inf otherwise."""
    for (name, a), (_, b) in zip(parts(got, fields), parts(expected, fields), strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None:
            return wrong(f"{name} is missing")
        differ = np.flatnonzero(np.asarray(a).view(np.int64).ravel() != np.asarray(b).view(np.int64).ravel())
        if differ.size:
            index = np.unravel_index(differ[0], np.shape(a))
            return Worst(np.inf, name, tuple(map(int, index)), float(abs(a[index] - b[index])), 0.0)
    return NOTHING
