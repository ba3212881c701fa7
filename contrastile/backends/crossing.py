"""Between torch and CuPy on one GPU: the same memory, the same stream, one memory pool.

Both modules are given, never imported: who holds an array has imported its library.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

Array = Any


def to_cupy(x: Array, torch: Any, cupy: Any) -> Array:
    """A torch tensor's memory as a CuPy array: DLPack, no copy."""
    x = x.detach()
    if x.dtype != torch.bfloat16:
        return cupy.from_dlpack(x)
    # not every version's DLPack takes bfloat16: it crosses as integers of its size
    return cupy.from_dlpack(x.view(torch.int16)).view("bfloat16")


def to_torch(x: Array, torch: Any, cupy: Any) -> Array:
    """A CuPy array's memory as a torch tensor: DLPack, no copy."""
    if x.dtype.name != "bfloat16":
        return torch.from_dlpack(x)
    return torch.from_dlpack(x.view("int16")).view(torch.bfloat16)


def cupy_for_torch(like: Array, torch: Any, cupy: Any) -> ExitStack:
    """While open, CuPy works on the tensor's device, on torch's current stream there, with memory from torch's pool.

    One pool then holds everything, and what is captured into a CUDA graph is captured as torch captures it.
    """
    held, number = ExitStack(), like.device.index
    held.enter_context(cupy.cuda.Device(number))
    stream = torch.cuda.current_stream(like.device).cuda_stream
    held.enter_context(cupy.cuda.ExternalStream(stream, number))
    held.enter_context(cupy.cuda.using_allocator(_torch_pool(like.device, torch, cupy)))
    return held


def _torch_pool(device: Any, torch: Any, cupy: Any) -> Callable[[int], Any]:
    """An allocator for CuPy whose blocks are torch tensors: freed with the last array that uses them."""

    def allocate(size: int) -> Any:
        block = torch.empty(size, dtype=torch.uint8, device=device)
        memory = cupy.cuda.UnownedMemory(block.data_ptr(), size, block, device.index)
        return cupy.cuda.MemoryPointer(memory, 0)

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


def cupy_alone(like: Array, cupy: Any) -> ExitStack:
    """While open, CuPy works on the array's device, on its own current stream there."""
    held = ExitStack()
    held.enter_context(cupy.cuda.Device(like.device.id))
    return held
