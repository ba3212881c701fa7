"""A cache of the vectors that every eager call of torch needs: equal weights, targets of 1, positives in a row."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

from contrastile.backends import eager
from contrastile.backends.arrays import ArrayLibrary

Array = Any

MOST = 32
"""Triples of vectors in the cache; the least recently used goes first."""

HOST_ROWS = 8192
"""The longest vectors of a host in the cache: longer ones take no time beside the loss, and memory."""

_made: dict[Hashable, tuple[Array, Array, Array]] = {}
# ids outlive a tensor that two threads make at once and one of them drops
_changing = threading.Lock()


def pairs(
    arrays: ArrayLibrary, weight: float, start: int, stop: int, dtype: str, like: Array
) -> tuple[Array, Array, Array]:
    """Equal weights, targets of 1 and the positives start..stop-1 of as many rows; they are read-only.

    Args:
        arrays: the library of ``like``.
        weight: of each row.
        start: the first row's positive.
        stop: one more than the last row's.
        dtype: of weights and targets.
        like: gives the device.
    """

    def make() -> tuple[Array, Array, Array]:
        alike = (arrays.full((stop - start,), value, dtype, like) for value in (weight, 1.0))
        return *alike, arrays.arange(start, stop, like)

    if arrays.name != "torch":
        return make()
    import torch

    if not _can_be_shared(torch, stop - start, like):
        return make()
    device = like.get_device()
    stream = torch._C._cuda_getCurrentRawStream(device) if like.is_cuda else None
    key = weight, start, stop, dtype, device, stream
    with _changing:
        found = _made.pop(key, None)
        if found is None:
            found = make()
            if len(_made) >= MOST:
                eager.forget(_made.pop(next(iter(_made))))
            eager.remember(found, read=device < 0 and start < stop)
        _made[key] = found
    return found


def _can_be_shared(torch: Any, rows: int, like: Array) -> bool:
    """Whether later eager calls can reuse a vector that is made now: on a GPU's current stream, or short on a host.

    A graph under capture has its own memory, which is written on replay; a tensor of inference mode cannot be saved
    for a backward pass.
    """
    if not eager.direct(torch, (like,)) or torch.is_inference_mode_enabled():
        return False
    if not like.is_cuda:
        return rows <= HOST_ROWS and like.device.type == "cpu"
    return (
        like.get_device() == torch.cuda.current_device()
        and hasattr(torch._C, "_cuda_getCurrentRawStream")
        and not torch.cuda.is_current_stream_capturing()
    )
