"""Runs one problem on one backend, and compares the outcome with the oracle's in units of the bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import STATISTICS, Array, Backend, Block, LseFunction, Options, Statistics
from contrastile.oracle.arrays import FloatArray, float64
from contrastile.schedules import local, schedule, triangle
from contrastile.schedules.problem import Problem
from contrastile.verify.truth import Outcome

VALUE = ("loss", *STATISTICS)
GRADIENT = ("rows", "columns", "scale", "bias")
_STORED = "rows", "columns"

Want = Callable[[Problem], local.Wanted | None]


@dataclass(frozen=True, slots=True)
class Worst:
    """The element with the largest error / bound.

    Attributes:
        ratio: error / bound; inf where it is wrong by any bound.
        field: the outcome's field, with the block's number for columns: "loss", "rows", "columns[1]".
        index: of the element in the field.
        error: absolute error.
        bound: absolute bound.
        beyond: the largest (error - r) / (bound - r) of all elements, r the unavoidable rounding of the stored result;
            below 1 where the ratio is. None where nothing is stored in a dtype coarser than the state: then the ratio
            says as much.
    """

    ratio: float
    field: str
    index: tuple[int, ...]
    error: float
    bound: float
    beyond: float | None = None

    @property
    def excess(self) -> float:
        """``beyond``, or else the ratio: what the arithmetic used of its bound, the result's own rounding left out."""
        return self.ratio if self.beyond is None else self.beyond

    def __str__(self) -> str:
        where = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return f"{self.field}{where}: error {self.error:.3g}, bound {self.bound:.3g}"


class Point(TypedDict):
    """An error measured at one size, beside what it is compared with: see ``growth``."""

    axis: str
    x: float
    error: float
    plain: float
    probable: float
    bound: float


@dataclass(frozen=True, slots=True)
class Measured(Worst):
    """A comparison whose point goes to the report."""

    point: Point | None = None


NOTHING = Worst(0.0, "nothing", (), 0.0, 0.0)
"""Before anything has been compared."""


def wrong(reason: str) -> Worst:
    """A failure that is no element's error."""
    return Worst(np.inf, reason, (), np.inf, 0.0)


def on_device(arrays: ArrayLibrary, device: str) -> Array:
    """An array on this device, after whose device others are made."""
    like = arrays.from_numpy(np.zeros(1))
    return like if arrays.device(like) == device else like.to(device)


def materialise(problem: Problem, backend: Backend, dtype: str, device: str = "cpu") -> Problem:
    """The NumPy float64 problem in the backend's arrays: features in ``dtype``, weights in the state dtype.

    Every array is a copy, so that no backend can modify the problem that the oracle reads.
    """
    arrays, state, like = backend.arrays, backend.state(dtype), on_device(backend.arrays, device)

    def put(x: Any, kind: str) -> Array:
        return None if x is None else arrays.asarray(np.array(x, order="C"), kind, like)

    return replace(
        problem,
        rows=put(problem.rows, dtype),
        columns=tuple(put(x, dtype) for x in problem.columns),
        **{name: put(getattr(problem, name), state) for name in _STATE},
        **{name: put(getattr(problem, name), "int64") for name in _INDICES},
    )


_NO_GRADIENTS = local.Gradients(None, (), None, None)
_STATE = ("scale", "bias", "row_weight", "row_target", "column_weight", "column_target")
_INDICES = ("positives", "excluded", "row_ids", "column_ids")


def every_gradient(problem: Problem) -> local.Wanted:
    return local.Wanted(True, (True,) * len(problem.columns), True, problem.bias is not None)


@np.errstate(all="ignore")
def outcome(
    problem: Problem,
    backend: Backend,
    dtype: str,
    device: str = "cpu",
    options: Options = Options(),  # noqa: B008 (frozen)
    upstream: float = 1.0,
    want: Want = every_gradient,
) -> Outcome:
    """The backend's loss, statistics and gradients of ``upstream * loss``.

    Args:
        problem: NumPy float64, features exactly representable in ``dtype``.
        backend: the backend's record.
        dtype: the features' dtype.
        device: kind of device.
        options: passed to the backend.
        upstream: gradient with respect to the loss.
        want: the problem -> the gradients to ask for, or None for the value alone.

    Returns:
        The results, converted to NumPy float64; None for what was not asked for. Of a problem with a placement, this
        rank's part, without the sums of the positive logits, which are never merged over ranks.

    Raises:
        UnsupportedProblemError: the backend refuses the problem.
    """
    arrays = backend.arrays
    native = materialise(problem, backend, dtype, device)
    upstream_gradient = arrays.asarray(upstream, backend.state(dtype), native.scale)
    wanted = want(native)
    parts: list[Statistics] = []
    lses: dict[str, Array | None] = {}

    def recorded(lse: LseFunction) -> LseFunction:
        def function(block: Block, columns: bool, how: Options) -> Statistics:
            parts.append(lse(block, columns, how))
            return parts[-1]

        return function

    if native.kind == "sigmoid":
        loss, sums = schedule.sigmoid(native, wanted, backend, options)
        gradients = _NO_GRADIENTS
        if wanted is not None:
            assert sums is not None
            place = native.placement
            gradients = schedule.finish(native.rows, native.scale, place, sums, upstream_gradient, wanted, arrays)
    else:
        keeping = None if backend.keeping is None else recorded(backend.keeping)
        recording = replace(backend, lse=recorded(backend.lse), keeping=keeping)
        saved = schedule.forward(native, recording, options, wanted=wanted)
        gradients = _NO_GRADIENTS
        if wanted is not None:
            gradients = schedule.backward(native, saved, upstream_gradient, wanted, backend, options)
        loss = saved.loss
        lses = {name: getattr(saved, name) for name in STATISTICS if hasattr(saved, name)}

    if native.placement is not None:
        parts.clear()

    def take(x: Array | None) -> Any:
        return None if x is None else np.array(arrays.to_numpy(x), dtype=np.float64)

    found: dict[str, Any] = dict.fromkeys(STATISTICS) | {name: take(x) for name, x in lses.items()}
    if parts and not native.columns:
        every = slice(0, native.rows.shape[0])
        found["row_positive_sum"] = total = np.zeros(every.stop)
        blocks = triangle.places(every, triangle.whole_up_to(native, arrays, options))
        for (rows, columns), part in zip(blocks, parts, strict=True):
            total[rows] += take(part.row_positive_sum)
            if rows != columns:
                total[columns] += take(part.column_positive_sum)
    elif parts:
        found["row_positive_sum"] = np.sum([take(part.row_positive_sum) for part in parts], axis=0)
        if found["column_negative_lse"] is not None:
            found["column_positive_sum"] = np.concatenate([take(part.column_positive_sum) for part in parts])
    return Outcome(
        loss=take(loss),
        **found,
        rows=take(gradients.rows),
        columns=tuple(take(x) for x in gradients.columns),
        scale=take(gradients.scale),
        bias=take(gradients.bias),
    )


def parts(outcome: Outcome, fields: Sequence[str] = VALUE + GRADIENT) -> Iterator[tuple[str, FloatArray | None]]:
    """The named fields, one array at a time; columns block by block."""
    for name in fields:
        value = getattr(outcome, name)
        if isinstance(value, tuple):
            yield from ((f"{name}[{c}]", each) for c, each in enumerate(value))
        else:
            yield name, value


def compare(got: Outcome, truth: Outcome, bound: Outcome, fields: Sequence[str] = VALUE + GRADIENT) -> Worst:
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
