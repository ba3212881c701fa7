"""The signature of a call: its arguments and its context. The CUDA graphs of small calls that repeat."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from contrastile import compute
from contrastile.backends.replay import C, Pool, Signatures, Where, may_be_captured
from contrastile.backends.settings import FEATURES, VARIABLES
from contrastile.backends.torch.products import product_rounding
from contrastile.plan import Plan

_TENSORS = (Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, bool)


class Call:
    """The arguments of a call of a loss: numbers, texts, None, plain tensors, or sequences of these.

    Attributes:
        tensors: the tensors among the arguments, in their order.
        numbers: the numbers among them.
        kinds: the arguments' part of the signature.
        is_known: False if an argument is of another type, so that ``kinds`` does not describe the call.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], grad: bool) -> None:
        self.args, self.kwargs, self.grad = args, kwargs, grad
        self.tensors: list[Tensor] = []
        self.numbers: list[float] = []
        self.kinds: list[Hashable] = [grad, *kwargs]
        # numbers among the keywords are options of the loss: their values are part of the signature
        self.is_known = self._collect(args) and self._collect(kwargs.values(), are_options=True)

    def _collect(self, values: Iterable[Any], *, are_options: bool = False) -> bool:
        kinds = self.kinds
        for value in values:
            kind: Any = type(value)
            if value is None or kind is str:
                kinds.append(value)
            elif kind in _TENSORS:
                if value.is_nested or value.is_neg():
                    return False
                self.tensors.append(value)
                kinds.append((value.dtype, value.layout, value.shape, value.device, value.requires_grad))
            elif kind in _NUMBERS:
                kinds.append((kind, value) if are_options else kind)
                self.numbers.append(value)
            elif kind not in (list, tuple) or not self._collect(value):
                return False
            else:
                kinds.append(len(value))
        return True

    def device(self) -> int | None:
        """The current GPU if all tensors are on it and small enough to replay, else None."""
        tensors = self.tensors
        if sum(x.numel() for x in tensors) > FEATURES:
            return None
        device = torch.cuda.current_device()
        return device if all(x.get_device() == device for x in tensors) else None

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with other tensors."""
        new = iter(tensors)
        return [_replace(x, new) for x in self.args], {name: _replace(x, new) for name, x in self.kwargs.items()}


def _replace(x: Any, tensors: Iterator[Tensor]) -> Any:
    """An argument with its tensors replaced by the next ones."""
    if type(x) in _TENSORS:
        return next(tensors)
    return [_replace(y, tensors) for y in x] if type(x) in (list, tuple) else x


def replay_context(device: int) -> tuple[Any, ...]:
    """Where a call on this device is replayed (``Where``), and the global settings that affect its result."""
    where = device, torch._C._cuda_getCurrentRawStream(device)
    cast_to = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return where, cast_to, product_rounding("cuda"), *map(os.environ.get, VARIABLES)


def find_graphs(
    cache: Signatures[C], task: Hashable, call: Call, make_plan: Callable[[], Plan], record: Callable[[Where, Pool], C]
) -> C | None:
    """The CUDA graphs of a small call that repeats; None if the caller must launch the kernels.

    Args:
        cache: the graphs of all calls, by signature.
        task: everything except the arguments that the result depends on.
        call: a known call of plain tensors on a GPU.
        make_plan: returns the call's plan.
        record: captures the call.
    """
    device = call.device() if may_be_captured() else None
    if device is None:
        return None
    where, *_ = context = replay_context(device)
    key = task, context, *call.numbers, *call.kinds
    try:
        hash(key)
    except TypeError:  # for example a setting that is a list
        return None
    graphs, is_due = cache.find(key)
    if is_due and cache.capturing.acquire(blocking=False):
        try:
            if compute.may_be_replayed(make_plan()):
                graphs = cache.capture(key, where, lambda pool: record(where, pool))
            else:
                cache.refuse(key)
        finally:
            cache.capturing.release()
    return graphs
