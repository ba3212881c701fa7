"""Losses over torch tensors, differentiable; nothing else in the package knows autograd.

``bodies`` say what is computed. ``operators`` are the bodies as ``torch.library`` operators, which compilers, tracers
and modes can see; ``functions`` are the same for eager calls, ``transforms`` for those under torch.func. Saved for the
backward: the features as they came, O(m + n) vectors, for the sigmoid loss its gradients (they come with the value, in
one pass), and of an eager call what a backend was told to keep.

Forward mode and gradients of gradients are not defined, and are refused by the operator's name.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from contrastile.autograd import functions, operators, transforms
from contrastile.autograd.bodies import VECTORS, How
from contrastile.backends.contract import Options
from contrastile.schedules.problem import Problem


def evaluate(problem: Problem, backend: str, options: Options) -> Tensor:
    """The loss, 0-d, differentiable in the rows, the columns, the scale and the bias.

    Args:
        problem: over torch tensors.
        backend: a name the registry knows.
        options: how to compute.
    """
    vectors = [getattr(problem, name) for name in VECTORS]
    columns = list(problem.columns)
    how = How(problem.match, backend, options, problem.placement).encode()
    rows, scale, bias = problem.rows, problem.scale, problem.bias
    features = (rows, *columns, scale, bias)
    operator = f"{problem.kind}_loss"
    if functions.tangents(features):
        raise operators.forward_mode(operator)
    if functions.transformed():
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"contrastile::{operator} must be called outside of torch.compile where torch.func transforms it, got "
                "both; compile the encoders alone"
            )
        numbers = (scale,) if bias is None else (scale, bias)
        function: Any = transforms.SoftmaxLoss if problem.kind == "softmax" else transforms.SigmoidLoss
        loss, *_ = function.apply(how, len(columns), rows, *numbers, *columns, *vectors)
        return cast("Tensor", loss)
    direct = functions.direct((*features, *vectors))
    if problem.kind == "softmax":
        if direct:
            # asked here: inside a function's forward gradients are always off
            keep = torch.is_grad_enabled()
            return _applied(functions.SoftmaxLoss, how, len(columns), keep, rows, scale, *columns, *vectors)
        loss, *_ = operators.softmax_loss(rows, columns, scale, vectors, how)
        return cast("Tensor", loss)
    wants = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in features]
    if direct:
        return _applied(functions.SigmoidLoss, how, wants, vectors, rows, scale, bias, *columns)
    loss, *_ = operators.sigmoid_loss(rows, columns, scale, bias, vectors, how, wants)
    return cast("Tensor", loss)


def _applied(function: Any, *given: Any) -> Tensor:
    return cast("Tensor", function.apply(*given))
