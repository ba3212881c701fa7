"""Records and restores the state that a forward pass reads: random generators and autocast.

An encoder with dropout or augmentation must draw the same random numbers, bit for bit, when a chunk is encoded again.
Otherwise the second pass differentiates other embeddings than the loss took.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch


class RandomState:
    """The present states of the random generators of Python, NumPy, torch's CPU and the given devices.

    Reading a device's state does not wait for the device.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._cpu = torch.get_rng_state()
        self._devices = [(device, torch.get_device_module(device).get_rng_state(*_index(device))) for device in devices]

    def restore(self) -> None:
        """Restore every generator."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    # MPS has one device and takes no index
    return () if device.type == "mps" else (device,)


def accelerators(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The devices, other than the CPU, whose generators an encoder of these inputs and parameters may draw from.

    CUDA's current device is among them if CUDA is in use.
    """
    devices = {x.device for x in tensors} - {torch.device("meta")}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    return sorted((device for device in devices if device.type != "cpu"), key=str)


class Autocast:
    """The present autocast on the CPU and the given devices, recorded for a backward pass in another thread."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        types = {"cpu", *(device.type for device in devices)}
        self._states = [(x, torch.get_autocast_dtype(x), torch.is_autocast_enabled(x)) for x in sorted(types)]

    @property
    def epsilon(self) -> float:
        """The largest epsilon of the dtypes that autocast is enabled with; 0 if it is disabled."""
        return max((torch.finfo(dtype).eps for _, dtype, enabled in self._states if enabled), default=0.0)

    def again(self) -> ExitStack:
        """A context in which autocast is as recorded."""
        stack = ExitStack()
        for device, dtype, enabled in self._states:
            if torch.is_autocast_enabled(device) or enabled:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        return stack

    def wide(self) -> ExitStack:
        """A context without autocast to float16, in which unscaled gradients of a mean over b samples underflow."""
        stack = ExitStack()
        for device, dtype, enabled in self._states:
            if enabled and dtype is torch.float16:
                stack.enter_context(torch.autocast(device, enabled=False))
        return stack


def float32_at_least(dtype: torch.dtype) -> Any:
    """float32, or the dtype itself where it is wider."""
    return torch.promote_types(dtype, torch.float32)
