"""The losses as autograd functions over a plan: for eager calls, and for torch.func's ``grad``, ``vjp``, ``jacrev``.

``Loss`` serves eager calls, without an operator's dispatch, which takes the host longer than a small batch takes to
compute. ``FunctionalLoss`` serves transforms, which want every tensor among the arguments and the results, at twice the
cost. What is not defined is refused by name: forward mode, gradients of gradients, a map over calls.
"""

# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from contrastile.autograd import bodies, operators
from contrastile.backends import eager
from contrastile.plan import Plan
from contrastile.schedules import local

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
    """The loss of an eager call; ``grad`` says whether a graph is recorded, which a function's forward cannot see."""
    function, problem = cast("Any", Loss), plan.problem
    return cast("Tensor", function.apply(plan, grad, problem.rows, problem.scale, problem.bias, *problem.columns))


def functional_loss(plan: Plan) -> Tensor:
    """The loss under a transform."""
    function: Any = FunctionalLoss
    loss, *_ = function.apply(plan.without_arrays(), *plan.problem.arrays())
    return cast("Tensor", loss)


class Loss(torch.autograd.Function):
    """Of an eager call."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, grad: bool, *given: Tensor) -> Any:
        """The loss; ``given`` are the rows, the scale, the bias and the column blocks."""
        _, _, rows, scale, bias, *columns = needs = ctx.needs_input_grad
        ctx.wanted = local.Wanted(rows, tuple(columns), scale, bias)
        grad = grad and any(needs)
        value, *state = bodies.loss(plan, ctx.wanted if grad else None)
        if grad:
            # arrays are saved, and not held: autograd tells when one was written to, and frees them
            needed = replace(plan, problem=plan.problem.for_gradients())
            ctx.plan = needed.without_arrays()
            ctx.save_for_backward(*state, *needed.problem.arrays())
        return value

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        arriving, wanted = operators.one_upstream(*upstream).resolve_neg(), ctx.wanted
        saved = ctx.saved_tensors
        if is_seen(arriving):
            function: Any = LossGradients
            given = function.apply(ctx.plan, wanted, arriving, *saved)
            flags = wanted.rows, wanted.scale, wanted.bias, *wanted.columns
            return None, None, *operators.only(flags, given)
        state, arrays = _parted(ctx.plan, saved)
        return None, None, *bodies.gradients(ctx.plan.with_arrays(arrays), state, arriving, wanted)


def _parted(plan: Plan, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What the loss has left for its gradients, and the plan's arrays, from both in one row."""
    first = len(tensors) - len(plan.problem.arrays())
    return tensors[:first], tensors[first:]


def is_seen(upstream: Tensor) -> bool:
    """Whether somebody must see the gradients' function: a derivative of them is asked for, or a mode is on."""
    return torch.is_grad_enabled() or not eager.direct(torch, (upstream,))


class Gradients(torch.autograd.Function):
    """Gradients, which have none themselves, where a transform or a mode sees them or a derivative is asked for."""

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
            loss, state = operators.called(whole, operators.every(whole.problem))
            return loss, *state
        found = bodies.loss(whole, _all_wanted(whole) if plan.problem.kind == "sigmoid" else None)
        return tuple(operators.filled(found, whole.problem.scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """The arrays that the gradients read, and all results but the loss."""
        plan, *arrays = inputs
        whole = plan.with_arrays(arrays)
        needed = replace(whole, problem=whole.problem.for_gradients())
        ctx.plan, ctx.wanted = needed.without_arrays(), _all_wanted(whole)
        ctx.empty = plan.problem
        ctx.save_for_backward(*output[1:], *needed.problem.arrays())
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


def _all_wanted(plan: Plan) -> local.Wanted:
    return local.Wanted(True, (True,) * len(plan.problem.columns), True, plan.problem.kind == "sigmoid")


class LossGradients(Gradients):
    """The gradients of a loss."""

    @staticmethod
    def forward(plan: Plan, wanted: local.Wanted, upstream: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        """The gradients of the rows, the scale, the bias and the column blocks; ``tensors`` are what was saved."""
        state, arrays = _parted(plan, tensors)
        whole = plan.with_arrays(arrays)
        if whole.problem.traceable:
            return tuple(operators.gradients_called(whole, state, upstream, wanted))
        found = bodies.gradients(whole, operators.restored(state), upstream, wanted)
        return tuple(operators.filled(found, whole.problem.scale))
