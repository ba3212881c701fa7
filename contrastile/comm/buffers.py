"""Arrays as bytes: views for arrays on the host, pinned copies for arrays on a device.

Also arrays in parts, one per rank: split, received and added up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Array

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

PIECE = 1 << 30
"""Bytes of one piece of a long message: engines count in 32 bits."""


def raw(x: Array) -> Bytes:
    """The bytes of an array on the host, (nbytes,) uint8: its own memory, no copy.

    Raises:
        ValueError: it is not contiguous, so that there is no such view.
    """
    found: Bytes
    if library_of(x).name == "torch":
        if not x.is_contiguous():
            raise ValueError("arrays that travel must be contiguous, got gaps; send x.contiguous()")
        torch = sys.modules["torch"]
        found = x.detach().view(-1).view(torch.uint8).numpy()
        return found
    if not x.flags.c_contiguous:
        raise ValueError("arrays that travel must be contiguous, got gaps; send numpy.ascontiguousarray(x)")
    found = x.reshape(-1).view("uint8")
    return found


def untransformed() -> AbstractContextManager[Any]:
    """While open, no transform of torch.func is under way: in one, every tensor that is made is a wrapper."""
    torch = sys.modules.get("torch")
    if torch is None or not getattr(torch._C, "_are_functorch_transforms_active", bool)():
        return nullcontext()
    found: AbstractContextManager[Any] = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()
    return found


def stored(x: Array) -> Array:
    """An array without the wrappers of transforms, which have no memory."""
    torch = sys.modules.get("torch")
    while torch is not None and isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def pieces(parts: Mapping[int, Sequence[Bytes]]) -> Iterator[tuple[int, Bytes]]:
    """A message's bytes in the pieces in which they are sent and received, each with its rank."""
    return ((r, x[start : start + PIECE]) for r, xs in parts.items() for x in xs for start in range(0, x.size, PIECE))


def to_host(xs: list[Array]) -> list[Any]:
    """Copies of arrays on one device in pinned host memory, complete when this returns."""
    if not xs:
        return []
    arrays = library_of(xs[0])
    copies = []
    for x in xs:
        copies.append(_pinned(x))
        if arrays.name == "torch":
            copies[-1].copy_(x.detach(), non_blocking=True)
        else:
            x.get(out=copies[-1], blocking=False)
    if arrays.name == "torch":
        sys.modules["torch"].cuda.current_stream(xs[0].device).synchronize()
    else:
        sys.modules["cupy"].cuda.get_current_stream(xs[0].device.id).synchronize()
    return copies


def read_later(x: Array) -> Callable[[], Any | None] | None:
    """Start to copy a small array to the host; the returned function gives it as NumPy's, or None until it has arrived.

    Returns None while a CUDA graph is captured: the host sees no replay, and querying an event would end the capture.
    """
    arrays = library_of(x)
    if arrays.device(x) == "cpu":
        values = arrays.to_numpy(x)
        return lambda: values
    # nothing may be allocated while a stream is captured
    if arrays.name == "torch":
        cuda = sys.modules["torch"].cuda
        if cuda.is_current_stream_capturing():
            return None
        host, event = _pinned(x), cuda.Event()
        host.copy_(x.detach(), non_blocking=True)
        event.record(cuda.current_stream(x.device))
        # a view now: who asks may be inside a transform of torch.func, where no tensor gives one
        values = host.numpy()
        return lambda: values if not cuda.is_current_stream_capturing() and event.query() else None
    current, number = sys.modules["cupy"].cuda.get_current_stream, x.device.id
    if _captured(number):
        return None
    landing = _pinned(x)
    x.get(out=landing, blocking=False)
    reached = current(number).record()
    return lambda: landing if not _captured(number) and reached.done else None


def _captured(number: int) -> bool:
    """Whether CuPy's current stream on this GPU, or torch's, is captured."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return bool(sys.modules["cupy"].cuda.get_current_stream(number).is_capturing())


def from_host(x: Array) -> tuple[Any, Callable[[], None]]:
    """Pinned host memory for what an array on a device receives, and what copies it to the device once it is there."""
    host = _pinned(x)

    def copy_back() -> None:
        if library_of(x).name == "torch":
            x.detach().copy_(host, non_blocking=True)
        else:
            x.set(host)
            # the pool may hand this memory out again before a copy under way has read it
            sys.modules["cupy"].cuda.get_current_stream(x.device.id).synchronize()

    return host, copy_back


def _pinned(x: Array) -> Any:
    if library_of(x).name == "torch":
        torch = sys.modules["torch"]
        return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return sys.modules["cupyx"].empty_pinned(x.shape, dtype=x.dtype)


def split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """The parts of these sizes along the first axis; views."""
    parts, start = [], 0
    for size in sizes:
        parts.append(x[start : start + size])
        start += size
    return parts


def copied(x: Array) -> Array:
    """A copy, in the library's own memory."""
    return x.clone() if hasattr(x, "clone") else x.copy()


def copy(x: Array, into: Array) -> None:
    """``into`` = x, of the same library."""
    if hasattr(into, "copy_"):
        # torch's own call costs the host a third of the time
        into.copy_(x)
    else:
        into[...] = x


def add_up(parts: Sequence[Array], into: Array) -> None:
    """``into`` = the sum of the parts, in their order."""
    if len(parts) == 1:
        copy(parts[0], into)
        return
    arrays = library_of(into)
    arrays.add(parts[0], parts[1], into)
    for part in parts[2:]:
        arrays.add(into, part, into)
