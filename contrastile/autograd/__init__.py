"""Losses over torch tensors, differentiable; nothing else in the package knows autograd.

``functions`` are autograd functions over ``contrastile.compute``, for eager calls and for torch.func; ``operators`` are
the same as ``torch.library`` operators, which compilers, tracers and modes can see.
``steps`` are whole small steps from CUDA graphs.
Saved for the backward: what the gradients read of the problem, and the state that the schedule leaves for them.

Forward mode and gradients of gradients are not defined, and are refused by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from contrastile.autograd import functions, operators, steps
from contrastile.backends import eager
from contrastile.plan import Plan


def evaluate(plan: Plan) -> Tensor:
    """The loss, 0-d, differentiable in the rows, the columns, the scale and the bias.

    Args:
        plan: over torch tensors.
    """
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
    return operators.called(plan, operators.wants_of(problem, grad=grad))[0]
