"""Launching a kernel instance on the current device and CuPy's current stream, its arguments passed by value.

The features' device must be current.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from ctypes import sizeof
from functools import cache, partial
from typing import Any

import cupy
import numpy as np

from contrastile.backends.compiling import current_call, postpone
from contrastile.backends.cupy import build
from contrastile.backends.cupy.build import Instance

_ALIGNMENT, _PART = 16, 512
_loaded: set[Instance] = set()


def on_device(x: Any) -> AbstractContextManager[Any]:
    """While open, work on x's device, whatever the current device is."""
    device: AbstractContextManager[Any] = cupy.cuda.Device(x.device.id)
    return device


def launch(instance: Instance, blocks: int, threads: int, *parameters: Any, shared: int = 0) -> None:
    """Queue one launch.

    Args:
        instance: the kernel.
        blocks: blocks of the grid, which has one dimension.
        threads: threads of a block.
        *parameters: structures or bytes, each passed by value.
        shared: bytes of dynamic shared memory.
    """
    if (current_call.missing or instance not in _loaded) and is_postponed(instance):
        return
    kernel = _kernel(instance, shared, cupy.cuda.get_device_id())
    kernel((blocks,), (threads,), tuple(map(_by_value, parameters)), shared_mem=shared)


def is_postponed(instance: Instance) -> bool:
    """Whether a launch must wait until the kernel is compiled, which this function requests."""
    compile_one = partial(build.cubin, instance, build.architecture_name(capability(cupy.cuda.get_device_id())))
    return instance in _loaded or postpone(instance, compile_one)


def _by_value(parameter: Any) -> Any:
    size = len(parameter) if isinstance(parameter, bytes) else sizeof(parameter)
    return np.frombuffer(parameter, dtype=_bytes(size))[0]


@cache
def _bytes(size: int) -> Any:
    return np.dtype(f"V{size}")


@cache
def _kernel(instance: Instance, shared: int, device: int) -> Any:
    path, name = build.cubin(instance, build.architecture_name(capability(device)))
    kernel = cupy.RawModule(path=str(path)).get_function(name)
    if shared:
        # more than 48 KiB must be requested
        kernel.max_dynamic_shared_size_bytes = shared
    _loaded.add(instance)
    return kernel


@cache
def capability(device: int) -> int:
    """Compute capability of a device, times 10."""
    return int(cupy.cuda.Device(device).compute_capability)


@cache
def multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def aligned(x: Any) -> Any:
    """X itself if its rows are 16-byte aligned with unit stride, and cuBLAS takes its row stride; else a copy."""
    has_unit_stride = x.strides[1] == x.itemsize or x.shape[1] == 1
    has_valid_strides = has_unit_stride and x.shape[1] * x.itemsize <= x.strides[0] < 2**31 * x.itemsize
    if has_valid_strides and x.strides[0] % _ALIGNMENT == 0 and x.data.ptr % _ALIGNMENT == 0:
        return x
    copy = workspace(x.shape[0], x.shape[1], x.dtype)
    copy[...] = x
    return copy


def workspace(height: int, width: int, dtype: Any) -> Any:
    """An uninitialised (height, width) matrix whose rows are 16-byte aligned."""
    step = _ALIGNMENT // np.dtype(dtype).itemsize
    return cupy.empty((height, -(-width // step) * step), dtype=dtype)[:, :width]


def empty(*shape: int, dtype: str = "float32") -> Any:
    """An uninitialised array on the current device."""
    return cupy.ndarray(shape, dtype)


def scratch(*sizes: int) -> tuple[Any, list[int]]:
    """One uninitialised allocation on the current device, which the caller must hold, and its parts' addresses.

    Args:
        *sizes: bytes of each part; parts are aligned as allocations are.
    """
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size + -size % _PART)
    memory = empty(offsets.pop(), dtype="uint8")
    address = int(memory.data.ptr)
    return memory, [address + offset for offset in offsets]


def pointer(x: Any, offset: int = 0) -> int | None:
    """The address of element ``offset`` of a contiguous array; null for None."""
    if x is None:
        return None
    address: int = x.data.ptr
    return address + offset * int(x.itemsize) if offset else address


def row_stride(x: Any) -> int:
    """Elements from one row to the next."""
    return int(x.strides[0]) // int(x.itemsize)
