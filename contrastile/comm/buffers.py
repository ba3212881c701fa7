"""Arrays as bytes: views of arrays on the host, pinned copies of arrays on a device.

Also arrays in parts, one per rank: split, copied and added up.
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
"""The most bytes of a piece of a message: longer messages are split, because engines count bytes in 32 bits."""


def raw(x: Array) -> Bytes:
    """The bytes of an array on the host, (nbytes,) uint8, as a view of its memory.

    Raises:
        ValueError: the array is not contiguous, so it has no such view.
    """
    view: Bytes
    if library_of(x).name == "torch":
        if not x.is_contiguous():
            raise ValueError("arrays that travel must be contiguous, got gaps; send x.contiguous()")
        torch = sys.modules["torch"]
        view = x.detach().view(-1).view(torch.uint8).numpy()
        return view
    if not x.flags.c_contiguous:
        raise ValueError("arrays that travel must be contiguous, got gaps; send numpy.ascontiguousarray(x)")
    view = x.reshape(-1).view("uint8")
    return view


def untransformed() -> AbstractContextManager[Any]:
    """A context outside any transform of torch.func, because inside one every new tensor is a wrapper."""
    torch = sys.modules.get("torch")
    if torch is None or not getattr(torch._C, "_are_functorch_transforms_active", bool)():
        return nullcontext()
    context: AbstractContextManager[Any] = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack()
    return context


def stored(x: Array) -> Array:
    """The array without the wrappers of torch.func's transforms, which have no memory."""
    torch = sys.modules.get("torch")
    while torch is not None and isinstance(x, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def pieces(parts: Mapping[int, Sequence[Bytes]]) -> Iterator[tuple[int, Bytes]]:
    """The bytes of a message in the pieces that are sent and received, each with its rank."""
    return ((r, x[start : start + PIECE]) for r, xs in parts.items() for x in xs for start in range(0, x.size, PIECE))


def to_host(xs: list[Array]) -> list[Any]:
    """Copies of arrays on one device in pinned host memory; the copies are complete when this returns."""
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
    """Start to copy a small array to the host; returns a function that gives the NumPy array, or None until it arrives.

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
        # make the view now, because the function may run inside a transform of torch.func, where no tensor gives one
        values = host.numpy()
        return lambda: values if not cuda.is_current_stream_capturing() and event.query() else None
    get_stream, gpu = sys.modules["cupy"].cuda.get_current_stream, x.device.id
    if _captured(gpu):
        return None
    landing = _pinned(x)
    x.get(out=landing, blocking=False)
    event = get_stream(gpu).record()
    return lambda: landing if not _captured(gpu) and event.done else None


def _captured(gpu: int) -> bool:
    """Whether CuPy's current stream on a GPU, or torch's current stream, is being captured."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return True
    return bool(sys.modules["cupy"].cuda.get_current_stream(gpu).is_capturing())


def from_host(x: Array) -> tuple[Any, Callable[[], None]]:
    """Pinned host memory that receives the bytes for an array on a device, and a function that copies them there."""
    host = _pinned(x)

    def copy_back() -> None:
        if library_of(x).name == "torch":
            x.detach().copy_(host, non_blocking=True)
        else:
            x.set(host)
            # wait, because the pool may reuse the pinned memory before the copy has read it
            sys.modules["cupy"].cuda.get_current_stream(x.device.id).synchronize()

    return host, copy_back


def _pinned(x: Array) -> Any:
    if library_of(x).name == "torch":
        torch = sys.modules["torch"]
        return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    return sys.modules["cupyx"].empty_pinned(x.shape, dtype=x.dtype)


def split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """The parts of the given sizes along the first axis; views."""
    parts, start = [], 0
    for size in sizes:
        parts.append(x[start : start + size])
        start += size
    return parts


def copied(x: Array) -> Array:
    """A copy of an array, in memory of its library."""
    return x.clone() if hasattr(x, "clone") else x.copy()


def copy(x: Array, into: Array) -> None:
    """Copy x into an array of the same library."""
    if hasattr(into, "copy_"):
        # ``copy_`` takes a third of the host's time
        into.copy_(x)
    else:
        into[...] = x


def add_up(parts: Sequence[Array], into: Array) -> None:
    """Write the sum of the parts, added in their order, into ``into``."""
    if len(parts) == 1:
        copy(parts[0], into)
        return
    arrays = library_of(into)
    arrays.add(parts[0], parts[1], into)
    for part in parts[2:]:
        arrays.add(into, part, into)
