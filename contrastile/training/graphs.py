"""The leaves of a tensor's autograd graph, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LeafGrad = tuple[Tensor, Tensor]
"""A leaf that the loss depends on, other than the outputs, and its gradient."""


def leaf_gradients_of(x: Tensor, gradient: Tensor | None) -> list[LeafGrad]:
    """A leaf and its gradient; or, of a number with a graph, which is kept, the graph's leaves and their gradients."""
    if gradient is None:
        return []
    if x.is_leaf:
        return [(x, gradient)]
    graph_leaves = leaves(x)
    gradients = gradients_of(x, graph_leaves, gradient)
    return [(leaf, part) for leaf, part in zip(graph_leaves, gradients, strict=True) if part is not None]


def gradients_of(of: Tensor, by: list[Tensor], upstream: Tensor | None = None) -> Sequence[Tensor | None]:
    """``autograd.grad`` without the leaves' hooks: they run when the gradient is sent, and must not run twice.

    Args:
        of: the loss, or a number of the caller's.
        by: leaves.
        upstream: the gradient by ``of``, whose graph is then kept; None for 1.
    """
    hooks = [x._backward_hooks for x in by if x._backward_hooks]
    saved = [dict(leaf_hooks) for leaf_hooks in hooks]
    try:
        for leaf_hooks in hooks:
            leaf_hooks.clear()
        return torch.autograd.grad(of, by, upstream, retain_graph=upstream is not None, allow_unused=True)
    finally:
        for leaf_hooks, leaf_saved in zip(hooks, saved, strict=True):
            leaf_hooks.update(leaf_saved)


def leaves(value: Tensor) -> list[Tensor]:
    """The leaves of a tensor's graph."""
    leaves_by_id: dict[int, Tensor] = {id(value): value} if value.is_leaf else {}
    visited, stack = set(), [value.grad_fn]
    while stack:
        node: Any = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves_by_id[id(leaf)] = leaf
        stack += [next_node for next_node, _ in node.next_functions]
    return list(leaves_by_id.values())
