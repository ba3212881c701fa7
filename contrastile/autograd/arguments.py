"""What a call is told by, its arguments and what is around it, and the graphs of small calls that repeat."""

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
        known: False where some argument is of another kind, and ``kinds`` does not say it all.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], grad: bool) -> None:
        self.args, self.kwargs, self.grad = args, kwargs, grad
        self.tensors: list[Tensor] = []
        self.numbers: list[float] = []
        self.kinds: list[Hashable] = [grad, *kwargs]
        # numbers by name say which loss it is, and are no arguments of one
        self.known = self._take(args) and self._take(kwargs.values(), options=True)

    def _take(self, given: Iterable[Any], *, options: bool = False) -> bool:
        kinds = self.kinds
        for x in given:
            kind: Any = type(x)
            if x is None or kind is str:
                kinds.append(x)
            elif kind in _TENSORS:
                if x.is_nested or x.is_neg():
                    return False
                self.tensors.append(x)
                kinds.append((x.dtype, x.layout, x.shape, x.device, x.requires_grad))
            elif kind in _NUMBERS:
                kinds.append((kind, x) if options else kind)
                self.numbers.append(x)
            elif kind not in (list, tuple) or not self._take(x):
                return False
            else:
                kinds.append(len(x))
        return True

    def device(self) -> int | None:
        """The current GPU if all tensors are on it and small enough to be replayed, else None."""
        tensors = self.tensors
        if sum(x.numel() for x in tensors) > FEATURES:
            return None
        device = torch.cuda.current_device()
        return device if all(x.get_device() == device for x in tensors) else None

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments, with other tensors."""
        each = iter(tensors)
        return [_put(x, each) for x in self.args], {name: _put(x, each) for name, x in self.kwargs.items()}


def _put(x: Any, tensors: Iterator[Tensor]) -> Any:
    """An argument with its tensors replaced by the next ones."""
    if type(x) in _TENSORS:
        return next(tensors)
    return [_put(y, tensors) for y in x] if type(x) in (list, tuple) else x


def surroundings(device: int) -> tuple[Any, ...]:
    """Where a call on this device is replayed (``Where``), and all else but its arguments that it depends on."""
    where = device, torch._C._cuda_getCurrentRawStream(device)
    cast_to = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    return where, cast_to, product_rounding("cuda"), *map(os.environ.get, VARIABLES)


def graphs_of(
    held: Signatures[C], what: Hashable, call: Call, plan: Callable[[], Plan], record: Callable[[Where, Pool], C]
) -> C | None:
    """The graphs of a small call that repeats; None where it is to be launched.

    Args:
        held: those of all calls.
        what: everything but the arguments that the result depends on.
        call: known, of plain tensors on a GPU.
        plan: gives the call's plan.
        record: captures the call.
    """
    device = call.device() if may_be_captured() else None
    if device is None:
        return None
    where, *_ = around = surroundings(device)
    key = what, around, *call.numbers, *call.kinds
    try:
        hash(key)
    except TypeError:  # of a setting that is a list, say
        return None
    graphs, due = held.find(key)
    if due and held.capturing.acquire(blocking=False):
        try:
            if compute.may_be_replayed(plan()):
                graphs = held.capture(key, where, lambda pool: record(where, pool))
            else:
                held.refuse(key)
        finally:
            held.capturing.release()
    return graphs
