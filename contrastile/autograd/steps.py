# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""Whole small steps, replayed from CUDA graphs: launching their kernels takes longer than running them.

A call signature (loss, shapes, dtypes, settings, stream) that repeats is captured in two graphs: from the arguments to
the loss, and on to their gradients. From then on a step copies its arguments to where the graphs read them, replays,
and copies the results to memory of the caller's. Nothing is validated again: calls of one signature differ only in
values on the GPU. The kernels and their order, and so the bits, are those of a launched step. Over ranks the graphs
hold the messages too, and all ranks replay a step, or none does.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from contrastile import compute
from contrastile.autograd import functions, operators
from contrastile.autograd.arguments import Call, graphs_of, surroundings
from contrastile.backends.arrays import library_of, transfer
from contrastile.backends.objectives import STATISTICS
from contrastile.backends.replay import Captured, Pool, Signatures, Where, can_capture, record
from contrastile.comm.calls import Label
from contrastile.comm.communicator import Communicator
from contrastile.plan import Plan
from contrastile.schedules import scalars, sums


class Step(Captured):
    """The graphs of one signature: from its tensors to the loss, and on to the gradients.

    Args:
        where: the device and the stream, and over ranks their communicator.
        pool: the graphs' memory.
        tensors: of a call of the signature.
        wants: which of them need a gradient.
        launch: gives the loss of such tensors, differentiable.
        replay: replays a graph; it is given a tensor of the device too.
    """

    compared: Mapping[str, Any] = {}
    """Every rank's scale and bias, by name, where the ranks compare them: see ``scalars.read``."""

    def __init__(
        self,
        where: Where,
        pool: Pool,
        tensors: Sequence[Tensor],
        wants: Sequence[bool],
        launch: Callable[[Sequence[Tensor]], Tensor],
        replay: Callable[[Any, Tensor], None] = lambda graph, _: graph.replay(),
    ) -> None:
        super().__init__(where, pool, tensors)
        self._replay, self._wants = replay, wants
        # the loss whose gradients the second graph gives, and the replay that computed it
        self._latest = self._left = 0
        places = self.places
        for place, want in zip(places, wants, strict=True):
            place.requires_grad_(want)
        wanted = [x for x in places if x.requires_grad]
        self._loss: Any = None
        self._upstream: Any = None

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
            number = self._loss.sum() if self._loss.ndim else self._loss
            return [x.detach() for x in torch.autograd.grad(number, wanted, retain_graph=True)]

        graphs, found = record(where, [forward, backward] if wanted else [forward], pool)
        self._forward, self._backward, self._place = graphs[0], graphs[-1], pool.add()
        (self._value,), self._out = found[0], found[-1]

    def loss(self, tensors: Sequence[Tensor]) -> tuple[Tensor, int]:
        """The loss of these tensors, and the number of the replay that gave it."""
        with self.pool.lock:
            self._latest = self._replayed(tensors)
            return self._value.clone(), self._latest

    def _replayed(self, tensors: Sequence[Tensor]) -> int:
        self.copy(tensors)
        self._replay(self._forward, tensors[0])
        self.replays += 1
        self._left = self.pool.replayed(self._place)
        return self._left

    def has(self, number: int) -> bool:
        """Whether what the replay of this number has left is there still."""
        return number == self._latest and self.pool.has(self._place, self._left)

    def gradients(self, number: int, tensors: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """The gradients of ``upstream * loss``; None for those that are not wanted.

        Args:
            number: of the replay that gave the loss.
            tensors: what it was given.
            upstream: of the loss's shape.
        """
        with self.pool.lock:
            if not self.has(number):
                # other calls came in between
                self._replayed(tensors)
                self._latest = number
            self._upstream.copy_(upstream)
            self._replay(self._backward, upstream)
            self.pool.replayed(self._place)
            found = iter([x.clone() for x in self._out])
        return [next(found) if want else None for want in self._wants]


@dataclass(frozen=True, slots=True)
class ReplayedBackward:
    """Computes the gradients of a loss that a step gave, see ``Step.gradients``; the step's tensors are saved.

    Attributes:
        step: the step.
        number: of its replay.
        wants: which gradients are wanted.
        begin: begins the phase of the ranks.
        sends: whether the gradients need messages; the loss does.
    """

    step: Step
    number: int
    wants: Sequence[bool]
    begin: Callable[[], AbstractContextManager[None]] = nullcontext
    sends: bool = False

    def gradients(self, saved: Sequence[Any], upstream: Tensor) -> compute.Found:
        """What the step gives."""
        if not functions.is_seen(upstream):
            return self.replayed(saved, upstream)
        function: Any = ReplayedGradients
        return operators.only(self.wants, function.apply(self, upstream, *saved))

    def replayed(self, saved: Sequence[Any], upstream: Tensor) -> list[Tensor | None]:
        """What the step gives, from its graphs."""
        with self.begin() if self.sends or not self.step.has(self.number) else nullcontext():
            return self.step.gradients(self.number, saved, upstream)


class ReplayedGradients(functions.Gradients):
    """The gradients of a step."""

    @staticmethod
    def forward(backward: ReplayedBackward, upstream: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What the step gives, an empty tensor for None."""
        found = backward.replayed(tensors, upstream)
        return tuple(operators.filled(found, upstream))


class Steps(Signatures[Step]):
    """The steps of this process."""

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
        tensors = call.tensors
        wants = [call.grad and x.requires_grad for x in tensors]
        again = lambda places: launch(*call.with_tensors(places))  # noqa: E731
        plan = lambda: make(call.args, call.kwargs)[0]  # noqa: E731
        step = graphs_of(self, what, call, plan, lambda where, pool: Step(where, pool, tensors, wants, again))
        return None if step is None else _replayed(step, tensors, wants, grad=call.grad)

    def over_ranks(self, plan: Plan, *, grad: bool) -> Tensor:
        """The loss of an eager call over ranks, differentiable.

        A rank replays or captures a step only where all ranks do: another one would wait for its messages.
        """
        problem, placement = plan.problem, sums.placed(plan.problem)
        ranks, rows = placement.communicator, problem.rows
        if not ranks.captures or not compute.may_be_replayed(plan):
            return functions.eager_loss(plan, grad=grad)
        _, wanted = functions.asked(problem, grad=grad)
        arrays = problem.arrays()
        # features, scale and bias have gradients of their own; vectors may be one array for both directions
        own = {0, 1, 2, *range(len(arrays) - len(problem.columns), len(arrays))}
        names = [i if i in own else id(x) for i, x in enumerate(arrays)]
        each = {name: x for name, x in zip(names, arrays, strict=True) if x is not None}
        place = {name: i for i, name in enumerate(each)}
        tensors, at = [*each.values()], [place.get(name) for name in names]
        wants = [grad and name in own and x.requires_grad for name, x in each.items()]
        form = problem.kind, problem.match, problem.margin, problem.smoothing, problem.whole, plan.name, plan.options
        around: tuple[Any, ...] = surroundings(rows.get_device()) if can_capture(rows) else ()
        key = form, replace(placement, call=Label()), wanted, around, *at, *[(x.dtype, x.shape) for x in tensors]
        empty = replace(plan, problem=replace(problem, placement=replace(placement, agreed=True))).without_arrays()

        def launch(places: Sequence[Tensor]) -> Tensor:
            return functions.eager_loss(empty.with_arrays([None if i is None else places[i] for i in at]), grad=grad)

        step, due = self.find(key) if around else (None, False)
        due = due and self.capturing.acquire(blocking=False)
        try:
            least = _agreed(ranks, 2 if step is not None else due)
            if least == 1:
                ranks.calls.captured = {}
                # autograd's thread sends messages, too
                ranks.calls.leave()
                # of their own: where a step's gradients are gone it sends again, and all ranks must
                where = *around[0], ranks
                step = self.capture(key, where, lambda pool: Step(where, pool, tensors, wants, launch, ranks.replay))
                least = 2 * _agreed(ranks, step is not None)
                if step is not None:
                    held = ranks.calls.captured
                    step.compared = {name: transfer(x, library_of(x), plan.library) for name, x in held.items()}
                if not least:
                    self.refuse(key)
        finally:
            if due:
                self.capturing.release()
        if step is None or least < 2:
            return functions.eager_loss(plan, grad=grad)
        sends = placement.exchange != "replicate" or problem.kind == STATISTICS
        with sums.phase(placement):
            value = _replayed(step, tensors, wants, partial(sums.phase, placement, wanted), sends, grad=grad)
            scalars.read(placement, step.compared)
        return value


def _agreed(ranks: Communicator, state: int) -> int:
    """The least of the ranks' numbers."""
    import numpy as np

    return int(ranks.agree(np.array([state])).min())


def _replayed(step: Step, tensors: Sequence[Tensor], wants: Sequence[bool], *begin: Any, grad: bool) -> Tensor:
    """The loss that a step gives of these tensors, differentiable; ``begin``: see ``ReplayedBackward``."""
    value, number = functions.unrecorded(grad, step.loss, tensors)
    if not any(wants):
        return cast("Tensor", value)
    return functions.recorded(ReplayedBackward(step, number, wants, *begin), value, tensors, tensors)


STEPS = Steps()
