"""Losses over torch tensors, differentiable; nothing else in the package knows autograd.

``bodies`` say what is computed of a plan. ``functions`` are autograd functions over the bodies, for eager calls and
for torch.func; ``operators`` are the bodies as ``torch.library`` operators, which compilers, tracers and modes can see.
``steps`` are whole small steps from CUDA graphs.
Saved for the backward: the features as they came, O(m + n) vectors, for the sigmoid loss its gradients (they come with
the value, in one pass), and of an eager call what a backend was told to keep.

Forward mode and gradients of gradients are not defined, and are refused by the operator's name.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from contrastile.autograd import functions, operators
from contrastile.backends import eager
from contrastile.plan import Plan


def evaluate(plan: Plan) -> Tensor:
    """The loss, 0-d, differentiable in the rows, the columns, the scale and the bias.

    Args:
        plan: over torch tensors.
    """
    problem, arrays = plan.problem, plan.problem.arrays()
    operator = f"{problem.kind}_loss"
    features = (problem.rows, *problem.columns, problem.scale, problem.bias)
    if functions.tangents(features):
        raise operators.forward_mode(operator)
    if functions.transformed():
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"contrastile::{operator} must be called outside of torch.compile where torch.func transforms it, got "
                "both; compile the encoders alone"
            )
        return functions.functional_loss(plan)
    grad = torch.is_grad_enabled()
    if eager.direct(torch, arrays):
        # asked here: inside a function's forward gradients are always off
        return functions.eager_loss(plan.replaying(), grad=grad)
    if not problem.traceable:
        return functions.eager_loss(plan, grad=grad)
    settings, columns, vectors = operators.settings_of(plan), problem.columns, problem.vectors
    if problem.kind == "softmax":
        loss, *_ = operators.softmax_loss(problem.rows, columns, problem.scale, vectors, *settings)
        return cast("Tensor", loss)
    wants = [grad and x is not None and x.requires_grad for x in features]
    loss, *_ = operators.sigmoid_loss(problem.rows, columns, problem.scale, problem.bias, vectors, *settings, wants)
    return cast("Tensor", loss)
