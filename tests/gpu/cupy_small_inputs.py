"""What the checks of the cupy backend's small kernels are given on the GPU, and how their results are read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

from contrastile.backends.cupy.arguments import struct  # noqa: E402
from contrastile.backends.cupy.launch import pointer  # noqa: E402

U = 2.0**-24
LOG2E = np.log2(np.e)
_DTYPES = {ctypes.c_float: "f4", ctypes.c_int: "i4"}
PLAN = np.dtype([(name, _DTYPES[kind]) for name, kind in struct("Plan")._fields_])
rng = np.random.default_rng(7)
_START = rng.bit_generator.state


def stored(x: np.ndarray, dtype: str) -> tuple[Any, np.ndarray]:
    """X rounded to a dtype: the bits on the GPU, and the rounded values in float64."""
    if dtype != "bfloat16":
        rounded = x.astype(dtype)
        return cupy.asarray(rounded), rounded.astype("f8")
    bits = x.astype("f4").view("u4")
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("u2")
    return cupy.asarray(bits), (bits.astype("u4") << 16).view("f4").astype("f8")


def features(m: int, d: int, dtype: str, strided: bool) -> tuple[Any, Any, np.ndarray]:
    """(m, d) features with gaps, or dense and 16-byte aligned: what keeps them alive, a Matrix, and their values."""
    gap, step = (5, 2) if strided else (-d % 8, 1)
    held, values = stored(rng.standard_normal((m, (d + gap) * step)), dtype)
    matrix = struct("Matrix")(data=pointer(held), row_stride=(d + gap) * step, column_stride=step)
    return held, matrix, values[:, : d * step : step]


def scalar(x: float) -> Any:
    """A 0-d float32 on the GPU."""
    return cupy.asarray(x, "f4")


def plan(**given: Any) -> Any:
    """A plan on the GPU; what is not given is 0."""
    host = np.zeros(1, PLAN)
    for name, value in given.items():
        host[name] = value
    return cupy.asarray(host.view("u1"))


def read(plan_: Any) -> Any:
    """A plan as the GPU left it."""
    return cupy.asnumpy(plan_).view(PLAN)[0]


def ratio(got: Any, want: Any, bound: Any) -> float:
    """The largest error as a multiple of its bound; infinities and NaN must agree."""
    got = np.asarray(cupy.asnumpy(got), "f8")
    with np.errstate(all="ignore"):
        error = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.abs(got - want) / bound)
    return float(np.max(np.where(np.isnan(error), np.inf, error), initial=0.0))


def restart() -> None:
    """From here on ``rng`` draws the same numbers again."""
    rng.bit_generator.state = _START


def drawn_pairs(m: int, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positives, own, drawn and none, and what is excluded; a positive that is excluded is none."""
    for positives in (np.arange(m), rng.integers(-3, n + 3, m), np.full(m, -1)):
        yield positives, np.where(rng.random(m) < 0.2, positives, -1)


def seen(positives: np.ndarray, excluded: np.ndarray, n: int) -> np.ndarray:
    """The column of each row's positive, -1 for none."""
    return np.where((positives >= 0) & (positives < n) & (positives != excluded), positives, -1)


def nlls(m: int) -> tuple[list[Any], Any, Any]:
    """N, P, S, weights and targets on the GPU, the terms of their loss, and log-sum-exps of N and P.

    Certain, doubtful, without negatives, positives or target; silent rows.
    """
    negative, positive = rng.uniform(-80, 80, m), rng.uniform(-80, 80, m)
    weight, target = rng.random(m).astype("f4"), np.where(rng.random(m) < 0.3, 0, 1).astype("f4")
    total = positive.copy()
    negative[::7], positive[1::7], positive[0], total[1::7] = -np.inf, -np.inf, -np.inf, 0.0
    weight[::5] = 0.0
    weight[:35:7] = 0.0
    negative[3], weight[3] = np.nan, 0.0
    with np.errstate(all="ignore"):
        whole = np.logaddexp(negative, positive)
        excess = np.logaddexp(0.0, negative - positive)
        there = (target != 0) & ((positive != -np.inf) | (total != 0))
        nll = np.where(there, excess + np.maximum(positive - target * total, 0.0), whole)
        terms = np.where(weight == 0, 0.0, weight.astype("f8") * nll)
    finite = np.isfinite(terms)
    weight[~finite], terms[~finite] = 0.0, 0.0
    return [cupy.asarray(x) for x in (negative, positive, total, weight, target)], terms, whole
