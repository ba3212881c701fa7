"""Micro-batch streaming (MBS): a batch stays on the host and comes to the device chunk by chunk, ahead of its use."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from contrastile.backends.staging import Pinned
from contrastile.training.chunks import Budget, Size, Sliced, apply, positive_integer, tensors


class Stream:
    """A batch as chunks on a device, each with its weight; may be iterated several times. Made by ``stream``.

    Attributes:
        chunks: the chunks without weights, for the gradient cache.
    """

    def __init__(self, chunks: Loaded, total: float) -> None:
        self.chunks = chunks
        self._total = total

    def __len__(self) -> int:
        """The number of chunks."""
        return self.chunks.count

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        """Each chunk with n_j / N, the share of its samples (MBS Eq. 14 with n_j / N_B where 1 / N_S is printed)."""
        for j, chunk in enumerate(self.chunks):
            samples = self.chunks.samples_in(j)
            yield chunk, samples / self._total if samples else 0.0


class Loaded(Sliced):
    """Slices of a batch, copied to a device: on CUDA from page-locked memory, one chunk ahead of the computation."""

    def __init__(self, batch: Any, size: Size, device: torch.device) -> None:
        super().__init__(batch, size)
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        if self._device.type == "cuda":
            return self._copy_ahead()
        return (apply(lambda x: x.to(self._device), self[j]) for j in range(self.count))

    def _copy_ahead(self) -> Iterator[Any]:
        copy_stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pinned: tuple[list[Pinned], list[Pinned]] = ([], [])
        queue: deque[Any] = deque()
        for j in range(self.count + 1):
            if j < self.count:
                queue.append(_start_copy(self[j], self._device, copy_stream, pinned[j % 2]))
            if j > 0:
                chunk, arrived = queue.popleft()
                compute_stream = torch.cuda.current_stream(self._device)
                compute_stream.wait_event(arrived)
                for x in tensors(chunk):
                    # the memory belongs to the copy stream, which must not reuse it before the computation is done
                    x.record_stream(compute_stream)
                yield chunk


def _start_copy(chunk: Any, device: torch.device, copy_stream: Any, pinned: list[Pinned]) -> tuple[Any, Any]:
    """Start to copy a chunk through page-locked memory; return the copy and the event of its arrival."""
    buffer_indices = iter(range(len(tensors(chunk))))

    def copy_tensor(x: Tensor) -> Tensor:
        i = next(buffer_indices)
        if i == len(pinned):
            pinned.append(Pinned())
        return pinned[i].hold(x).to(device, non_blocking=True)

    with torch.cuda.stream(copy_stream):
        chunk_copy = apply(copy_tensor, chunk)
        event = copy_stream.record_event()
    for buffer in pinned:
        buffer.sent(event)
    return chunk_copy, event


def stream(batch: Any, size: Size, device: Any = None, *, total: float | None = None) -> Stream:
    """A batch as chunks on the device with the weight of each, for any loss that is a mean over samples (MBS Alg. 1).

    ``for chunk, weight in stream(...): (weight * loss(model(chunk))).backward()`` adds the gradient of the whole
    batch's mean. The weight is exactly n_j / N, so that a last chunk of fewer samples counts for less; Alg. 1 as
    printed has 1 / N_S for each. As an input of ``cached_step`` the batch is streamed in both passes.

    On CUDA each chunk is copied through page-locked buffers (two chunks of host memory; none if the batch is pinned
    already) on a stream of its own, during the computation on the chunk before. On the CPU nothing is copied.

    Args:
        batch: a tensor, or dict, tuple or list of tensors, (N, ...) each; usually on the host.
        size: samples per chunk, or a ``Budget`` of elements.
        device: where chunks go; None is CUDA where there is one, else the CPU.
        total: the divisor of the weights instead of N. With DDP's mean over n ranks of uneven parts, give the samples
            of all ranks, divided by n.

    Raises:
        TypeError: the batch holds something other than tensors.
        ValueError: the tensors' first dimensions differ, or the size or total is not positive.
    """
    target = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    chunks = Loaded(batch, size if isinstance(size, Budget) else positive_integer("size", size), target)
    if total is not None and not (isinstance(total, Real | Tensor) and 0 < total < math.inf):
        raise ValueError(
            f"total must be positive and finite, got {total}; give the samples of all ranks, divided by their number"
        )
    return Stream(chunks, chunks.samples if total is None else total)
