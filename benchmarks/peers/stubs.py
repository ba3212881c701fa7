"""Lets published packages run where torchvision or a GPU is missing: ``python benchmarks/peers/stubs.py FILE``.

Some import torchvision, timm, datasets and others at their top, for parts that no loss calls. Where one of
them is not installed, an empty module stands in for it, whose every attribute is an empty class. Under Triton's
interpreter (``TRITON_INTERPRET=1``) tensors say that they are on a GPU of compute capability 9.0, for packages that
check it before they launch a kernel, and of several configurations each takes its first; the kernels themselves are
unchanged.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

UNUSED = ("torchvision", "timm", "ftfy", "datasets", "peft", "ujson", "fastkmeans", "fast_plaid", "voyager")
"""Packages that others import at their top, and that no loss uses."""


class _Empty(type):
    """A metaclass: every attribute of its classes is another empty class."""

    def __getattr__(cls, name: str) -> Any:
        return _empty(name)


def _empty(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Empty(name, (), {})


class _Finder:
    """Finds empty modules in place of ``UNUSED``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in UNUSED else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: Python then makes the usual module."""

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(__version__="0", __getattr__=_empty)


def install() -> tuple[str, ...]:
    """Put the stand-ins in place.

    Returns:
        The names of the packages that have stand-ins.
    """
    specs = {name: importlib.util.find_spec(name) for name in UNUSED}
    missing = tuple(name for name, spec in specs.items() if spec is None or isinstance(spec.loader, _Finder))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # append it, so that installed packages are found first
        sys.meta_path.append(_Finder())  # type: ignore[arg-type]
    if os.environ.get("TRITON_INTERPRET") == "1":
        import torch
        import triton

        autotune = triton.autotune
        triton.autotune = lambda configs, *args, **kwargs: autotune(configs[:1], *args, **kwargs)
        torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
        torch.cuda.get_device_capability = lambda device=None: (9, 0)
        torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(name="H100")
    return missing


if __name__ == "__main__":
    install()
    runpy.run_path(sys.argv[1], run_name="__main__")
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        # leave together, because other ranks may still need this one
        dist.barrier()
        dist.destroy_process_group()
