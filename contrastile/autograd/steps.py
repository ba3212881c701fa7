# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""Whole small steps of one process, replayed from CUDA graphs: launching their kernels takes longer than running them.

A call signature (loss, shapes, dtypes, settings, stream) that repeats is captured in two graphs: from the arguments to
the loss, and on to their gradients. From then on a step copies its arguments to where the graphs read them, replays,
and copies the results to memory of the caller's. Nothing is validated again: calls of one signature differ only in
values on the GPU. The kernels and their order, and so the bits, are those of a launched step.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from contrastile import compute
from contrastile.autograd import functions, operators
from contrastile.backends.replay import FEATURES, Captured, Copies, Signatures, Where, may_be_captured, record
from contrastile.backends.settings import VARIABLES
from contrastile.plan import Plan

_TENSORS = (Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, bool)
_replay_numbers = itertools.count(1)


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
        for x in given:
            kind: Any = type(x)
            if kind in _TENSORS:
                if x.is_nested or x.is_neg():
                    return False
                self.tensors.append(x)
                self.kinds.append((x.dtype, x.layout, x.shape, x.device, self.grad and x.requires_grad))
            elif x is None or kind in _NUMBERS:
                self.kinds.append((kind, x) if options else kind)
                if x is not None:
                    self.numbers.append(x)
            elif kind is str:
                self.kinds.append(x)
            elif kind in (list, tuple):
                self.kinds.append(len(x))
                if not self._take(x):
                    return False
            else:
                return False
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


class Step(Captured):
    """The graphs of one call signature."""

    def __init__(self, where: Where, pool: Any, call: Call, launch: Callable[..., Tensor]) -> None:
        super().__init__(where)
        self._latest = 0
        # backward passes take it in autograd's thread: never wait for one while holding it
        self._lock = threading.Lock()
        self._places = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in call.tensors]
        self._copies = Copies(self._places)
        self._copies([x.detach() for x in call.tensors])
        for place, x in zip(self._places, call.tensors, strict=True):
            place.requires_grad_(call.grad and x.requires_grad)
        self.wants = [x.requires_grad for x in self._places]
        wanted = [x for x in self._places if x.requires_grad]
        args, kwargs = call.with_tensors(self._places)
        self._loss: Any = None
        self._upstream: Any = None

        def forward() -> list[Tensor]:
            # kept alive: the second graph reads what the first one leaves
            self._loss = launch(args, kwargs)
            if self._upstream is None:
                self._upstream = torch.ones_like(self._loss)
            upstream = self._upstream
            if wanted:
                # grad_outputs would do it, and imports torch's symbolic shapes: seconds of a process's third step
                self._loss.register_hook(lambda _: upstream)
            return [self._loss.detach()]

        def backward() -> list[Tensor]:
            found = torch.autograd.grad(self._loss, wanted, retain_graph=True)
            return [x.detach() for x in found]

        graphs, found = record(where, [forward, backward] if wanted else [forward], pool)
        self.pool = graphs[0].pool()
        self._forward, self._backward = graphs[0], graphs[-1]
        (self._value,), self._out = found[0], Copies(found[-1])

    def loss(self, tensors: Sequence[Tensor]) -> tuple[Tensor, int]:
        """The loss of these tensors, and the number of the replay that gave it."""
        with self._lock:
            self._latest = self._replayed(tensors)
            return self._value.clone(), self._latest

    def _replayed(self, tensors: Sequence[Tensor]) -> int:
        self._copies([x.detach() for x in tensors])
        self._forward.replay()
        self.replays += 1
        return next(_replay_numbers)

    def gradients(self, number: int, tensors: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """Gradients of ``upstream * loss`` for each tensor, None for one that needs none.

        Args:
            number: of the replay that gave the loss.
            tensors: what it was given.
            upstream: 0-d.
        """
        with self._lock:
            if number != self._latest:
                # another call of this signature came in between
                self._replayed(tensors)
                self._latest = number
            self._upstream.copy_(upstream)
            self._backward.replay()
            found = iter(self._out.copied())
        return [next(found) if want else None for want in self.wants]


class Replayed(torch.autograd.Function):
    """A step."""

    @staticmethod
    def forward(ctx: Any, step: Step, *tensors: Tensor) -> Tensor:
        """The loss."""
        ctx.step = step
        ctx.save_for_backward(*tensors)
        loss, ctx.number = step.loss(tensors)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        arriving = operators.one_upstream(*upstream).resolve_neg()
        # read in any case: autograd raises here if one was freed, or written to since
        tensors = ctx.saved_tensors
        if functions.is_seen(arriving):
            function: Any = ReplayedGradients
            return None, *operators.only(ctx.step.wants, function.apply(ctx.step, ctx.number, arriving, *tensors))
        return None, *ctx.step.gradients(ctx.number, tensors, arriving)


class ReplayedGradients(functions.Gradients):
    """The gradients of a step."""

    @staticmethod
    def forward(step: Step, number: int, upstream: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """A gradient for each tensor, an empty one where none is wanted."""
        return tuple(operators.filled(step.gradients(number, tensors, upstream), upstream))


class Steps(Signatures[Step]):
    """The steps of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._capturing = threading.Lock()

    def loss(
        self, what: Hashable, call: Call, make: Callable[..., tuple[Plan, Any]], launch: Callable[..., Tensor]
    ) -> Tensor | None:
        """The replayed loss of a small call, differentiable; None where the call is to be launched.

        Args:
            what: everything but the arguments that the result depends on.
            call: known, of plain eager tensors on a GPU, the features first.
            make: gives the plan, first of what it gives, of a loss's ``args`` and ``kwargs``.
            launch: gives the loss of such ``args`` and ``kwargs``.
        """
        device, tensors = call.device() if may_be_captured() else None, call.tensors
        if device is None:
            return None
        where = device, torch._C._cuda_getCurrentRawStream(device)
        cast_to = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        key = what, where, cast_to, *map(os.environ.get, VARIABLES), *call.numbers, *call.kinds
        try:
            hash(key)
        except TypeError:  # of a setting that is a list, say
            return None
        step, due = self.find(key)
        if due and self._capturing.acquire(blocking=False):
            try:
                step = self._captured(key, where, call, make, launch)
            finally:
                self._capturing.release()
        if step is None:
            return None
        if not any(step.wants):
            return step.loss(tensors)[0]
        function: Any = Replayed
        return cast("Tensor", function.apply(step, *tensors))

    def _captured(
        self,
        key: Hashable,
        where: Where,
        call: Call,
        make: Callable[..., tuple[Plan, Any]],
        launch: Callable[..., Tensor],
    ) -> Step | None:
        if not compute.may_be_replayed(make(call.args, call.kwargs)[0]):
            self.refuse(key)
            return None
        return self.capture(key, where, lambda pool: Step(where, pool, call, launch))


STEPS = Steps()
