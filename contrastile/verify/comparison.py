"""Compares outcomes with the oracle's outcomes, in units of the bounds."""

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
    """The error at one size, a plain computation's error there, and two bounds: see ``growth``."""

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
        ratio: error / bound; inf where no bound allows the element.
        field: the outcome's field, with the block's number for columns: "loss", "rows", "columns[1]".
        index: the element's index in the field; None for a failure of no element, which ``field`` then describes.
        error: absolute error.
        bound: absolute bound.
        beyond: the largest (error - r) / (bound - r) of all elements, r the unavoidable rounding of the stored result;
            below 1 if and only if the ratio is below 1. None where no result has a coarser dtype than the state: the
            ratio is then the excess.
        point: the measurement for the report's plots.
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
        """``beyond``, or the ratio where that is None: error / bound without the rounding of the stored result."""
        return self.ratio if self.beyond is None else self.beyond

    def __str__(self) -> str:
        if self.index is None:
            return self.field
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.field}{where}: error {self.error:.3g}, bound {self.bound:.3g}"


NOTHING = Worst(0.0, "nothing", (), 0.0, 0.0)
"""The worst element before anything has been compared."""


def wrong(reason: str) -> Worst:
    """A failure that no single element causes."""
    return Worst(np.inf, reason, None, np.inf, 0.0)


Comparisons = Iterator[tuple[str, Worst]]
"""The comparisons of a property, each with a label."""


def parts(outcome: Outcome, fields: Sequence[str] = ("loss", *GRADIENT)) -> Iterator[tuple[str, FloatArray | None]]:
    """Yields (name, array) for each named field, and for each block of columns."""
    for name in fields:
        value = getattr(outcome, name)
        if isinstance(value, tuple):
            yield from ((f"{name}[{c}]", block) for c, block in enumerate(value))
        else:
            yield name, value


def compare(outcome: Outcome, truth: Outcome, bound: Outcome, fields: Sequence[str] = ("loss", *GRADIENT)) -> Worst:
    """The element with the largest |outcome - truth| / bound in the fields.

    Where the truth is not finite the value must be equal: NaN for NaN, inf for the same inf. The ratio is inf where a
    value is not finite but the truth is, where an element is missing, and where the bound is NaN. An error of 0 has
    ratio 0, whatever the bound. Fields that are None in the truth are not compared.
    """
    worst_of_fields = []
    bounds = dict(parts(bound, fields))
    values = dict(parts(outcome, fields))
    for name, expected in parts(truth, fields):
        if expected is not None:
            rounding = bound.rounding if name.partition("[")[0] in _STORED else (0.0, 0.0)
            worst_of_fields.append(_compare_field(name, values.get(name), expected, bounds.get(name), rounding))
    return largest(worst_of_fields)


def largest(elements: Sequence[Worst]) -> Worst:
    """The first element of the largest ratio, with the largest ``beyond`` of all; ``NOTHING`` if there is none."""
    if not elements:
        return NOTHING
    worst = max(elements, key=lambda element: element.ratio)
    excess = max(element.excess for element in elements)
    return worst if excess == worst.excess else replace(worst, beyond=excess)


def _compare_field(
    name: str, values: FloatArray | None, truth: FloatArray, bound: FloatArray | None, rounding: tuple[float, float]
) -> Worst:
    if values is None or bound is None:
        return wrong(f"{name} is missing")
    if np.shape(values) != np.shape(truth):
        return wrong(f"{name} has shape {np.shape(values)}, not {np.shape(truth)}")
    if np.size(truth) == 0:
        return Worst(0.0, name, (), 0.0, 0.0)
    values, truth = np.asarray(values), np.asarray(truth)
    with np.errstate(all="ignore"):
        is_equal = (values == truth) | (np.isnan(values) & np.isnan(truth))
        error = np.where(is_equal, 0.0, np.abs(values - truth))
        # where the bound is inf this ratio is 0 or NaN, also for values that are not finite: see is_wrong
        ratio = np.where(is_equal, 0.0, error / np.broadcast_to(bound, truth.shape))
        is_wrong = ~is_equal & (~np.isfinite(values) | ~np.isfinite(truth) | np.isnan(ratio))
    ratio = np.where(is_wrong, np.inf, ratio)
    index = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    place = tuple(int(i) for i in index)
    beyond = None
    if any(rounding):
        unavoidable = np.where(np.isfinite(truth), _half_ulp(truth, *rounding), 0.0)
        with np.errstate(all="ignore"):
            remaining = np.where(error > unavoidable, (error - unavoidable) / (bound - unavoidable), 0.0)
        # beyond is below 1 if and only if the ratio is
        beyond = float(np.where(ratio < 1, np.clip(remaining, 0.0, ratio), ratio).max())
    return Worst(
        float(ratio[index]), name, place, float(error[index]), float(np.broadcast_to(bound, truth.shape)[index]), beyond
    )


def _half_ulp(x: FloatArray, unit: float, underflow: float) -> FloatArray:
    """Half the spacing of a dtype's numbers at x: the largest error of rounding x to it."""
    _, exponent = np.frexp(x)
    return float64(np.maximum(np.ldexp(unit, exponent - 1), underflow))


def identical(outcome: Outcome, expected: Outcome, fields: Sequence[str] = ("loss", *GRADIENT)) -> Worst:
    """Ratio 0 if all fields have equal bits, else inf."""
    for (name, a), (_, b) in zip(parts(outcome, fields), parts(expected, fields), strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None:
            return wrong(f"{name} is missing")
        differing = np.flatnonzero(np.asarray(a).view(np.int64).ravel() != np.asarray(b).view(np.int64).ravel())
        if differing.size:
            index = np.unravel_index(differing[0], np.shape(a))
            return Worst(np.inf, name, tuple(map(int, index)), float(abs(a[index] - b[index])), 0.0)
    return NOTHING
