"""The array types of the oracle, and the one conversion into them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def float64(values: npt.ArrayLike) -> FloatArray:
    """Values as a float64 array: every input is widened before the first operation; what is wider stays as it is.

    values: any shape and any real dtype. Returns the same shape; the array itself where it is float64 already.
    """
    found = np.asarray(values)
    return found.astype(np.result_type(found, np.float64), copy=False)
