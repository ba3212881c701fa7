"""torch tensors as CuPy arrays and back, on one GPU: same memory, same stream, one memory pool.

Callers pass both modules: the holder of an array has imported its library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

Array = Any


def to_cupy(x: Array, torch: Any, cupy: Any) -> Array:
    """A torch tensor's memory as a CuPy array that keeps the tensor alive.

    DLPack gives the same, several times as slowly, and not for bfloat16 in every version. It also makes one stream
    wait for the other: here both must be the same (``cupy_for_torch``, ``torch_for_cupy``).
    """
    if x.is_conj() or x.is_neg():
        # the memory of a lazy view is not its values
        x = x.resolve_conj().resolve_neg()
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), x.nbytes, x, x.get_device())
    width = x.element_size()
    strides = None if x.is_contiguous() else tuple([width * step for step in x.stride()])
    return cupy.ndarray(tuple(x.shape), dtype_name(x.dtype), cupy.cuda.MemoryPointer(memory, 0), strides)


def to_torch(x: Array, torch: Any, cupy: Any) -> Array:
    """A CuPy array's memory as a torch tensor, no copy: over the same storage where that is a torch tensor's."""
    owner: Any = getattr(x.data.mem, "_owner", None)
    if isinstance(owner, torch.Tensor):
        storage, width = owner.untyped_storage(), x.itemsize
        start = (x.data.ptr - storage.data_ptr()) // width
        strides = tuple([step // width for step in x.strides])
        # not a view, of which autograd would keep account
        made = torch.empty(0, dtype=getattr(torch, dtype_name(x.dtype)), device=owner.device)
        return made.set_(storage, start, x.shape, strides)
    if x.dtype.name != "bfloat16":
        return torch.from_dlpack(x)
    return torch.from_dlpack(x.view("int16")).view(torch.bfloat16)


@cache
def dtype_name(dtype: Any) -> str:
    """The name of a dtype of NumPy's or torch's; cached, for both build the string at each call."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def cupy_for_torch(like: Array, torch: Any, cupy: Any) -> Iterator[None]:
    """While open, CuPy works on the tensor's device, on torch's current stream there, with memory from torch's pool.

    One pool then holds everything, and a CUDA graph of torch's captures CuPy's work too.
    """
    device, allocator = like.device, _torch_pool(like.device, torch, cupy)
    with (
        cupy.cuda.Device(device.index),
        # by address, now that the device is CuPy's current one
        cupy.cuda.Stream.from_external(_Stream(torch._C._cuda_getCurrentRawStream(device.index))),
        cupy.cuda.using_allocator(allocator),
    ):
        yield


class _Stream:
    """A stream by its address, as libraries pass streams to each other."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        # the protocol's version comes first
        return 0, self.address


@cache
def _torch_pool(device: Any, torch: Any, cupy: Any) -> Callable[[int], Any]:
    """An allocator for CuPy whose blocks are torch tensors: freed with the last array that uses them."""
    # a tensor's own method, which has no dtype and no device to look up
    empty = torch.empty(0, dtype=torch.uint8, device=device).new_empty
    unowned, pointer, number = cupy.cuda.UnownedMemory, cupy.cuda.MemoryPointer, device.index

    def allocate(size: int) -> Any:
        block = empty(size)
        return pointer(unowned(block.data_ptr(), size, block, number), 0)

    return allocate


def torch_for_cupy(like: Array, torch: Any, cupy: Any) -> ExitStack:
    """While open, torch works on the array's device and on CuPy's current stream there."""
    held, number = ExitStack(), like.device.id
    held.enter_context(cupy.cuda.Device(number))
    pointer = cupy.cuda.get_current_stream(number).ptr
    # ExternalStream(0) is a stream of torch's pool, which waits for nothing on the default stream
    stream = torch.cuda.ExternalStream(pointer, device=number) if pointer else torch.cuda.default_stream(number)
    held.enter_context(torch.cuda.stream(stream))
    return held
