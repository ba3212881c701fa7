"""Between torch and CuPy on one GPU, with stand-ins that lie on the host and tell which stream was asked for."""

from __future__ import annotations

import ctypes
import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from contrastile.backends import crossing


@pytest.mark.parametrize(("pointer", "expected"), [(0, "default stream of 1"), (0x7F00, "stream at 32512 on 1")])
def test_torch_works_on_the_stream_that_cupy_works_on(pointer: int, expected: str) -> None:
    used: list[Any] = []

    def stream(x: Any) -> Any:
        used.append(x)
        return nullcontext()

    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            stream=stream,
            # as torch does: a pointer of 0 is no pointer
            ExternalStream=lambda at, device: f"stream at {at} on {device}" if at else "any stream of the pool",
            default_stream=lambda device: f"default stream of {device}",
        )
    )
    current = SimpleNamespace(ptr=pointer)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=nullcontext, get_current_stream=lambda device: current))
    with crossing.torch_for_cupy(SimpleNamespace(device=SimpleNamespace(id=1)), torch, cupy):
        pass
    assert used == [expected]


class Memory:
    """``cupy.cuda.UnownedMemory``."""

    def __init__(self, ptr: int, size: int, owner: Any, device: int | None) -> None:
        self.ptr, self.size, self._owner = ptr, size, owner


class Pointer:
    """``cupy.cuda.MemoryPointer``."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Array:
    """``cupy.ndarray`` over memory of the host."""

    def __init__(self, shape: Any, dtype: Any, data: Any, strides: Any) -> None:
        self.shape, self.dtype, self.data = shape, np.dtype(dtype), data
        self.itemsize = self.dtype.itemsize
        # as CuPy does: without strides the elements lie in row order
        self.strides = np.empty(shape, dtype).strides if strides is None else strides

    def values(self) -> Any:
        reach = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)) + self.itemsize
        buffer = (ctypes.c_char * reach).from_address(self.data.ptr)
        return np.ndarray(self.shape, self.dtype, buffer, strides=self.strides)


CUPY = SimpleNamespace(ndarray=Array, cuda=SimpleNamespace(UnownedMemory=Memory, MemoryPointer=Pointer))


def tensors() -> list[torch.Tensor]:
    x = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    ids = torch.arange(11)
    return [x, x.T, x[1::2, ::3], x[3:], x[2], x[:1].expand(4, 5), x.half()[1:], x.double().T, ids, ids[5]]


@pytest.mark.parametrize("which", range(len(tensors())))
def test_what_crosses_is_the_same_memory_both_ways(which: int) -> None:
    x = tensors()[which]
    there = crossing.to_cupy(x, torch, CUPY)
    assert np.array_equal(there.values(), x.numpy())
    assert there.data.ptr == x.data_ptr()
    back = crossing.to_torch(there, torch, CUPY)
    assert torch.equal(back, x)
    assert (back.data_ptr(), back.dtype, back.stride()) == (x.data_ptr(), x.dtype, x.stride())
    # autograd keeps account of views: a result is to be none
    assert back._base is None


def test_an_array_inside_a_block_is_its_own_part_of_it() -> None:
    block = torch.arange(256, dtype=torch.uint8)
    part = Array((3, 2), "int16", Pointer(Memory(block.data_ptr(), 256, block, None), 20), (8, 2))
    assert np.array_equal(crossing.to_torch(part, torch, CUPY).numpy(), part.values())


def test_what_has_crossed_keeps_its_memory_alive() -> None:
    x = torch.ones(64)
    seen = weakref.ref(x)
    there = crossing.to_cupy(x, torch, CUPY)
    del x
    gc.collect()
    assert seen() is not None
    back = crossing.to_torch(there, torch, CUPY)
    del there
    gc.collect()
    assert torch.equal(back, torch.ones(64))


def test_a_lazy_negative_crosses_as_its_values() -> None:
    negative = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negative.is_neg()
    assert np.array_equal(crossing.to_cupy(negative, torch, CUPY).values(), [-2.0, 4.0])


def test_memory_of_no_tensor_crosses_by_dlpack() -> None:
    asked: list[Any] = []
    stand_in = SimpleNamespace(Tensor=torch.Tensor, from_dlpack=asked.append)
    own = Array((2,), "float32", SimpleNamespace(mem=SimpleNamespace(), ptr=0), (4,))
    crossing.to_torch(own, stand_in, CUPY)
    assert asked == [own]
