"""The cupy backend's modules over NumPy in CuPy's place, a record of what they launch and multiply, and blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cupy_stand_in import cupy_modules

from contrastile.backends.contract import Block, Pairs, Weights

LAUNCHING = ("tiles", "forward_pass", "backward_pass", "keeping", "sigmoid_pass", "arrays")


@dataclass(frozen=True, eq=False)
class Call:
    """One launch: tensor maps are given as the matrices and boxes that they are of."""

    kernel: str
    blocks: int
    maps: list[tuple[Any, tuple[int, int]]]
    arguments: Any

    @property
    def name(self) -> str:
        """The kernel's name without its template arguments."""
        return self.kernel.partition("<")[0]


class Host(SimpleNamespace):
    """The backend's modules over the stand-in, and what it did: launches and products."""

    def names(self) -> list[str]:
        """The kernels launched until now, which are then forgotten."""
        found = [call.name for call in self.calls]
        self.calls.clear()
        return found


@contextmanager
def hosted() -> Iterator[Host]:
    names = ("record", "launch", "products", "instances", *LAUNCHING)
    with cupy_modules(*names) as modules, pytest.MonkeyPatch.context() as patch:
        host = Host(**dict(zip(names, modules, strict=True)), calls=[], multiplied=[])
        mapped: list[tuple[Any, tuple[int, int]]] = []

        def tensor_map(x: Any, box: tuple[int, int]) -> bytes:
            mapped.append((x, box))
            return (len(mapped) - 1).to_bytes(128, "little")

        def launch(instance: Any, blocks: int, threads: int, *parameters: Any, shared: int | str = 0) -> None:
            assert instance in host.instances.every(90), f"{instance} is not in the table"
            assert blocks > 0
            for each in parameters:
                size = len(each) if isinstance(each, bytes) else ctypes.sizeof(each)
                assert host.launch._by_value(each).nbytes == size
            *maps, arguments = parameters
            given = [mapped[int.from_bytes(each, "little")] for each in maps]
            host.calls.append(Call(instance.kernel, blocks, given, arguments))

        def accumulate(self: Any, out: Any, g: Any, features: Any, **how: Any) -> None:
            inner = g.T if how.get("transposed") else g
            assert out.shape == (inner.shape[0], features.shape[1])
            assert inner.shape[1] == features.shape[0]
            host.multiplied.append((out.shape, how))

        def write(self: Any, out: Any, g: Any, features: Any, factors: tuple[int, int]) -> None:
            assert out.dtype == g.dtype
            assert out.shape == (g.shape[1], features.shape[1])
            assert g.shape[0] == features.shape[0]
            host.multiplied.append((out.shape, {"factors": factors}))

        for name in LAUNCHING:
            patch.setattr(getattr(host, name), "launch", launch)
        patch.setattr(host.tiles, "tensor_map", tensor_map)
        patch.setattr(host.products.Products, "__init__", lambda self: None)
        patch.setattr(host.products.Products, "accumulate", accumulate)
        patch.setattr(host.products.Products, "write", write)
        yield host


KINDS = ("plain", "excluded", "drop", "target", "none")


def block(host: Host, shape: tuple[int, int, int], dtype: str = "bfloat16", kind: str = "plain") -> Block:
    """A block of (m, n, d), whose pairs are one of ``KINDS``."""
    arrays, random = host.record.backend.arrays, np.random.default_rng(0)
    like = arrays.from_numpy(np.zeros(1))
    m, n, d = shape
    rows, columns = (arrays.asarray(random.standard_normal((size, d)), dtype, like) for size in (m, n))
    index, other = arrays.arange(0, m, like), arrays.arange(0, n, like)
    pairs = {
        "plain": Pairs(positives=index),
        "excluded": Pairs(positives=index, excluded=index),
        "drop": Pairs(positives=index, row_ids=index, column_ids=other),
        "target": Pairs(excluded=index, row_ids=index, column_ids=other, match="target"),
        "none": Pairs(),
    }[kind]
    scale, bias = (arrays.asarray(x, "float32", like) for x in (3.0, 1.0))
    return Block(rows, columns, scale, bias, pairs)


def weights(host: Host, given: Block, two_sided: bool = True, kept: Any = None) -> Weights:
    """Weights for a block, of rows or of both sides."""
    lengths = [x.shape[0] for x in (given.rows, given.columns)[: 1 + two_sided]]
    arrays = host.record.backend.arrays
    vectors = [arrays.full((size,), 1.0, x, given.scale) for size in lengths for x in ["float64"] * 2 + ["float32"] * 2]
    return Weights(*vectors, kept=kept)


def sums(host: Host, given: Block) -> tuple[Any, Any]:
    """Accumulators of both sides."""
    arrays = host.record.backend.arrays
    rows, columns = (arrays.full(x.shape, 0.0, "float32", given.scale) for x in (given.rows, given.columns))
    return rows, columns


def covered(calls: list[Call], shape: tuple[int, ...]) -> np.ndarray:
    """How often each pair of a block was in a chunk of these launches."""
    count = np.zeros(shape[:2], int)
    for call in calls:
        chunk = call.arguments.chunk
        count[chunk.row : chunk.row + chunk.height, chunk.column : chunk.column + chunk.width] += 1
    return count
