"""NumPy in place of CuPy, so that the host code of the cupy backend runs without a GPU, and blocks for its tests.

``cupy_modules`` imports the backend's modules over this stand-in. ``hosted`` also replaces launches and products, so
that nothing is computed. Tests on a GPU compare the kernels with the oracle.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from contrastile.backends.contract import Block, Pairs, SideWeights, Weights

PACKAGE = "contrastile.backends.cupy"
CAPABILITY = "90"


class Device:
    """A stand-in for a GPU."""

    def __init__(self, number: int = 0) -> None:
        self.id = number
        self.compute_capability = CAPABILITY
        self.attributes = {"MultiProcessorCount": 132}

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Array(np.ndarray):
    """A NumPy array with the attributes of CuPy's arrays that NumPy's lack or define otherwise."""

    @property
    def device(self) -> Any:
        return Device()

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self) -> Any:
        return np.asarray(self).view(np.ndarray)


class _Module(ModuleType):
    """``cupy``: NumPy's functions, which return an ``Array`` where NumPy returns an array or a scalar."""

    ndarray = Array
    generic = np.generic

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(np, name)
        if not callable(attribute) or isinstance(attribute, type):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            result = attribute(*args, **kwargs)
            return np.asarray(result).view(Array) if isinstance(result, np.ndarray | np.generic) else result

        return call


def cupy_stand_in() -> ModuleType:
    """A module that is imported as ``cupy``."""
    module: Any = _Module("cupy")
    module.cuda = SimpleNamespace(
        Device=Device,
        get_device_id=lambda: 0,
        get_current_stream=lambda *_: SimpleNamespace(ptr=0),
        using_allocator=lambda *_: nullcontext(),
        runtime=SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError),
    )
    return module


@contextmanager
def cupy_modules(*names: str) -> Iterator[list[Any]]:
    """Import modules of the backend by name while the stand-in is ``cupy``; the former modules return at the end."""
    former_modules = {name: module for name, module in sys.modules.items() if name.startswith(f"{PACKAGE}.")}
    package = importlib.import_module(PACKAGE)
    former_attributes = dict(vars(package))
    driver = SimpleNamespace(CUtensorMapDataType=None)
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = driver
    bindings.nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
    replacements: dict[str, Any] = {"cupy": cupy_stand_in(), "cuda": ModuleType("cuda")}
    replacements |= {"cuda.bindings": bindings, "cuda.bindings.driver": driver}
    for name in former_modules:
        del sys.modules[name]
    try:
        with mock.patch.dict(sys.modules, replacements):
            yield [importlib.import_module(f"{PACKAGE}.{name}") for name in names]
    finally:
        for name in [x for x in sys.modules if x.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        sys.modules.update(former_modules)
        # an import also sets an attribute of the package, where the next import would find the module
        for name in vars(package).keys() - former_attributes.keys():
            delattr(package, name)
        vars(package).update(former_attributes)


@contextmanager
def hosted() -> Iterator[SimpleNamespace]:
    """The backend's modules, and ``launched``: the names of the launched kernels without template arguments."""
    names = ("record", "launch", "products", "instances", "tiles", "build")
    with cupy_modules(*names) as modules, pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        host = SimpleNamespace(**dict(zip(names, modules, strict=True)), launched=[])

        def kernel(instance: Any, shared: int, device: int) -> Any:
            assert instance in host.instances.every(90), f"{instance} is not in the table"

            def launch(blocks: tuple[int], threads: tuple[int], parameters: Any, shared_mem: int) -> None:
                assert blocks[0] > 0
                host.launched.append(instance.kernel.partition("<")[0])

            host.launch._loaded.add(instance)
            return launch

        def product(self: Any, out: Any, g: Any, features: Any, *flags: Any, **options: Any) -> None:
            left_factor = g.T if flags or options.get("transposed") else g
            assert out.shape == (left_factor.shape[0], features.shape[1])
            assert left_factor.shape[1] == features.shape[0]

        patch.setattr(host.launch, "_kernel", kernel)
        host.compiled = []
        patch.setattr(host.build, "cubin", lambda x, architecture: host.compiled.append((x.kernel, len(host.launched))))
        patch.setattr(host.tiles, "tensor_map", lambda x, box: bytes(128))
        patch.setattr(host.products.Products, "__init__", lambda self: None)
        for name in ("accumulate", "write"):
            patch.setattr(host.products.Products, name, product)
        yield host


KINDS = ("plain", "excluded", "drop", "target", "none", "limits", "limits-excluded")


def block(host: Any, shape: tuple[int, int, int], dtype: str = "bfloat16", kind: str = "plain") -> Block:
    """A block of (m, n, d), whose pairs are one of ``KINDS``."""
    arrays, random = host.record.backend.arrays, np.random.default_rng(0)
    like = arrays.from_numpy(np.zeros(1))
    m, n, d = shape
    rows, columns = (arrays.asarray(random.standard_normal((size, d)), dtype, like) for size in (m, n))
    index, other = arrays.arange(0, m, like), arrays.arange(0, n, like)
    limits = arrays.full((m,), 1.0, "float32", like)
    pairs = {
        "plain": Pairs(positives=index),
        "excluded": Pairs(positives=index, excluded=index),
        "drop": Pairs(positives=index, row_ids=index, column_ids=other),
        "target": Pairs(excluded=index, row_ids=index, column_ids=other, match="target"),
        "none": Pairs(),
        "limits": Pairs(positives=index, row_limits=limits),
        "limits-excluded": Pairs(excluded=index, row_limits=limits),
    }[kind]
    scale, bias = (arrays.asarray(x, "float32", like) for x in (3.0, 1.0))
    return Block(rows, columns, scale, bias, pairs)


def weights(host: Any, block: Block, two_sided: bool = True, kept: Any = None) -> Weights:
    """Weights for the rows of a block, or for both sides."""
    lengths = [x.shape[0] for x in (block.rows, block.columns)[: 1 + two_sided]]
    arrays = host.record.backend.arrays
    kinds = ["float64"] * 2 + ["float32"] * 2
    sides = [SideWeights(*(arrays.full((size,), 1.0, x, block.scale) for x in kinds)) for size in lengths]
    return Weights(*sides, kept=kept)


def sums(host: Any, block: Block) -> tuple[Any, Any]:
    """Zeroed accumulators for the gradients of both sides."""
    arrays = host.record.backend.arrays
    rows, columns = (arrays.full(x.shape, 0.0, "float32", block.scale) for x in (block.rows, block.columns))
    return rows, columns
