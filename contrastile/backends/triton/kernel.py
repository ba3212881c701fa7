"""Kernels whose later launches skip what Triton works out again at each one.

A launch binds its arguments, specialises them, looks the compiled kernel up and checks the kernel's globals: several
times what handing it to the driver takes, and a small batch is bound by it. Here the compiled kernel that a launch
returned is kept under all that the choice depends on, and launched as a compiled kernel is.

Kernels take flat arguments: of a tuple Triton specialises every integer, whatever ``do_not_specialize`` names. What
kernels call takes tuples.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile.backends.triton.configs import INTERPRETED

_KNOWN = ("3.6.", "3.7.")
"""Versions of Triton whose specialisation was read; with others every launch goes Triton's own way."""


def kernel(function: Any) -> Any:
    """A kernel that is launched as before, ``kernel[grid](...)``: for what is launched, not for what kernels call."""
    return function if INTERPRETED else Kernel(function)


class Kernel:
    """A Triton function and its compiled kernels.

    Attributes:
        function: what ``triton.jit`` made.
        known: whether how this version of Triton specialises was read.
        compiled: by ``key``, of each kernel its launcher, what that is told of it, and the values of the compile-time
            arguments that follow the positional ones.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.known = triton.__version__.startswith(_KNOWN) and torch.version.hip is None
        self.compiled: dict[tuple[Any, ...], tuple[Any, Any, Any, tuple[Any, ...]]] = {}
        self._specialised = [not x.do_not_specialize for x in function.params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        """Queue one launch on the current device and stream.

        Args:
            grid: programs along each dimension.
            *args: the first parameters.
            **named: the others, and compile options.
        """
        own_way = not self.known or self.function.pre_run_hooks or watched()
        key = None if own_way else self.key(args, named)
        if key is not None and (found := self.compiled.get(key)) is not None:
            run, function, metadata, others = found
            # a device's own stream, and neither hooks nor anything to tell them
            stream = torch._C._cuda_getCurrentRawStream(key[0])
            run(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *args, *others)
            return
        # in every version alike: after 3.9 no multiplication is fused with an addition unless a launch says so
        compiled = self.function[grid](*args, enable_fp_fusion=True, **named)
        if key is not None and compiled is not None:
            others = tuple(named.get(x.name, x.default) for x in self.function.params[len(args) :])
            self.compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, others

    def key(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...] | None:
        """The device, and all that the choice of a compiled kernel depends on, or more.

        None if this cannot tell, or not on a GPU.

        Triton specialises a pointer by its dtype and whether it is 16-byte aligned; an integer by whether it takes 64
        bits and, unless told not to, whether it is 1 or divisible by 16; a descriptor by its dtype and block.
        """
        found: list[Any] = [None, *named, *named.values()]
        add, on = found.append, None
        for x, specialised in zip(args, self._specialised, strict=False):
            kind = type(x)
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                on = x
                add(x.dtype)
                if x.data_ptr() & 15:
                    add("unaligned")
            elif kind is int:
                width = 32 if -0x80000000 <= x < 0x80000000 else 64
                add(width + (x == 1) + 2 * (x & 15 == 0) if specialised else width)
            elif x is None:
                add(x)
            elif kind is TensorDescriptor:
                on = x.base
                add((on.dtype, *x.block_shape))
            elif kind is float or kind is bool:
                add(kind)
            else:
                return None
        if on is None or (device := on.get_device()) < 0:
            return None
        found[0] = device
        return tuple(found)


def watched() -> bool:
    """Whether somebody is told of each launch: then Triton itself launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # chains of hooks, or single ones
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
