"""What a launch needs: aligned features and their descriptors, the device, the number of programs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile.backends.triton.configs import INTERPRETED, Config

_ALIGNMENT = 16


def aligned(x: Any) -> Any:
    """X itself if its rows are 16-byte aligned with unit stride; else an aligned copy."""
    step = _ALIGNMENT // x.element_size()
    has_unit_stride = x.stride(1) == 1 or x.shape[1] == 1
    if has_unit_stride and x.stride(0) >= x.shape[1] and x.stride(0) % step == 0 and x.data_ptr() % _ALIGNMENT == 0:
        return x
    copy = workspace(x.shape[0], x.shape[1], x.dtype, x)
    return copy.copy_(x)


def descriptor(x: Any, block: tuple[int, int]) -> TensorDescriptor:
    """The descriptor of an aligned matrix for blocks of this shape; outside x, reads give 0 and writes are dropped."""
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], list(block))


def workspace(height: int, width: int, dtype: Any, like: Any) -> Any:
    """An uninitialised (height, width) matrix whose rows are 16-byte aligned."""
    step = _ALIGNMENT // dtype.itemsize
    padded = torch.empty((height, -(-width // step) * step), dtype=dtype, device=like.device)
    return padded if width % step == 0 else padded[:, :width]


def on_device(x: Any) -> AbstractContextManager[Any]:
    """While open, launch on x's device and its current stream, whatever the current device is."""
    # _cuda_getDevice is torch.cuda.current_device without its check that CUDA is initialised
    is_current = not x.is_cuda or x.get_device() == torch._C._cuda_getDevice()
    return nullcontext() if is_current else torch.cuda.device(x.device)


def architecture(x: Any) -> int:
    """Compute capability of x's device, times 10; 0 under the interpreter."""
    return 0 if INTERPRETED else _capability(x.device)


@cache
def _capability(device: Any) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _multiprocessors(device: Any) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def grid(height: int, width: int, config: Config, x: Any) -> tuple[int]:
    """Programs for a persistent kernel over the tiles of a (height, width) matrix: no more than can be resident."""
    tiles = -(-height // config.bm) * -(-width // config.bn)
    return (tiles if INTERPRETED else min(tiles, _multiprocessors(x.device) * config.resident),)
