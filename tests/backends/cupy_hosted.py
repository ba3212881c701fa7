"""The cupy backend's modules over NumPy in CuPy's place, and a record of what they launch and multiply."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from cupy_stand_in import cupy_modules

LAUNCHING = ("tiles", "forward_pass", "backward_pass", "keeping", "sigmoid_pass", "arrays")


@dataclass(frozen=True, eq=False)
class Call:
    """One launch: tensor maps are given as the matrices and boxes that they are of."""

    kernel: str
    blocks: int
    threads: int
    maps: list[tuple[Any, tuple[int, int]]]
    arguments: Any
    shared: int | str

    @property
    def name(self) -> str:
        """The kernel's name without its template arguments."""
        return self.kernel.partition("<")[0]


class Host(SimpleNamespace):
    """The backend's modules over the stand-in, and what it did: launches, once in short, and products."""


@contextmanager
def hosted() -> Iterator[Host]:
    names = ("record", "launch", "products", "instances", *LAUNCHING)
    with cupy_modules(*names) as modules, pytest.MonkeyPatch.context() as patch:
        host = Host(**dict(zip(names, modules, strict=True)), launched=[], calls=[], multiplied=[])
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
            host.launched.append((instance.kernel, arguments, shared))
            given = [mapped[int.from_bytes(each, "little")] for each in maps]
            host.calls.append(Call(instance.kernel, blocks, threads, given, arguments, shared))

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
