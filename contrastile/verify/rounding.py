"""Rounding to the feature dtypes, in NumPy alone, so that every backend and the oracle see the same values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from contrastile.oracle.arrays import FloatArray

UNIT: dict[str, float] = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Unit roundoff: the largest relative error of rounding to nearest, above the underflow threshold."""

UNDERFLOW: dict[str, float] = {"float16": 2.0**-25, "bfloat16": 2.0**-126, "float32": 2.0**-126, "float64": 2.0**-1022}
"""Largest absolute error of a result below the normal range: half the subnormal spacing for float16, whose subnormals
are always kept; the smallest normal number for the others, which hardware may flush to zero."""


def round_to(x: npt.ArrayLike, dtype: str) -> FloatArray:
    """The nearest value that dtype represents, ties to even; overflow gives inf, NaN and inf stay.

    Args:
        x: any shape.
        dtype: "float16", "bfloat16", "float32" or "float64".

    Returns:
        float64 array of x's shape.

    Raises:
        ValueError: dtype is none of these.
    """
    if dtype not in UNIT:
        raise ValueError(f"dtype must be one of {', '.join(UNIT)}, got {dtype!r}")
    wide = np.array(x, dtype=np.float64)
    if dtype == "bfloat16":
        return _bfloat16(wide)
    with np.errstate(over="ignore", under="ignore"):
        return wide.astype(dtype).astype(np.float64)


def _bfloat16(x: FloatArray) -> FloatArray:
    """Round directly from float64: a step to float32 in between would round twice."""
    bits = x.view(np.uint64)
    dropped = np.uint64(52 - 7)
    odd = (bits >> dropped) & np.uint64(1)
    below_half = (np.uint64(1) << (dropped - np.uint64(1))) - np.uint64(1)
    normal = (((bits + below_half + odd) >> dropped) << dropped).view(np.float64)
    with np.errstate(invalid="ignore"):
        normal = np.where(np.abs(normal) >= 2.0**128, np.copysign(np.inf, x), normal)
        # below 2^-126 the spacing is constant; rint rounds ties to even, and products with powers of two are exact
        is_subnormal = np.abs(x) < 2.0**-126
        subnormal = np.rint(np.where(is_subnormal, x, 0.0) * 2.0**133) * 2.0**-133
    return np.where(np.isfinite(x), np.where(is_subnormal, subnormal, normal), x)
