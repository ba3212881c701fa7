"""The losses as autograd functions over a plan: for eager calls, and for torch.func's ``grad``, ``vjp``, ``jacrev``.

``SoftmaxLoss`` and ``SigmoidLoss`` serve eager calls, without an operator's dispatch, which takes the host longer than
a small batch takes to compute. ``FunctionalSoftmaxLoss`` and ``FunctionalSigmoidLoss`` serve transforms, which want
every tensor among the arguments and the results, at twice the cost. What is not defined is refused by name: forward
mode, gradients of gradients, a map over calls.
"""

# pyright: reportIncompatibleMethodOverride=false
# class methods, where torch has static ones: a refusal names its operator
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

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
    problem = plan.problem
    function: Any = SoftmaxLoss if problem.kind == "softmax" else SigmoidLoss
    numbers = (problem.scale,) if problem.kind == "softmax" else (problem.scale, problem.bias)
    return cast("Tensor", function.apply(plan, grad, problem.rows, *numbers, *problem.columns))


def functional_loss(plan: Plan) -> Tensor:
    """The loss under a transform."""
    function: Any = FunctionalSoftmaxLoss if plan.problem.kind == "softmax" else FunctionalSigmoidLoss
    loss, *_ = function.apply(plan.without_arrays(), *plan.problem.arrays())
    return cast("Tensor", loss)


class SoftmaxLoss(torch.autograd.Function):
    """Of an eager call."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, grad: bool, rows: Tensor, scale: Tensor, *columns: Tensor) -> Any:
        """The loss. What the gradients need is saved, and what was kept is freed with the graph."""
        _, _, rows_need, scale_needs, *columns_need = needs = ctx.needs_input_grad
        wanted = local.Wanted(rows_need, tuple(columns_need), scale_needs) if grad and any(needs) else None
        loss, *state = bodies.softmax_loss(plan, wanted=wanted)
        if wanted is not None:
            # arrays are saved, and not held: autograd tells when one was written to, and frees them
            ctx.plan = plan.without_arrays()
            ctx.save_for_backward(*state, *plan.problem.arrays())
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        arriving = operators.one_upstream("softmax_gradients", *upstream).resolve_neg()
        state, arrays = _parted(ctx.plan, ctx.saved_tensors)
        _, _, rows, scale, *columns = ctx.needs_input_grad
        wanted = local.Wanted(rows, tuple(columns), scale)
        if is_seen(arriving):
            function: Any = SoftmaxGradients
            given = function.apply(ctx.plan, wanted, arriving, *state[: bodies.STATE], *arrays)
            return None, None, *operators.only((rows, scale, *columns), given)
        return None, None, *bodies.softmax_gradients(ctx.plan.with_arrays(arrays), state, arriving, wanted)


class SigmoidLoss(torch.autograd.Function):
    """Of an eager call."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, grad: bool, rows: Tensor, scale: Tensor, bias: Tensor, *columns: Tensor) -> Any:
        """The loss. Its gradients' sums come with it, and are saved."""
        _, _, of_rows, of_scale, of_bias, *of_columns = ctx.needs_input_grad
        ctx.wanted = local.Wanted(of_rows, tuple(of_columns), of_scale, of_bias)
        grad = grad and any(ctx.needs_input_grad)
        loss, *sums = bodies.sigmoid_loss(plan, ctx.wanted if grad else None)
        if grad:
            ctx.plan = plan.without_arrays()
            ctx.save_for_backward(rows, scale, *sums)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        (arriving,) = upstream
        arriving, wanted = arriving.resolve_neg(), ctx.wanted
        rows, scale, *sums = ctx.saved_tensors
        if is_seen(arriving):
            function: Any = SigmoidGradients
            given = function.apply(ctx.plan, wanted, arriving, rows, scale, *sums)
            return None, None, *operators.only((wanted.rows, wanted.scale, wanted.bias, *wanted.columns), given)
        return None, None, *bodies.sigmoid_gradients(ctx.plan, rows, scale, sums, arriving, wanted)


def _parted(plan: Plan, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What the loss has left for its gradients, and the plan's arrays, from both in one row."""
    first = len(tensors) - len(plan.problem.arrays())
    return tensors[:first], tensors[first:]


def is_seen(upstream: Tensor) -> bool:
    """Whether somebody must see the gradients' function: a derivative of them is asked for, or a mode is on."""
    return torch.is_grad_enabled() or not eager.direct(torch, (upstream,))


def _softmax_loss(plan: Plan) -> Sequence[Tensor]:
    """All that the operator gives; what is in no graph does without it."""
    problem = plan.problem
    if not problem.traceable:
        return operators.filled(bodies.softmax_loss(plan), problem.scale)
    loss, lses = operators.softmax_loss(
        problem.rows, problem.columns, problem.scale, problem.vectors, *operators.settings_of(plan)
    )
    return loss, *lses


def _softmax_gradients(
    plan: Plan, wanted: local.Wanted, upstream: Tensor, state: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    problem = plan.problem
    if not problem.traceable:
        # of what is gathered an empty tensor stands for None
        gathered = [x if x is not None and x.numel() else None for x in state[bodies.LSES :]]
        found = bodies.softmax_gradients(plan, (*state[: bodies.LSES], *gathered), upstream, wanted)
        return operators.filled(found, problem.scale)
    wants = [wanted.rows, *wanted.columns, wanted.scale]
    rows, columns, scale = operators.softmax_gradients(
        upstream,
        operators.filled(state[: bodies.LSES], problem.scale),
        problem.rows,
        problem.columns,
        problem.scale,
        problem.vectors,
        *operators.settings_of(plan),
        wants,
    )
    return rows, scale, *columns


def _sigmoid_loss(plan: Plan, wanted: local.Wanted) -> Sequence[Tensor]:
    problem = plan.problem
    if not problem.traceable:
        return operators.filled(bodies.sigmoid_loss(plan, wanted), problem.scale)
    wants = [wanted.rows, *wanted.columns, wanted.scale, wanted.bias]
    features = problem.rows, problem.columns, problem.scale, problem.bias
    loss, total, rows, columns = operators.sigmoid_loss(*features, problem.vectors, *operators.settings_of(plan), wants)
    return loss, total, rows, *columns


def _sigmoid_gradients(
    plan: Plan, wanted: local.Wanted, upstream: Tensor, rows: Tensor, scale: Tensor, sums: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    if not plan.problem.traceable:
        return operators.filled(bodies.sigmoid_gradients(plan, rows, scale, sums, upstream, wanted), scale)
    total, row_sum, *column_sums = operators.filled(sums, scale)
    wants = [wanted.rows, *wanted.columns, wanted.scale, wanted.bias]
    d_rows, d_columns, *numbers = operators.sigmoid_gradients(
        upstream, total, row_sum, column_sums, rows, scale, *operators.settings_of(plan), wants
    )
    return d_rows, *numbers, *d_columns


class _Loss(torch.autograd.Function):
    """Of one batch, in reverse mode."""

    operator: ClassVar[str]

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> Any:
        """Refused."""
        raise operators.forward_mode(cls.operator)

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, *given: Any) -> Any:
        """Refused."""
        raise RuntimeError(
            f"contrastile::{cls.operator} must be called with one batch at a time, got {info.batch_size} of them under "
            "torch.func.vmap; call the loss in a loop"
        )


class Gradients(torch.autograd.Function):
    """Gradients, which have none themselves."""

    operator: ClassVar[str]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @classmethod
    def backward(cls, ctx: Any, *upstream: Any) -> Any:
        """Refused."""
        raise operators.second_derivative(cls.operator)

    @classmethod
    def jvp(cls, ctx: Any, *tangents: Any) -> Any:
        """Refused."""
        raise operators.second_derivative(cls.operator)

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


class FunctionalSoftmaxLoss(_Loss):
    """The softmax loss under a transform."""

    operator = "softmax_loss"

    @staticmethod
    def forward(plan: Plan, *arrays: Any) -> tuple[Tensor, ...]:
        """The loss and what its gradients need; ``arrays`` as ``Problem.arrays`` has them."""
        return tuple(_softmax_loss(plan.with_arrays(arrays)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """The arrays as they came, and all results but the loss."""
        ctx.plan, *arrays = inputs
        ctx.save_for_backward(*output[1:], *arrays)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        _, *flags = ctx.needs_input_grad
        # each array's flag, where the array would stand
        needs, function = ctx.plan.problem.with_arrays(flags), cast("Any", SoftmaxGradients)
        wanted = local.Wanted(needs.rows, needs.columns, needs.scale)
        given = function.apply(ctx.plan, wanted, upstream[0], *ctx.saved_tensors)
        d_rows, d_scale, *d_columns = operators.only((wanted.rows, wanted.scale, *wanted.columns), given)
        found = replace(ctx.plan.problem, rows=d_rows, scale=d_scale, columns=tuple(d_columns))
        return None, *found.arrays()


class SoftmaxGradients(Gradients):
    """The gradients of the softmax loss, where a transform or a mode sees them or a derivative is asked for."""

    operator = "softmax_gradients"

    @staticmethod
    def forward(plan: Plan, wanted: local.Wanted, upstream: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        """The gradients of the rows, the scale and the column blocks; ``tensors`` are what was saved."""
        state, arrays = _parted(plan, tensors)
        return tuple(_softmax_gradients(plan.with_arrays(arrays), wanted, upstream, state))


class FunctionalSigmoidLoss(_Loss):
    """The sigmoid loss under a transform."""

    operator = "sigmoid_loss"

    @staticmethod
    def forward(plan: Plan, *arrays: Any) -> tuple[Tensor, ...]:
        """The loss and what its gradients need, all of them: which transform will ask for which is not known here."""
        wanted = local.Wanted(True, (True,) * len(plan.problem.columns), True, True)
        return tuple(_sigmoid_loss(plan.with_arrays(arrays), wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """The rows and the scale, and all results but the loss."""
        ctx.plan, rows, scale, *_ = inputs
        ctx.save_for_backward(rows, scale, *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        rows, scale, *sums = ctx.saved_tensors
        wanted = local.Wanted(True, (True,) * len(ctx.plan.problem.columns), True, True)
        function: Any = SigmoidGradients
        d_rows, d_scale, d_bias, *d_columns = function.apply(ctx.plan, wanted, upstream[0], rows, scale, *sums)
        found = replace(ctx.plan.problem, rows=d_rows, scale=d_scale, bias=d_bias, columns=tuple(d_columns))
        return None, *found.arrays()


class SigmoidGradients(Gradients):
    """The gradients of the sigmoid loss, where a transform or a mode sees them or a derivative is asked for."""

    operator = "sigmoid_gradients"

    @staticmethod
    def forward(
        plan: Plan, wanted: local.Wanted, upstream: Tensor, rows: Tensor, scale: Tensor, *sums: Any
    ) -> tuple[Tensor, ...]:
        """The gradients of the rows, the scale, the bias and the column blocks."""
        return tuple(_sigmoid_gradients(plan, wanted, upstream, rows, scale, sums))
