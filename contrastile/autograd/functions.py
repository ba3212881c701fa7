"""The losses as autograd functions over a plan: for eager calls, and for torch.func's ``grad``, ``vjp``, ``jacrev``.

``Loss`` serves eager calls without an operator's dispatch, which costs the host more than a small batch takes to
compute. Its value is known before it is called; its gradients come from a plan (``PlannedBackward``) or from what a
signature binds (``BoundLoss``). ``FunctionalLoss`` serves transforms, which need every tensor among the arguments and
the results, at twice the cost. Forward mode, gradients of gradients and a map over calls raise an error.
"""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from contrastile import compute
from contrastile.autograd import operators
from contrastile.backends import contract, eager
from contrastile.plan import Plan
from contrastile.schedules import local
from contrastile.schedules.problem import Problem
from contrastile.validation import scalar

_C: Any = torch._C
# absent from a torch that has other names for them: then every call goes through the operators
_KNOWN = eager.transforms_can_be_seen(torch)


@eager.asked_while_tracing
def transformed() -> bool:
    """Whether a transform of torch.func is at work."""
    return _KNOWN and bool(_C._are_functorch_transforms_active())


def tangents(tensors: Iterable[Tensor | None]) -> bool:
    """Whether any of them carries a tangent: forward mode."""
    # no level is open, as a rule
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    unpack: Any = forward_ad.unpack_dual
    return any(x is not None and unpack(x).tangent is not None for x in tensors)


def eager_loss(plan: Plan, *, grad: bool) -> Tensor:
    """The loss of an eager call; ``grad`` says whether a graph is recorded."""
    problem = plan.problem
    # in inference mode autograd saves nothing, also where gradients are on
    given, wanted = asked(problem, grad=grad and not torch.is_inference_mode_enabled())
    value, *state = unrecorded(grad, compute.loss, plan, wanted)
    if wanted is None:
        return cast("Tensor", value)
    # arrays are saved, and not held: autograd tells when one was written to, and frees them
    form, needed = (plan.without_arrays(), problem.arrays()) if compute.is_whole(problem, state) else plan.split()
    return recorded(PlannedBackward(form, wanted), value, (*state, *needed), given)


def asked(problem: Problem, *, grad: bool) -> tuple[Sequence[Any], local.Wanted | None]:
    """What a loss is differentiable in, and which gradients will be asked for; None for none."""
    given = problem.rows, problem.scale, problem.bias, *problem.columns
    rows, scale, bias, *columns = needs = [grad and x is not None and x.requires_grad for x in given]
    wanted = local.Wanted(rows, tuple(columns), scale, bias)
    return given, wanted if any(needs) else None


def unrecorded(grad: bool, compute: Callable[..., Any], *args: Any) -> Any:
    """``compute(*args)`` without recording; ``grad`` says whether autograd records now."""
    try:
        # in here: Ctrl-C may come as soon as it returns
        torch._C._set_grad_enabled(False)
        return compute(*args)
    finally:
        torch._C._set_grad_enabled(grad)


def recorded(backward: Any, value: Any, saved: Sequence[Any], given: Sequence[Any]) -> Tensor:
    """The value as a loss of the tensors that were given; ``backward`` computes their gradients from what is saved."""
    # ``Function.apply`` takes as long again to look for a transform, and there is none
    function: Any = super(torch.autograd.Function, cast("Any", Loss))
    # a tuple: autograd would take a tensor among the arguments for one that the loss depends on
    return cast("Tensor", function.apply(backward, (value,), saved, *given))


def functional_loss(plan: Plan) -> Tensor:
    """The loss under a transform."""
    function: Any = FunctionalLoss
    loss, *_ = function.apply(plan.without_arrays(), *plan.problem.arrays())
    return cast("Tensor", loss)


class Loss(torch.autograd.Function):
    """The loss of an eager call, whose value is known."""

    @staticmethod
    def forward(ctx: Any, backward: Any, value: tuple[Tensor], saved: Sequence[Any], *given: Any) -> Tensor:
        """The loss; ``given`` are the rows, the scale, the bias and the column blocks."""
        ctx.computes = backward
        ctx.save_for_backward(*saved)
        return value[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        arriving = operators.one_upstream(*upstream).resolve_neg()
        saved = ctx.saved_tensors
        return None, None, None, *ctx.computes.gradients(saved, arriving)


@dataclass(frozen=True, slots=True)
class PlannedBackward:
    """Computes gradients, by their plan without arrays, from what a loss has saved: the state, then those arrays."""

    plan: Plan
    wanted: local.Wanted

    def gradients(self, saved: Sequence[Any], upstream: Tensor) -> compute.Found:
        """Those of the rows, the scale, the bias and the column blocks."""
        wanted = self.wanted
        state, arrays = _parted(self.plan, saved)
        plan = self.plan.with_arrays(arrays)
        if not is_seen(upstream):
            return compute.gradients(plan, state, upstream, wanted)
        if compute.is_whole(plan.problem, state):
            # an operator knows the primitives' state alone, and compilers get what lies behind it wrong
            plan = replace(plan, problem=replace(plan.problem, whole=None), form=None)
            state = operators.restored(unrecorded(torch.is_grad_enabled(), operators.called, plan, wanted)[1])
            plan, arrays = plan.split()
        function: Any = LossGradients
        given = function.apply(plan.without_arrays(), wanted, upstream, *state, *arrays)
        return operators.only((wanted.rows, wanted.scale, wanted.bias, *wanted.columns), given)


class BoundLoss:
    """A backend's ``contract.Whole``, bound to a call signature: it is called with arrays and numbers alone.

    Args:
        whole: the backend's.
        plan: of a call of the signature; its features, scale and bias are the arguments of every other.
        again: gives the plan of other arguments.
    """

    def __init__(self, whole: contract.Whole, plan: Plan, again: Callable[[Sequence[Any]], Plan]) -> None:
        problem = plan.problem
        self._whole, self._again, self._bias = whole, again, problem.bias is not None
        self._library, self._state = plan.library, plan.library.dtype(problem.scale)
        _, self._wanted = asked(problem, grad=True)
        # no features are held
        self._problem = replace(problem, rows=None, columns=(None,) * len(problem.columns), scale=None, bias=None)

    def loss(self, given: Sequence[Any], *, grad: bool) -> Tensor | None:
        """The loss of the signature's arguments; None where it is to be computed otherwise.

        Raises:
            ValueError: a number is not finite.
        """
        rows, others, scale, bias, *_ = (*given, None)
        scale, bias = self._number("scale", scale, rows), self._number("bias", bias, rows)
        found = unrecorded(grad, self._whole.loss, self._problem, rows, others, scale, bias)
        if found is None:
            return None
        value, state = found
        if not grad or self._wanted is None:
            return cast("Tensor", value)
        return recorded(self, value, (*state, rows, others, scale, bias), (rows, scale, bias, others))

    def _number(self, name: str, x: Any, like: Tensor) -> Any:
        return x if x is None or isinstance(x, Tensor) else scalar(name, x, self._library, self._state, like)

    def gradients(self, saved: Sequence[Any], upstream: Tensor) -> compute.Found:
        """See ``PlannedBackward.gradients``."""
        *state, rows, others, scale, bias = saved
        assert self._wanted is not None
        if not is_seen(upstream):
            found = self._whole.gradients(self._problem, rows, others, scale, state, upstream, self._wanted)
            if found is not None:
                return found
        plan = self._again((rows, others, scale, bias)[: 3 + self._bias])
        planned = PlannedBackward(plan.without_arrays(), self._wanted)
        # labels have none
        return (*planned.gradients((*state, *plan.problem.arrays()), upstream), None)[:4]


def _parted(plan: Plan, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Splits saved tensors into the state of the loss and the arrays of its plan."""
    first = len(tensors) - len(plan.problem.arrays())
    return tensors[:first], tensors[first:]


def is_seen(upstream: Tensor) -> bool:
    """Whether the gradients must be an autograd function: a derivative of them is asked for, or a mode is on."""
    return torch.is_grad_enabled() or not eager.direct(torch, (upstream,))


class Gradients(torch.autograd.Function):
    """Gradients as an autograd function that refuses to be differentiated: see ``is_seen``."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """Refused."""
        raise operators.second_derivative()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refused."""
        raise operators.second_derivative()

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[Any], *given: Any) -> Any:
        """One upstream gradient after the other: ``jacrev`` asks for all at once."""
        call: Any = cls

        def one(x: Any, dim: Any, i: int) -> Any:
            return x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x

        each = [
            call.apply(*(one(x, dim, i) for x, dim in zip(given, in_dims, strict=True))) for i in range(info.batch_size)
        ]
        return tuple(torch.stack(found) for found in zip(*each, strict=True)), (0,) * len(each[0])


class FunctionalLoss(torch.autograd.Function):
    """The loss of one batch, in reverse mode, under a transform."""

    @staticmethod
    def forward(plan: Plan, *arrays: Any) -> tuple[Tensor, ...]:
        """The loss and what its gradients need, all of them: which transform will ask for which is not known here."""
        whole = plan.with_arrays(arrays)
        if whole.problem.traceable:
            loss, state = operators.called(whole, local.Wanted.every(whole.problem))
            return loss, *state
        found = compute.loss(whole, local.Wanted.every(whole.problem) if plan.problem.kind == "sigmoid" else None)
        given = set(map(id, arrays))
        # the state of a replicated loss has the scale itself, and autograd saves no argument that is a result
        return tuple(x.view_as(x) if id(x) in given else x for x in operators.filled(found, whole.problem.scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """The arrays that the gradients read, and all results but the loss."""
        plan, *arrays = inputs
        whole = plan.with_arrays(arrays)
        ctx.empty, ctx.wanted = plan.problem, local.Wanted.every(whole.problem)
        ctx.plan, needed = whole.split()
        ctx.save_for_backward(*output[1:], *needed)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        _, *flags = ctx.needs_input_grad
        # each array's flag, where the array would stand
        needs, wanted = ctx.empty.with_arrays(flags), ctx.wanted
        if needs.kind != "sigmoid":
            wanted = local.Wanted(needs.rows, needs.columns, needs.scale)
        function: Any = LossGradients
        given = function.apply(ctx.plan, wanted, upstream[0], *ctx.saved_tensors)
        rows, scale, bias, *columns = operators.only((needs.rows, needs.scale, needs.bias, *needs.columns), given)
        return None, *replace(ctx.empty, rows=rows, scale=scale, bias=bias, columns=tuple(columns)).arrays()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refused."""
        raise operators.forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> Any:
        """Refused."""
        raise RuntimeError(
            f"contrastile::loss must be called with one batch at a time, got {info.batch_size} of them under "
            "torch.func.vmap; call the loss in a loop"
        )


class LossGradients(Gradients):
    """The gradients of a loss."""

    @staticmethod
    def forward(plan: Plan, wanted: local.Wanted, upstream: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        """The gradients of the rows, the scale, the bias and the column blocks; ``tensors`` are what was saved."""
        state, arrays = _parted(plan, tensors)
        whole = plan.with_arrays(arrays)
        if whole.problem.traceable:
            return tuple(operators.gradients_called(whole, state, upstream, wanted))
        found = compute.gradients(whole, operators.restored(state), upstream, wanted)
        return tuple(operators.filled(found, whole.problem.scale))
