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
from contrastile.training.chunks import Budget, Size, Sliced, apply, positive, tensors


class Stream:
    """A batch as chunks on a device, each with its weight; may be iterated several times. Made by ``stream``.

    Attributes:
        chunks: the chunks without weights: what the gradient cache takes.
    """

    def __init__(self, chunks: Loaded, total: float) -> None:
        self.chunks = chunks
        self._total = total

    def __len__(self) -> int:
        """How many chunks there are."""
        return self.chunks.count

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        """Each chunk with n_j / N, the share of its samples (MBS Eq. 14 with n_j / N_B where 1 / N_S is printed)."""
        for j, chunk in enumerate(self.chunks):
            samples = self.chunks.samples_in(j)
            yield chunk, samples / self._total if samples else 0.0


class Loaded(Sliced):
    """Slices of a batch, copied to a device: on CUDA from page-locked memory, one chunk ahead, beside the work."""

    def __init__(self, batch: Any, size: Size, device: torch.device) -> None:
        super().__init__(batch, size)
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        if self._device.type == "cuda":
            return self._ahead()
        return (apply(lambda x: x.to(self._device), self[j]) for j in range(self.count))

    def _ahead(self) -> Iterator[Any]:
        copies: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        pinned: tuple[list[Pinned], list[Pinned]] = ([], [])
        coming: deque[Any] = deque()
        for j in range(self.count + 1):
            if j < self.count:
                coming.append(_sent(self[j], self._device, copies, pinned[j % 2]))
            if j > 0:
                chunk, arrived = coming.popleft()
                work = torch.cuda.current_stream(self._device)
                work.wait_event(arrived)
                for x in tensors(chunk):
                    # its memory belongs to the copy stream: not before the work is done may a later copy have it
                    x.record_stream(work)
                yield chunk


def _sent(chunk: Any, device: torch.device, copies: Any, pinned: list[Pinned]) -> tuple[Any, Any]:
    """Start to copy a chunk through page-locked memory; returns the copy and the event of its arrival."""
    place = iter(range(len(tensors(chunk))))

    def copied(x: Tensor) -> Tensor:
        i = next(place)
        if i == len(pinned):
            pinned.append(Pinned())
        return pinned[i].hold(x).to(device, non_blocking=True)

    with torch.cuda.stream(copies):
        moved = apply(copied, chunk)
        event = copies.record_event()
    for each in pinned:
        each.sent(event)
    return moved, event


def stream(batch: Any, size: Size, device: Any = None, *, total: float | None = None) -> Stream:
    """A batch as chunks on the device with the weight of each, for any loss that is a mean over samples (MBS Alg. 1).

    ``for chunk, weight in stream(...): (weight * loss(model(chunk))).backward()`` adds the gradient of the whole
    batch's mean. The weight is exactly n_j / N, so that a last chunk of fewer samples counts for less; Alg. 1 as
    printed has 1 / N_S for each. As an input of ``cached_step`` the batch is streamed in both passes.

    On CUDA each chunk is copied through page-locked buffers (two chunks of host memory; none where the batch is pinned
    already) on a stream of its own while the chunk before is at work. On the CPU nothing is copied.

    Args:
        batch: a tensor, or dict, tuple or list of tensors, (N, ...) each; usually on the host.
        size: samples per chunk, or a ``Budget`` of elements.
        device: where chunks go; None is CUDA where there is one, else the CPU.
        total: what the weights divide by instead of N. With DDP's mean over n ranks of uneven parts: the samples of all
            ranks, divided by n.

    Raises:
        TypeError: the batch holds something other than tensors.
        ValueError: the tensors' first dimensions differ, or the size or total is not positive.
    """
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    chunks = Loaded(batch, size if isinstance(size, Budget) else positive("size", size), where)
    if total is not None and not (isinstance(total, Real | Tensor) and 0 < total < math.inf):
        raise ValueError(
            f"total must be positive and finite, got {total}; give the samples of all ranks, divided by their number"
        )
    return Stream(chunks, chunks.samples if total is None else total)
