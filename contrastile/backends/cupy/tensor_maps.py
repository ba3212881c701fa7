# pyright: reportAttributeAccessIssue=false
"""Tensor maps: descriptions of a matrix with which Hopper's copy engine loads and stores its blocks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver

from contrastile.backends.crossing import dtype_name
from contrastile.backends.cupy.launch import row_stride


def tensor_map(x: Any, box: tuple[int, int]) -> bytes:
    """The 128 bytes of the map of a matrix for blocks of (rows, columns); outside, reads give 0, writes are dropped.

    Args:
        x: (height, width) float16 or bfloat16, rows aligned to 16 bytes, unit stride along them.
        box: rows and columns of a block; 64 columns, the 128 bytes that one swizzle takes.
    """
    return _encoded(int(x.data.ptr), x.shape[0], x.shape[1], row_stride(x), dtype_name(x.dtype), box)


@lru_cache(maxsize=4096)
def _encoded(address: int, height: int, width: int, stride: int, dtype: str, box: tuple[int, int]) -> bytes:
    data_types = driver.CUtensorMapDataType
    # autograd's thread has no context before its first call of the runtime
    cupy.cuda.runtime.setDevice(cupy.cuda.runtime.getDevice())
    status, encoded = driver.cuTensorMapEncodeTiled(
        {
            "float16": data_types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            "bfloat16": data_types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        }[dtype],
        2,
        address,
        [driver.cuuint64_t(width), driver.cuuint64_t(height)],
        [driver.cuuint64_t(2 * stride)],
        [driver.cuuint32_t(box[1]), driver.cuuint32_t(box[0])],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        raise RuntimeError(f"cuTensorMapEncodeTiled failed: {status.name} for ({height}, {width}) with stride {stride}")
    return np.array([int(word) for word in encoded.opaque], dtype=np.uint64).tobytes()
