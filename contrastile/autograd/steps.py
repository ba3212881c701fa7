# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""Whole small steps, replayed from CUDA graphs: launching their kernels takes longer than running them.

A call signature (loss, shapes, dtypes, settings, stream) that repeats is captured in two graphs: from the arguments to
the loss, and from there to the gradients. A later step copies its arguments to the graphs' inputs, replays the graphs,
and copies the results to the caller's memory. It repeats no check: calls of one signature differ only in values on the
GPU. The kernels and their order, and so the bits, are those of a launched step. With a group the graphs also contain
the messages, and either all ranks replay a step or no rank does.
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
from contrastile.autograd.arguments import Call, find_graphs, replay_context
from contrastile.backends.arrays import library_of, transfer
from contrastile.backends.objectives import STATISTICS
from contrastile.backends.replay import Captured, Pool, Signatures, Where, can_capture, record
from contrastile.comm.calls import Label
from contrastile.comm.communicator import Communicator
from contrastile.plan import Plan
from contrastile.schedules import scalars, sums


class Step(Captured):
    """The graphs of one signature: from its tensors to the loss, and from there to the gradients.

    Args:
        where: the device and the stream, and with a group its communicator.
        pool: the graphs' memory.
        tensors: the tensors of a call of the signature.
        wants: which of the tensors need a gradient.
        launch: returns the differentiable loss of such tensors.
        replay: replays a graph; its second argument is a tensor on the device.
    """

    compared: Mapping[str, Any] = {}
    """Every rank's scale and bias, by name, if the ranks compare them: see ``scalars.read``."""

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
        # the number of the loss whose gradients the second graph computes, and of the replay that computed it
        self._latest = self._last_replay = 0
        places = self.places
        for place, want in zip(places, wants, strict=True):
            place.requires_grad_(want)
        leaves = [x for x in places if x.requires_grad]
        self._loss: Any = None
        self._upstream: Any = None

        def forward() -> list[Tensor]:
            # an attribute keeps the loss alive: the second graph reads the state of the first
            self._loss = launch(places)
            if self._upstream is None:
                self._upstream = torch.ones_like(self._loss)
            upstream = self._upstream
            if leaves:
                # a hook, because grad_outputs= imports torch's symbolic shapes, which takes seconds
                self._loss.register_hook(lambda _: upstream)
            return [self._loss.detach()]

        def backward() -> list[Tensor]:
            scalar = self._loss.sum() if self._loss.ndim else self._loss
            return [x.detach() for x in torch.autograd.grad(scalar, leaves, retain_graph=True)]

        graphs, outputs = record(where, [forward, backward] if leaves else [forward], pool)
        self._forward, self._backward, self._place = graphs[0], graphs[-1], pool.add()
        (self._value,), self._gradients = outputs[0], outputs[-1]

    def loss(self, tensors: Sequence[Tensor]) -> tuple[Tensor, int]:
        """The loss of these tensors, and the number of the replay that computed it."""
        with self.pool.lock:
            self._latest = self._replay_forward(tensors)
            return self._value.clone(), self._latest

    def _replay_forward(self, tensors: Sequence[Tensor]) -> int:
        self.copy(tensors)
        self._replay(self._forward, tensors[0])
        self._last_replay = self.pool.replayed(self._place)
        return self._last_replay

    def has(self, number: int) -> bool:
        """Whether the pool still holds the state of the replay of this number."""
        return number == self._latest and self.pool.has(self._place, self._last_replay)

    def gradients(self, number: int, tensors: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        """The gradients of ``upstream * loss``; unwanted gradients are None.

        Args:
            number: the number of the replay that computed the loss.
            tensors: the tensors of that replay.
            upstream: a tensor of the loss's shape.
        """
        with self.pool.lock:
            if not self.has(number):
                # other calls have overwritten the state
                self._replay_forward(tensors)
                self._latest = number
            self._upstream.copy_(upstream)
            self._replay(self._backward, upstream)
            self.pool.replayed(self._place)
            gradients = iter([x.clone() for x in self._gradients])
        return [next(gradients) if want else None for want in self._wants]


@dataclass(frozen=True, slots=True)
class ReplayedBackward:
    """Computes the gradients of a step's loss from the step's tensors, which are saved: see ``Step.gradients``.

    Attributes:
        step: the step.
        number: the number of the replay that computed the loss.
        wants: which gradients are wanted.
        begin: begins the ranks' phase of messages.
        sends: whether the gradients need messages, as the loss always does.
    """

    step: Step
    number: int
    wants: Sequence[bool]
    begin: Callable[[], AbstractContextManager[None]] = nullcontext
    sends: bool = False

    def gradients(self, saved: Sequence[Any], upstream: Tensor) -> compute.Arrays:
        """The gradients of the step, in an autograd function if needed."""
        if not functions.needs_function(upstream):
            return self.replayed(saved, upstream)
        function: Any = ReplayedGradients
        return operators.select(self.wants, function.apply(self, upstream, *saved))

    def replayed(self, saved: Sequence[Any], upstream: Tensor) -> list[Tensor | None]:
        """The gradients of the step, from its graphs."""
        with self.begin() if self.sends or not self.step.has(self.number) else nullcontext():
            return self.step.gradients(self.number, saved, upstream)


class ReplayedGradients(functions.Gradients):
    """The gradients of a step."""

    @staticmethod
    def forward(backward: ReplayedBackward, upstream: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the step, with an empty tensor for None."""
        gradients = backward.replayed(tensors, upstream)
        return tuple(operators.encode_none(gradients, upstream))


class Steps(Signatures[Step]):
    """The steps of this process."""

    def loss(
        self, task: Hashable, call: Call, make: Callable[..., tuple[Plan, Any]], launch: Callable[..., Tensor]
    ) -> Tensor | None:
        """The replayed, differentiable loss of a small call; None if the caller must launch the kernels.

        Args:
            task: everything except the arguments that the result depends on.
            call: a known call of plain eager tensors on a GPU, the features first.
            make: returns the plan, as its first result, of a loss's ``args`` and ``kwargs``.
            launch: returns the loss of such ``args`` and ``kwargs``.
        """
        tensors = call.tensors
        wants = [call.grad and x.requires_grad for x in tensors]
        relaunch = lambda places: launch(*call.with_tensors(places))  # noqa: E731
        make_plan = lambda: make(call.args, call.kwargs)[0]  # noqa: E731
        step = find_graphs(self, task, call, make_plan, lambda where, pool: Step(where, pool, tensors, wants, relaunch))
        return None if step is None else _replayed_loss(step, tensors, wants, grad=call.grad)

    def over_ranks(self, plan: Plan, *, grad: bool) -> Tensor:
        """The differentiable loss of an eager call with a group.

        A rank replays or captures a step only if all ranks do: otherwise another rank would wait for its messages.
        """
        problem, placement = plan.problem, sums.placed(plan.problem)
        comm, rows = placement.communicator, problem.rows
        if not comm.captures or not compute.may_be_replayed(plan):
            return functions.eager_loss(plan, grad=grad)
        _, wanted = functions.inputs_and_wanted(problem, grad=grad)
        arrays = problem.arrays()
        # features, scale and bias each have a gradient; vectors of both directions may be one array
        separate = {0, 1, 2, *range(len(arrays) - len(problem.columns), len(arrays))}
        names = [i if i in separate else id(x) for i, x in enumerate(arrays)]
        distinct = {name: x for name, x in zip(names, arrays, strict=True) if x is not None}
        position = {name: i for i, name in enumerate(distinct)}
        tensors, slots = [*distinct.values()], [position.get(name) for name in names]
        wants = [grad and name in separate and x.requires_grad for name, x in distinct.items()]
        form = problem.kind, problem.match, problem.margin, problem.smoothing, problem.depth, problem.whole, plan.name
        context: tuple[Any, ...] = replay_context(rows.get_device()) if can_capture(rows) else ()
        kinds = [(x.dtype, x.shape) for x in tensors]
        key = form, replace(placement, call=Label()), plan.options, wanted, context, *slots, *kinds
        blank = replace(plan, problem=replace(problem, placement=replace(placement, agreed=True))).without_arrays()

        def launch(places: Sequence[Tensor]) -> Tensor:
            return functions.eager_loss(blank.with_arrays([None if i is None else places[i] for i in slots]), grad=grad)

        step, is_due = self.find(key) if context else (None, False)
        is_due = is_due and self.capturing.acquire(blocking=False)
        try:
            state = _least_state(comm, 2 if step is not None else is_due)
            if state == 1:
                comm.calls.captured = {}
                # leave the call: autograd's thread sends messages too
                comm.calls.leave()
                # graphs of this communicator alone: a step whose state is lost sends again, on all ranks
                where = *context[0], comm
                step = self.capture(key, where, lambda pool: Step(where, pool, tensors, wants, launch, comm.replay))
                state = 2 * _least_state(comm, step is not None)
                if step is not None:
                    captured = comm.calls.captured
                    step.compared = {name: transfer(x, library_of(x), plan.library) for name, x in captured.items()}
                if not state:
                    self.refuse(key)
        finally:
            if is_due:
                self.capturing.release()
        if step is None or state < 2:
            return functions.eager_loss(plan, grad=grad)
        sends = placement.exchange != "replicate" or problem.kind == STATISTICS
        with sums.phase(placement):
            value = _replayed_loss(step, tensors, wants, partial(sums.phase, placement, wanted), sends, grad=grad)
            scalars.read(placement, step.compared)
        return value


def _least_state(communicator: Communicator, state: int) -> int:
    """The smallest of the ranks' states."""
    import numpy as np

    return int(communicator.agree(np.array([state])).min())


def _replayed_loss(step: Step, tensors: Sequence[Tensor], wants: Sequence[bool], *options: Any, grad: bool) -> Tensor:
    """The step's differentiable loss of these tensors; ``options`` are further fields of ``ReplayedBackward``."""
    value, number = functions.without_recording(grad, step.loss, tensors)
    if not any(wants):
        return cast("Tensor", value)
    return functions.record_loss(ReplayedBackward(step, number, wants, *options), value, tensors, tensors)


STEPS = Steps()
