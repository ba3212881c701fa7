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
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from contrastile import compute
from contrastile.autograd import functions, operators
from contrastile.backends.replay import (
    FEATURES,
    Captured,
    Copies,
    Signatures,
    Where,
    can_capture,
    may_be_captured,
    record,
)
from contrastile.backends.settings import VARIABLES
from contrastile.plan import Plan
from contrastile.schedules import local, replicate, sums
from contrastile.schedules.problem import VECTORS

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
    """The graphs of one signature: from its tensors to the loss, and on to the gradients.

    Args:
        where: the device and the stream.
        pool: see ``record``.
        tensors: of a call of the signature.
        wants: which of them need a gradient.
        launch: gives the loss of such tensors, differentiable.
        part: makes what a call is given of the gradients of all tensors; None for those that are not wanted.
    """

    def __init__(
        self,
        where: Where,
        pool: Any,
        tensors: Sequence[Tensor],
        wants: Sequence[bool],
        launch: Callable[[Sequence[Tensor]], Tensor],
        part: Callable[[Sequence[Any]], Sequence[Any]] = list,
    ) -> None:
        super().__init__(where)
        self._latest = 0
        # backward passes take it in autograd's thread: never wait for one while holding it
        self._lock = threading.Lock()
        places = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]
        self._copies = Copies(places)
        self._copies([x.detach() for x in tensors])
        for place, want in zip(places, wants, strict=True):
            place.requires_grad_(want)
        wanted = [x for x in places if x.requires_grad]
        self._loss: Any = None
        self._upstream: Any = None
        self.gives: list[bool] = []

        def forward() -> list[Tensor]:
            # kept alive: the second graph reads what the first one leaves
            self._loss = launch(places)
            if self._upstream is None:
                self._upstream = torch.ones_like(self._loss)
            upstream = self._upstream
            if wanted:
                # grad_outputs would do it, and imports torch's symbolic shapes: seconds of a process's third step
                self._loss.register_hook(lambda _: upstream)
            return [self._loss.detach()]

        def backward() -> list[Tensor]:
            found = iter(torch.autograd.grad(self._loss, wanted, retain_graph=True))
            given = part([next(found).detach() if want else None for want in wants])
            self.gives = [x is not None for x in given]
            return [x for x in given if x is not None]

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

    def gradients(
        self, number: int, tensors: Sequence[Tensor], upstream: Tensor, factor: float = 1.0
    ) -> list[Tensor | None]:
        """What ``part`` makes of the gradients of ``factor * upstream * loss``.

        Args:
            number: of the replay that gave the loss.
            tensors: what it was given.
            upstream: 0-d.
            factor: see ``Placement.factor``.
        """
        with self._lock:
            if number != self._latest:
                # another call of this signature came in between
                self._replayed(tensors)
                self._latest = number
            torch.mul(upstream, factor, out=self._upstream)
            self._backward.replay()
            found = iter(self._out.copied())
        return [next(found) if give else None for give in self.gives]


@dataclass(frozen=True, slots=True)
class ReplayedBackward:
    """Computes the gradients of a loss that a step gave, see ``Step.gradients``; the step's tensors are saved."""

    step: Step
    number: int
    factor: float = 1.0

    def gradients(self, saved: Sequence[Any], upstream: Tensor) -> compute.Found:
        """What the step gives."""
        if not functions.is_seen(upstream):
            return self.step.gradients(self.number, saved, upstream, self.factor)
        function: Any = ReplayedGradients
        return operators.only(self.step.gives, function.apply(self, upstream, *saved))


class ReplayedGradients(functions.Gradients):
    """The gradients of a step."""

    @staticmethod
    def forward(backward: ReplayedBackward, upstream: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What the step gives, an empty tensor for None."""
        found = backward.step.gradients(backward.number, tensors, upstream, backward.factor)
        return tuple(operators.filled(found, upstream))


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
        wants = [call.grad and x.requires_grad for x in tensors]

        def small() -> bool:
            return compute.may_be_replayed(make(call.args, call.kwargs)[0])

        step = self._step(key, where, tensors, wants, small, lambda places: launch(*call.with_tensors(places)))
        if step is None:
            return None
        value, number = functions.unrecorded(call.grad, step.loss, tensors)
        return functions.recorded(ReplayedBackward(step, number), value, tensors, tensors) if any(wants) else value

    def replicated(self, plan: Plan, *, grad: bool) -> Tensor:
        """The loss of an eager call of which every rank computes the whole, differentiable."""
        problem, library = plan.problem, plan.library
        placement, (given, wanted) = sums.placed(problem), functions.asked(problem, grad=grad)
        whole = functions.unrecorded(grad, replicate.replicated, problem, library)
        alone = replace(plan, problem=whole)
        if not can_capture(whole.rows) or not compute.may_be_replayed(alone):
            return functions.eager_loss(plan, grad=grad, whole=whole)
        flags = local.Wanted(False, (False,) * len(whole.columns), False, False)
        told = flags if wanted is None else replicate.wanted_of_whole(wanted)
        needs = told.rows, told.scale, told.bias, *[False] * len(VECTORS), *told.columns
        # weights may be one array for both directions
        each = {id(x): (x, need) for x, need in zip(whole.arrays(), needs, strict=True) if x is not None}
        tensors, wants = zip(*each.values(), strict=True)
        places_of = {key: i for i, key in enumerate(each)}
        at = [None if x is None else places_of[id(x)] for x in whole.arrays()]

        def launch(places: Sequence[Tensor]) -> Tensor:
            mine = whole.with_arrays([None if i is None else places[i] for i in at])
            return functions.eager_loss(replace(alone, problem=replicate.completed(problem, mine, library)), grad=grad)

        def part(found: Sequence[Any]) -> Sequence[Any]:
            mine = [None if i is None else found[i] for i in (*at[:3], *at[3 + len(VECTORS) :])]
            return replicate.own_part(problem, local.Gradients.of(mine), wanted or flags, library).listed()

        kinds = [(x.dtype, x.shape, need) for x, need in each.values()]
        where = whole.rows.get_device(), torch._C._cuda_getCurrentRawStream(whole.rows.get_device())
        form = problem.kind, problem.match, problem.margin, problem.smoothing, problem.whole, plan.name, plan.options
        key = form, placement.shards, placement.rank, wanted, *where, *map(os.environ.get, VARIABLES), *at, *kinds
        step = self._step(key, where, tensors, wants, lambda: True, launch, part)
        if step is None:
            return functions.eager_loss(plan, grad=grad, whole=whole)
        value, number = functions.unrecorded(grad, step.loss, tensors)
        if wanted is None:
            return cast("Tensor", value)
        return functions.recorded(ReplayedBackward(step, number, placement.factor), value, tensors, given)

    def _step(
        self,
        key: Hashable,
        where: Where,
        tensors: Sequence[Tensor],
        wants: Sequence[bool],
        small: Callable[[], bool],
        *how: Any,
    ) -> Step | None:
        """The step of a signature; None while it is launched. ``how``: see ``Step``."""
        step, due = self.find(key)
        if due and self._capturing.acquire(blocking=False):
            try:
                if small():
                    return self.capture(key, where, lambda pool: Step(where, pool, tensors, wants, *how))
                self.refuse(key)
            finally:
                self._capturing.release()
        return step


STEPS = Steps()
