"""The leaves of a tensor's autograd graph, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Outside = tuple[Tensor, Tensor]
"""A leaf that the loss depends on beside the outputs, and its gradient."""


def outside_of(x: Tensor, gradient: Tensor | None) -> list[Outside]:
    """A leaf with its gradient, or the leaves of a number's graph, which is kept, with theirs."""
    if gradient is None:
        return []
    if x.is_leaf:
        return [(x, gradient)]
    by = leaves(x)
    found = gradients_of(x, by, gradient)
    return [(leaf, part) for leaf, part in zip(by, found, strict=True) if part is not None]


def gradients_of(of: Tensor, by: list[Tensor], upstream: Tensor | None = None) -> Sequence[Tensor | None]:
    """``autograd.grad`` without the hooks of leaves: they run when the gradient is sent, and must not run twice.

    Args:
        of: the loss, or a number of the caller's.
        by: leaves.
        upstream: the gradient by ``of``, whose graph is then kept; None for 1.
    """
    hooks = [x._backward_hooks for x in by if x._backward_hooks]
    kept = [dict(each) for each in hooks]
    try:
        for each in hooks:
            each.clear()
        return torch.autograd.grad(of, by, upstream, retain_graph=upstream is not None, allow_unused=True)
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)


def leaves(value: Tensor) -> list[Tensor]:
    """The leaves of a tensor's graph."""
    found: dict[int, Tensor] = {id(value): value} if value.is_leaf else {}
    seen, todo = set(), [value.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        todo += [each for each, _ in node.next_functions]
    return list(found.values())
