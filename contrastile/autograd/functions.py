"""The losses as autograd functions over a plan: for eager calls, and for torch.func's ``grad``, ``vjp``, ``jacrev``.

``Loss`` serves eager calls without an operator's dispatch, which takes the host longer than computing a small batch.
The loss is computed before the function is applied; its gradients come from a plan (``PlannedBackward``) or from a
bound signature (``BoundLoss``). ``FunctionalLoss`` serves transforms, which need every tensor among the arguments and
the results, at twice the cost. Forward mode, gradients of gradients and ``vmap`` raise an error.
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
# False for a torch whose private names differ: then every call uses the operators
_SEES_TRANSFORMS = eager.transforms_can_be_seen(torch)


@eager.asked_while_tracing
def is_transformed() -> bool:
    """Whether a transform of torch.func is active."""
    return _SEES_TRANSFORMS and bool(_C._are_functorch_transforms_active())


def has_tangent(tensors: Iterable[Tensor | None]) -> bool:
    """Whether any of the tensors has a tangent, as in forward mode."""
    # the usual case: no level of forward mode is open
    if getattr(forward_ad, "_current_level", 0) < 0:
        return False
    unpack: Any = forward_ad.unpack_dual
    return any(x is not None and unpack(x).tangent is not None for x in tensors)


def eager_loss(plan: Plan, *, grad: bool) -> Tensor:
    """The loss of an eager call; ``grad`` says whether autograd records."""
    problem = plan.problem
    # in inference mode autograd saves nothing, even if gradients are on
    inputs, wanted = inputs_and_wanted(problem, grad=grad and not torch.is_inference_mode_enabled())
    value, *state = without_recording(grad, compute.loss, plan, wanted)
    if wanted is None:
        return cast("Tensor", value)
    # save the arrays in autograd, which detects writes to them and frees them
    form, arrays = (plan.without_arrays(), problem.arrays()) if compute.is_whole(problem, state) else plan.split()
    return record_loss(PlannedBackward(form, wanted), value, (*state, *arrays), inputs)


def inputs_and_wanted(problem: Problem, *, grad: bool) -> tuple[Sequence[Any], local.Wanted | None]:
    """The tensors that a loss is differentiable in, and the wanted gradients; None if no gradient is wanted."""
    inputs = problem.rows, problem.scale, problem.bias, *problem.columns
    rows, scale, bias, *columns = needs = [grad and x is not None and x.requires_grad for x in inputs]
    wanted = local.Wanted(rows, tuple(columns), scale, bias)
    return inputs, wanted if any(needs) else None


def without_recording(grad: bool, compute: Callable[..., Any], *args: Any) -> Any:
    """``compute(*args)`` without recording; ``grad`` is the mode of autograd to restore."""
    try:
        # inside of ``try``: Ctrl-C may interrupt right after this call
        torch._C._set_grad_enabled(False)
        return compute(*args)
    finally:
        torch._C._set_grad_enabled(grad)


def record_loss(backward: Any, value: Any, saved: Sequence[Any], inputs: Sequence[Any]) -> Tensor:
    """The value as a differentiable loss of ``inputs``; ``backward`` computes their gradients from ``saved``."""
    # skip ``Function.apply``, which doubles the time by looking for a transform: there is none
    function: Any = super(torch.autograd.Function, cast("Any", Loss))
    # wrap the value in a tuple: autograd would treat a plain tensor as an input of the loss
    return cast("Tensor", function.apply(backward, (value,), saved, *inputs))


def functional_loss(plan: Plan) -> Tensor:
    """The loss under a transform."""
    function: Any = FunctionalLoss
    loss, *_ = function.apply(plan.without_arrays(), *plan.problem.arrays())
    return cast("Tensor", loss)


class Loss(torch.autograd.Function):
    """The loss of an eager call, whose value is already computed."""

    @staticmethod
    def forward(ctx: Any, backward: Any, value: tuple[Tensor], saved: Sequence[Any], *inputs: Any) -> Tensor:
        """The loss; ``inputs`` are the rows, the scale, the bias and the column blocks."""
        ctx.gradient_source = backward
        ctx.save_for_backward(*saved)
        return value[0]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        gradient = operators.one_upstream(*upstream).resolve_neg()
        saved = ctx.saved_tensors
        return None, None, None, *ctx.gradient_source.gradients(saved, gradient)


@dataclass(frozen=True, slots=True)
class PlannedBackward:
    """Computes gradients by their plan without arrays from the saved tensors: the state, then the plan's arrays."""

    plan: Plan
    wanted: local.Wanted

    def gradients(self, saved: Sequence[Any], upstream: Tensor) -> compute.Arrays:
        """The gradients of the rows, the scale, the bias and the column blocks."""
        wanted = self.wanted
        state, arrays = _split_saved(self.plan, saved)
        plan = self.plan.with_arrays(arrays)
        if not needs_function(upstream):
            return compute.gradients(plan, state, upstream, wanted)
        if compute.is_whole(plan.problem, state):
            # operators take only the state of the primitives, so compute that state first
            plan = replace(plan, problem=replace(plan.problem, whole=None), form=None)
            state = operators.decode_none(without_recording(torch.is_grad_enabled(), operators.called, plan, wanted)[1])
            plan, arrays = plan.split()
        function: Any = LossGradients
        results = function.apply(plan.without_arrays(), wanted, upstream, *state, *arrays)
        return operators.select((wanted.rows, wanted.scale, wanted.bias, *wanted.columns), results)


class BoundLoss:
    """A backend's ``contract.Whole``, bound to a call signature: calls pass arrays and numbers alone.

    Args:
        whole: the backend's ``Whole``.
        plan: the plan of a call of the signature; other calls differ in the features, the scale and the bias.
        make_plan: returns the plan of other arguments.
    """

    def __init__(self, whole: contract.Whole, plan: Plan, make_plan: Callable[[Sequence[Any]], Plan]) -> None:
        problem = plan.problem
        self._whole, self._make_plan, self._bias = whole, make_plan, problem.bias is not None
        self._library, self._state = plan.library, plan.library.dtype(problem.scale)
        _, self._wanted = inputs_and_wanted(problem, grad=True)
        # hold no features
        self._problem = replace(problem, rows=None, columns=(None,) * len(problem.columns), scale=None, bias=None)

    def loss(self, args: Sequence[Any], *, grad: bool) -> Tensor | None:
        """The loss of these arguments; None if the backend's ``Whole`` does not compute it.

        Raises:
            ValueError: a number is not finite.
        """
        rows, others, scale, bias, *_ = (*args, None)
        scale, bias = self._as_tensor("scale", scale, rows), self._as_tensor("bias", bias, rows)
        result = without_recording(grad, self._whole.loss, self._problem, rows, others, scale, bias)
        if result is None:
            return None
        value, state = result
        if not grad or self._wanted is None:
            return cast("Tensor", value)
        return record_loss(self, value, (*state, rows, others, scale, bias), (rows, scale, bias, others))

    def _as_tensor(self, name: str, x: Any, like: Tensor) -> Any:
        return x if x is None or isinstance(x, Tensor) else scalar(name, x, self._library, self._state, like)

    def gradients(self, saved: Sequence[Any], upstream: Tensor) -> compute.Arrays:
        """See ``PlannedBackward.gradients``."""
        *state, rows, others, scale, bias = saved
        assert self._wanted is not None
        if not needs_function(upstream):
            results = self._whole.gradients(self._problem, rows, others, scale, state, upstream, self._wanted)
            if results is not None:
                return results
        plan = self._make_plan((rows, others, scale, bias)[: 3 + self._bias])
        planned = PlannedBackward(plan.without_arrays(), self._wanted)
        # labels have no gradient
        return (*planned.gradients((*state, *plan.problem.arrays()), upstream), None)[:4]


def _split_saved(plan: Plan, tensors: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Splits saved tensors into the state of the loss and the arrays of its plan."""
    first = len(tensors) - len(plan.problem.arrays())
    return tensors[:first], tensors[first:]


def needs_function(upstream: Tensor) -> bool:
    """Whether to compute gradients in an autograd function: for a derivative of them, or a mode or transform."""
    return torch.is_grad_enabled() or not eager.direct(torch, (upstream,))


class Gradients(torch.autograd.Function):
    """Gradients as an autograd function that cannot be differentiated: see ``needs_function``."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        """Raise RuntimeError."""
        raise operators.second_derivative()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise RuntimeError."""
        raise operators.second_derivative()

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        """One upstream gradient after the other: ``jacrev`` asks for all at once."""
        call: Any = cls

        def pick(x: Any, dim: Any, i: int) -> Any:
            return x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x

        results = [
            call.apply(*(pick(x, dim, i) for x, dim in zip(args, in_dims, strict=True))) for i in range(info.batch_size)
        ]
        return tuple(torch.stack(gradients) for gradients in zip(*results, strict=True)), (0,) * len(results[0])


class FunctionalLoss(torch.autograd.Function):
    """The loss of one batch, in reverse mode, under a transform."""

    @staticmethod
    def forward(plan: Plan, *arrays: Any) -> tuple[Tensor, ...]:
        """The loss, and the state for all gradients: which gradients a transform will want is not known here."""
        filled = plan.with_arrays(arrays)
        if filled.problem.traceable:
            loss, state = operators.called(filled, local.Wanted.every(filled.problem))
            return loss, *state
        results = compute.loss(filled, local.Wanted.every(filled.problem) if plan.problem.keeps_sums else None)
        ids = set(map(id, arrays))
        # a replicated loss returns the scale in its state, and autograd saves no result that is an argument
        return tuple(x.view_as(x) if id(x) in ids else x for x in operators.encode_none(results, filled.problem.scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save the arrays that the gradients read, and all results except the loss."""
        plan, *arrays = inputs
        filled = plan.with_arrays(arrays)
        ctx.problem, ctx.wanted = plan.problem, local.Wanted.every(filled.problem)
        ctx.plan, saved = filled.split()
        ctx.save_for_backward(*output[1:], *saved)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        """The gradients, in the order of forward's arguments."""
        _, *flags = ctx.needs_input_grad
        # the problem with a flag instead of each array
        needs, wanted = ctx.problem.with_arrays(flags), ctx.wanted
        if not needs.keeps_sums:
            wanted = local.Wanted(needs.rows, needs.columns, needs.scale)
        function: Any = LossGradients
        results = function.apply(ctx.plan, wanted, upstream[0], *ctx.saved_tensors)
        rows, scale, bias, *columns = operators.select((needs.rows, needs.scale, needs.bias, *needs.columns), results)
        return None, *replace(ctx.problem, rows=rows, scale=scale, bias=bias, columns=tuple(columns)).arrays()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Raise RuntimeError."""
        raise operators.forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Raise RuntimeError."""
        raise RuntimeError(
            f"contrastile::loss must be called with one batch at a time, got {info.batch_size} of them under "
            "torch.func.vmap; call the loss in a loop"
        )


class LossGradients(Gradients):
    """The gradients of a loss."""

    @staticmethod
    def forward(plan: Plan, wanted: local.Wanted, upstream: Tensor, *tensors: Any) -> tuple[Tensor, ...]:
        """The gradients of the rows, the scale, the bias and the column blocks; ``tensors`` are the saved tensors."""
        state, arrays = _split_saved(plan, tensors)
        filled = plan.with_arrays(arrays)
        if filled.problem.traceable:
            return tuple(operators.gradients_called(filled, state, upstream, wanted))
        results = compute.gradients(filled, operators.decode_none(state), upstream, wanted)
        return tuple(operators.encode_none(results, filled.problem.scale))
