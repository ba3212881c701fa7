"""NumPy in CuPy's place: arrays on the host that say they are on a GPU, so that the host code runs without one.

``cupy_modules`` puts it into ``sys.modules`` for a while and gives the cupy backend's modules, imported over it. What
kernels do is not done: ``launch`` is for the test to replace.
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

PACKAGE = "contrastile.backends.cupy"
CAPABILITY = "90"


class Device:
    """A GPU that is not there."""

    def __init__(self, number: int = 0) -> None:
        self.id = number
        self.compute_capability = CAPABILITY
        self.attributes = {"MultiProcessorCount": 132}

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Array(np.ndarray):
    """A NumPy array with what CuPy's have more, or otherwise."""

    @property
    def device(self) -> Any:
        return Device()

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self) -> Any:
        return np.asarray(self).view(np.ndarray)


class _Module(ModuleType):
    """``cupy``: NumPy's functions, what they return being arrays of this file."""

    ndarray = Array
    generic = np.generic

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return np.asarray(result).view(Array) if isinstance(result, np.ndarray | np.generic) else result

        return call


def stand_in() -> ModuleType:
    """The module."""
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
    """The backend's modules of these names, imported while ``cupy`` is the stand-in."""
    kept = {name: module for name, module in sys.modules.items() if name.startswith(f"{PACKAGE}.")}
    package = importlib.import_module(PACKAGE)
    attributes = dict(vars(package))
    driver = SimpleNamespace(CUtensorMapDataType=None)
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = driver
    bindings.nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
    replaced: dict[str, Any] = {"cupy": stand_in(), "cuda": ModuleType("cuda")}
    replaced |= {"cuda.bindings": bindings, "cuda.bindings.driver": driver}
    for name in kept:
        del sys.modules[name]
    try:
        with mock.patch.dict(sys.modules, replaced):
            yield [importlib.import_module(f"{PACKAGE}.{name}") for name in names]
    finally:
        for name in [x for x in sys.modules if x.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]
        sys.modules.update(kept)
        # an import leaves a submodule in its package too, where the next one would find it
        for name in vars(package).keys() - attributes.keys():
            delattr(package, name)
        vars(package).update(attributes)
