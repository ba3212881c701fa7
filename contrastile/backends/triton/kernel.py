"""Kernels whose later launches skip Triton's own lookup of the compiled kernel.

At each launch Triton binds the arguments, specialises them, looks the compiled kernel up and checks the kernel's
globals. This module saves the host 9 us of that (``benchmarks/NOTES.md``, 2026-11-25): it caches the compiled kernel
that a first launch returned, under a key of everything that Triton's choice depends on.

Kernels take flat arguments, because Triton specialises every integer of a tuple, whatever ``do_not_specialize`` names.
Device functions take tuples.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from contrastile.backends.compiling import current_call, postpone
from contrastile.backends.triton.configs import INTERPRETED

_KNOWN = ("3.6.", "3.7.")
"""Versions of Triton whose rules of specialisation are known; other versions launch by Triton itself."""


def kernel(function: Any) -> Any:
    """Decorates a kernel that the host launches, ``kernel[grid](...)``; not for device functions."""
    return function if INTERPRETED else Kernel(function)


class Kernel:
    """A Triton function and its compiled kernels.

    Attributes:
        function: the function of ``triton.jit``.
        known: whether this version's rules of specialisation are known.
        compiled: by ``key``, each kernel's launcher, handle and metadata, and the values of the compile-time arguments
            that follow the positional ones.
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
            *args: the values of the first parameters.
            **named: the values of the other parameters, and compile options.
        """
        is_uncached = not self.known or self.function.pre_run_hooks or watched()
        key = None if is_uncached else self.key(args, named)
        cached = None if key is None else self.compiled.get(key)
        if key is not None and cached is None and not torch.cuda.is_current_stream_capturing():
            if postpone((self, key), partial(self._compile, key[0], args, named)):
                return
        elif current_call.missing:
            return
        if cached is not None and key is not None:
            run, function, metadata, constants = cached
            # no launch metadata and no hooks
            stream = torch._C._cuda_getCurrentRawStream(key[0])
            run(*(*grid, 1, 1)[:3], stream, function, metadata, None, None, None, *args, *constants)
            return
        # from Triton 3.10 on, multiplications and additions are fused only where a launch requests it
        compiled = self.function[grid](*args, enable_fp_fusion=True, **named)
        if key is not None and compiled is not None:
            constants = tuple(named.get(x.name, x.default) for x in self.function.params[len(args) :])
            self.compiled[key] = compiled.run, compiled.function, compiled.packed_metadata, constants

    def _compile(self, device: int, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Compile and load the kernel of a launch; the launch itself raises any error."""
        # each thread has its own current device
        with suppress(Exception), torch.cuda.device(device):
            _ = self.function.warmup(*args, grid=(1,), enable_fp_fusion=True, **named).run

    def key(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...] | None:
        """The device, and everything that the choice of a compiled kernel depends on, or more.

        None for arguments of unknown types, or without a tensor on a GPU.

        Triton specialises a pointer by its dtype and whether it is 16-byte aligned; an integer by whether it takes 64
        bits and, unless told not to, whether it is 1 or divisible by 16; a descriptor by its dtype and block.
        """
        parts: list[Any] = [None, *named, *named.values()]
        add, tensor = parts.append, None
        for argument, specialised in zip(args, self._specialised, strict=False):
            argument_type = type(argument)
            if argument_type is Tensor or argument_type is Parameter:
                tensor = argument
                add(argument.dtype)
                if argument.data_ptr() & 15:
                    add("unaligned")
            elif argument_type is int:
                width = 32 if -0x80000000 <= argument < 0x80000000 else 64
                add(width + (argument == 1) + 2 * (argument & 15 == 0) if specialised else width)
            elif argument is None:
                add(argument)
            elif argument_type is TensorDescriptor:
                tensor = argument.base
                add((tensor.dtype, *argument.block_shape))
            elif argument_type is float or argument_type is bool:
                add(argument_type)
            else:
                return None
        if tensor is None or (device := tensor.get_device()) < 0:
            return None
        parts[0] = device
        return tuple(parts)


def watched() -> bool:
    """Whether launch hooks are set: then Triton itself launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    # a hook is a chain of hooks, or a single one
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
