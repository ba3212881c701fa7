"""Losses over torch tensors, differentiable; nothing else in the package knows autograd.

``functions`` holds autograd functions over ``contrastile.compute``, for eager calls and for torch.func. ``operators``
holds the same as ``torch.library`` operators, which compilers, tracers and modes can see. ``steps`` replays whole small
steps from CUDA graphs, and ``arguments`` tells which calls repeat.
The backward pass saves the problem's arrays that the gradients read, and the schedule's state.

Forward mode and gradients of gradients are not defined, and raise errors that name them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from contrastile.autograd import functions, operators, steps
from contrastile.backends import eager
from contrastile.plan import Plan
from contrastile.schedules import local


def evaluate(plan: Plan) -> Tensor:
    """The loss, 0-d, differentiable in the rows, the columns, the scale and the bias."""
    problem = plan.problem
    features = (problem.rows, *problem.columns, problem.scale, problem.bias)
    if functions.has_tangent(features):
        raise operators.forward_mode()
    if functions.is_transformed():
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "contrastile::loss must be called outside of torch.compile where torch.func transforms it, got both; "
                "compile the encoders alone"
            )
        return functions.functional_loss(plan)
    grad = torch.is_grad_enabled()
    if eager.direct(torch, problem.arrays()):
        # read here, because inside a function's forward gradients are always off
        if problem.placement is not None:
            return steps.STEPS.over_ranks(plan, grad=grad)
        return functions.eager_loss(plan, grad=grad)
    if not problem.traceable:
        return functions.eager_loss(plan, grad=grad)
    _, wanted = functions.inputs_and_wanted(problem, grad=grad)
    if wanted is None:
        wanted = local.Wanted(False, (False,) * len(problem.columns), False)
    return operators.called(plan, wanted)[0]


def value_and_gradients(loss: Callable[..., Tensor], args: Sequence[Any]) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """A loss and its gradients through autograd, so that a small step is replayed from CUDA graphs.

    Args:
        loss: a loss without a group, because autograd's one thread must not wait for other ranks.
        args: its arguments, the features first, on a GPU and without a gradient.

    Returns:
        The loss, and the gradient of each number and floating-point tensor; None if the call is not plain eager.
    """
    dtype = torch.promote_types(args[0].dtype, torch.float32)
    tensors: list[Any] = [args[0].new_full((), x, dtype=dtype) if type(x) is float and isfinite(x) else x for x in args]
    is_plain = all(getattr(x, "is_cuda", False) for x in tensors) and not torch.is_inference_mode_enabled()
    if not is_plain or not eager.direct(torch, tensors):
        return None
    leaves = [x.requires_grad_() for x in tensors if x.is_floating_point()]
    with torch.enable_grad():
        value = loss(*tensors)
    # the gradient of a scale or bias is 0-d, even if the argument has shape (1,)
    return value.detach(), tuple(x.reshape(()) if x.ndim == 1 else x for x in torch.autograd.grad(value, leaves))
