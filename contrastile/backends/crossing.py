"""torch tensors as CuPy arrays and back, on one GPU: same memory, same stream, one memory pool.

Callers pass both modules: a caller with an array has imported its library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

Array = Any


def to_cupy(x: Array, torch: Any, cupy: Any) -> Array:
    """A torch tensor's memory as a CuPy array that keeps the tensor alive.

    DLPack would take several times as long, and lacks bfloat16 in some versions. It also makes one stream wait for the
    other: here both libraries must use the same stream (``cupy_for_torch``, ``torch_for_cupy``).
    """
    if x.is_conj() or x.is_neg():
        # the memory of a lazy view does not hold its values
        x = x.resolve_conj().resolve_neg()
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), x.nbytes, x, x.get_device())
    itemsize = x.element_size()
    strides = None if x.is_contiguous() else tuple([itemsize * stride for stride in x.stride()])
    return cupy.ndarray(tuple(x.shape), dtype_name(x.dtype), cupy.cuda.MemoryPointer(memory, 0), strides)


def to_torch(x: Array, torch: Any, cupy: Any) -> Array:
    """A CuPy array's memory as a torch tensor, without a copy; on the tensor's own storage where torch owns it."""
    owner: Any = getattr(x.data.mem, "_owner", None)
    if isinstance(owner, torch.Tensor):
        storage, itemsize = owner.untyped_storage(), x.itemsize
        offset = (x.data.ptr - storage.data_ptr()) // itemsize
        strides = tuple([stride // itemsize for stride in x.strides])
        # not a view, which autograd would track
        tensor = torch.empty(0, dtype=getattr(torch, dtype_name(x.dtype)), device=owner.device)
        return tensor.set_(storage, offset, x.shape, strides)
    if x.dtype.name != "bfloat16":
        return torch.from_dlpack(x)
    return torch.from_dlpack(x.view("int16")).view(torch.bfloat16)


@cache
def dtype_name(dtype: Any) -> str:
    """The name of a NumPy or torch dtype; cached, because both build the string at each call."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def cupy_for_torch(like: Array, torch: Any, cupy: Any) -> Iterator[None]:
    """While open, CuPy works on the tensor's device, on torch's current stream there, with memory from torch's pool.

    Both libraries then share one pool, and a CUDA graph of torch's also captures CuPy's work.
    """
    device, allocator = like.device, _torch_pool(like.device, torch, cupy)
    with (
        cupy.cuda.Device(device.index),
        # the address is valid because the device is now CuPy's current one
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
    # a bound method, which need not look up a dtype and a device
    empty = torch.empty(0, dtype=torch.uint8, device=device).new_empty
    unowned, pointer, device_id = cupy.cuda.UnownedMemory, cupy.cuda.MemoryPointer, device.index

    def allocate(size: int) -> Any:
        block = empty(size)
        return pointer(unowned(block.data_ptr(), size, block, device_id), 0)

    return allocate


def torch_for_cupy(like: Array, torch: Any, cupy: Any) -> ExitStack:
    """While open, torch works on the array's device and on CuPy's current stream there."""
    contexts, device_id = ExitStack(), like.device.id
    contexts.enter_context(cupy.cuda.Device(device_id))
    pointer = cupy.cuda.get_current_stream(device_id).ptr
    # ExternalStream(0) would be a stream of torch's pool, which does not wait for the default stream
    stream = torch.cuda.ExternalStream(pointer, device=device_id) if pointer else torch.cuda.default_stream(device_id)
    contexts.enter_context(torch.cuda.stream(stream))
    return contexts
