"""The second products of the backward: ``out += G K`` and ``out += G^T Q``, by cuBLAS, accumulated in float32.

cuBLAS is called through ctypes with a handle of our own: CuPy refuses to call it while a stream is captured. A
workspace for each pass makes it deterministic and lets it be captured.
"""

from __future__ import annotations

import ctypes
from functools import cache
from threading import Lock
from typing import Any

import cupy

from contrastile.backends.crossing import dtype_name
from contrastile.backends.cupy.configs import CUBLAS_BYTES
from contrastile.backends.cupy.launch import row_stride

_KINDS = {"float32": 0, "float16": 2, "bfloat16": 14}
# compute in float32 without tf32, choose the algorithm by the shape
_COMPUTE_FLOAT32, _BY_HEURISTIC = 68, -1
# the pointer modes of cuBLAS for its two factors
_ON_HOST, _ON_DEVICE = 0, 1
# partial sums of a split product are not rounded to a 16-bit result's dtype before they are added
_FULL_SUMS = 16
_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)
# a handle's stream and workspace are set before each call: two threads must not do that at once
_lock = Lock()


class Products:
    """cuBLAS for one pass: its workspace comes from the caller's memory pool and goes back with the pass."""

    def __init__(self) -> None:
        self.workspace = cupy.empty(CUBLAS_BYTES, dtype="uint8")

    def accumulate(self, out: Any, g: Any, features: Any, *, transposed: bool = False, fresh: bool = False) -> None:
        """``out += g @ features``, or ``g.T @ features`` with ``transposed``; with ``fresh`` out is only written.

        Args:
            out: (m, d) float32.
            g: (m, r), or (r, m) with ``transposed``; rows 16-byte aligned.
            features: (r, d) of g's dtype; rows 16-byte aligned.
            transposed: whether g enters transposed.
            fresh: whether out is overwritten, whatever it holds.
        """
        if out.strides[1] != out.itemsize and out.shape[1] > 1:
            contiguous_out = cupy.ascontiguousarray(out)
            self.accumulate(contiguous_out, g, features, transposed=transposed, fresh=fresh)
            out[...] = contiguous_out
            return
        factors = ctypes.byref(_ONE), ctypes.byref(_ZERO if fresh else _ONE)
        self._multiply(out, g, features, transposed, factors, _ON_HOST)

    def write(self, out: Any, g: Any, features: Any, factors: tuple[int, int]) -> None:
        """``out = factor g.T @ features``, summed in float32 and rounded once to out's dtype.

        Args:
            out: (m, d) contiguous, of g's dtype.
            g: (r, m); rows 16-byte aligned.
            features: (r, d) of g's dtype; rows 16-byte aligned.
            factors: addresses of the factor, which a kernel computed, and of a zero: float32 on the device.
        """
        self._multiply(out, g, features, True, factors, _ON_DEVICE)

    def _multiply(
        self, out: Any, g: Any, features: Any, transposed: bool, factors: tuple[Any, Any], pointer_mode: int
    ) -> None:
        data_type = _KINDS[dtype_name(g.dtype)]
        blas, handle = _library(), _handle(cupy.cuda.get_device_id())
        with _lock:
            _check(blas.cublasSetStream_v2(handle, cupy.cuda.get_current_stream().ptr))
            _check(blas.cublasSetWorkspace_v2(handle, self.workspace.data.ptr, self.workspace.nbytes))
            _check(blas.cublasSetPointerMode_v2(handle, pointer_mode))
            # cuBLAS is column-major: it computes out^T += features^T g^T
            status = blas.cublasGemmEx(
                handle,
                0,
                int(transposed),
                out.shape[1],
                out.shape[0],
                features.shape[0],
                factors[0],
                features.data.ptr,
                data_type,
                row_stride(features),
                g.data.ptr,
                data_type,
                row_stride(g),
                factors[1],
                out.data.ptr,
                _KINDS[dtype_name(out.dtype)],
                row_stride(out),
                _COMPUTE_FLOAT32,
                _BY_HEURISTIC,
            )
            _check(status)


@cache
def _library() -> Any:
    """The cuBLAS that CuPy uses."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    library = ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.cublasCreate_v2.argtypes = [pointer]
    library.cublasSetStream_v2.argtypes = [pointer, pointer]
    library.cublasSetWorkspace_v2.argtypes = [pointer, pointer, ctypes.c_size_t]
    library.cublasSetPointerMode_v2.argtypes = library.cublasSetMathMode.argtypes = [pointer, integer]
    matrix: list[Any] = [pointer, integer, integer]
    library.cublasGemmEx.argtypes = [pointer, *[integer] * 5, pointer, *matrix * 2, pointer, *matrix, integer, integer]
    return library


@cache
def _handle(device: int) -> ctypes.c_void_p:
    """A handle for a device, which must be current; it lives as long as the process."""
    handle = ctypes.c_void_p()
    _check(_library().cublasCreate_v2(ctypes.byref(handle)))
    _check(_library().cublasSetMathMode(handle, _FULL_SUMS))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS failed with status {status}")
