"""Losses over torch tensors, differentiable; nothing else in the package knows autograd.

``functions`` are autograd functions over ``contrastile.compute``, for eager calls and for torch.func; ``operators`` are
the same as ``torch.library`` operators, which compilers, tracers and modes can see.
``steps`` are whole small steps from CUDA graphs, ``arguments`` tell which calls repeat.
Saved for the backward: what the gradients read of the problem, and the state that the schedule leaves for them.

Forward mode and gradients of gradients are not defined, and are refused by name.
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
    if functions.tangents(features):
        raise operators.forward_mode()
    if functions.transformed():
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "contrastile::loss must be called outside of torch.compile where torch.func transforms it, got both; "
                "compile the encoders alone"
            )
        return functions.functional_loss(plan)
    grad = torch.is_grad_enabled()
    if eager.direct(torch, problem.arrays()):
        # asked here: inside a function's forward gradients are always off
        if problem.placement is not None:
            return steps.STEPS.over_ranks(plan, grad=grad)
        return functions.eager_loss(plan, grad=grad)
    if not problem.traceable:
        return functions.eager_loss(plan, grad=grad)
    _, wanted = functions.asked(problem, grad=grad)
    if wanted is None:
        wanted = local.Wanted(False, (False,) * len(problem.columns), False)
    return operators.called(plan, wanted)[0]


def value_and_gradients(loss: Callable[..., Tensor], given: Sequence[Any]) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """A loss and its gradients, by the same kernels as ever, which a small step has from graphs.

    Args:
        loss: of a process alone: autograd's one thread must not wait for ranks.
        given: its arguments, the features first, on a GPU and without a gradient. Numbers have gradients, too.

    Returns:
        The loss, and the gradient of each number and tensor of floats; None where the call is not plain eager.
    """
    wide = torch.promote_types(given[0].dtype, torch.float32)
    args: list[Any] = [given[0].new_full((), x, dtype=wide) if type(x) is float and isfinite(x) else x for x in given]
    plain = all(getattr(x, "is_cuda", False) for x in args) and not torch.is_inference_mode_enabled()
    if not plain or not eager.direct(torch, args):
        return None
    leaves = [x.requires_grad_() for x in args if x.is_floating_point()]
    with torch.enable_grad():
        value = loss(*args)
    # that of a number is 0-d, whatever holds it
    return value.detach(), tuple(x.reshape(()) if x.ndim == 1 else x for x in torch.autograd.grad(value, leaves))
