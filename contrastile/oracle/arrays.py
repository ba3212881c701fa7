"""The array types of the oracle, and the one conversion into them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def float64(values: npt.ArrayLike) -> FloatArray:
    """Values as a float64 array: every input is widened before the first operation. A wider dtype is kept.

    values: any shape and any real dtype. Returns the same shape; the array itself if it is float64 already.
    """
    array = np.asarray(values)
    return array.astype(np.result_type(array, np.float64), copy=False)
