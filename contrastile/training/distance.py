"""A deep distance between embeddings, with its own parameters (GradCache v1 Eq. 10-13), in tiles: never |S| x |T|."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from contrastile.training.chunks import positive_integer
from contrastile.training.graphs import gradients_of
from contrastile.training.random_state import Autocast, RandomState, accelerators, float32_at_least


def deep_distance(phi: nn.Module, tile: int = 256) -> Callable[..., Tensor]:
    """InfoNCE over d_ij = phi(f_i, g_j) for a learnt phi: ``mean_i(log sum_j exp(scale d_ij) - scale d_ii)``.

    Forward and backward evaluate phi on one tile of pairs at a time (GradCache v1 Eq. 10) and keep O(|S|) numbers. The
    backward adds up, over tiles, w_ij = dL/dd_ij times the gradients of phi by its parameters (Eq. 11) and by both
    embeddings (Eq. 12, 13). phi's random numbers are replayed.

    Args:
        phi: module that takes (m, d) and (n, d) embeddings and returns (m, n) similarities, each of its own pair only.
        tile: rows and columns of a tile; independent of the encoders' chunk.

    Returns:
        A loss ``loss(anchors, targets, scale=1.0)`` for ``cached_step`` or alone: anchors (m, d), targets (n, d) with
        n >= m, row i the target of anchor i and further rows negatives; scale a number or a one-element tensor. 0-d,
        float32 or wider; differentiable in all three and in phi's parameters. It takes the pairs of this process alone.

    Raises:
        TypeError: phi is not a module: gradients of parameters in closures would be lost. In the loss, the scale is
            neither a number nor a tensor.
        ValueError: the tile is not positive; in the loss, the shapes do not fit.
    """
    if not isinstance(phi, nn.Module):
        raise TypeError(f"phi must be a torch.nn.Module, got {type(phi).__name__}; make its parameters a module's")
    tile = positive_integer("tile", tile)

    def loss(anchors: Tensor, targets: Tensor, scale: Tensor | float = 1.0) -> Tensor:
        if not isinstance(scale, Tensor | Real):
            raise TypeError(f"scale must be a number or a tensor, got {type(scale).__name__}; convert it")
        if isinstance(scale, Tensor) and scale.numel() != 1:
            raise ValueError(f"scale must have one element, got shape {tuple(scale.shape)}; give one for all pairs")
        if anchors.ndim != 2 or targets.ndim != 2 or not 0 < len(anchors) <= len(targets):
            raise ValueError(
                f"anchors and targets must be (m, d) and (n, d) with n >= m > 0, got {tuple(anchors.shape)} and "
                f"{tuple(targets.shape)}; give each anchor its target in the same row"
            )
        factor = torch.as_tensor(scale, dtype=float32_at_least(anchors.dtype), device=anchors.device)
        # read phi's parameters in each call, because the caller may freeze, unfreeze or replace them
        parameters = [p for p in phi.parameters() if p.requires_grad]
        apply: Any = _Distances.apply
        value: Tensor = apply(phi, tile, anchors, targets, factor, *parameters)
        return value

    return loss


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, phi: nn.Module, tile: int, F: Tensor, G: Tensor, scale: Tensor, *parameters: Tensor
    ) -> Tensor:
        devices = accelerators([F, *parameters])
        ctx.autocast, ctx.phi, ctx.tile, ctx.states = Autocast(devices), phi, tile, []
        lse, positives = torch.empty(2, len(F), dtype=scale.dtype, device=F.device)
        for rows in _slices(len(F), tile):
            # one state per row of tiles suffices, because the backward pass visits them in the same order
            ctx.states.append(RandomState(devices))
            row_lse = torch.full((rows.stop - rows.start,), -torch.inf, dtype=scale.dtype, device=F.device)
            for columns in _slices(len(G), tile):
                x = scale * _check_shape(phi(F[rows], G[columns]), F[rows], G[columns]).to(scale.dtype)
                mask = _positive_pairs(rows, columns, x)
                positives[rows] = torch.where(mask.any(dim=1), x.masked_fill(~mask, 0.0).sum(dim=1), positives[rows])
                row_lse = torch.logaddexp(row_lse, x.logsumexp(dim=1))
            lse[rows] = row_lse
        torch.clear_autocast_cache()  # as after the first pass of Replay
        ctx.save_for_backward(F, G, scale, lse, *parameters)
        value: Tensor = (lse - positives).mean()
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        F, G, scale, lse, *parameters = ctx.saved_tensors
        totals = [torch.zeros_like(x, dtype=float32_at_least(x.dtype)) for x in (F, G, scale, *parameters)]
        dF, dG, d_scale, *d_parameters = totals
        caller_state = RandomState(accelerators([F, *parameters]))
        try:
            for rows, state in zip(_slices(len(F), ctx.tile), ctx.states, strict=True):
                state.restore()
                for columns in _slices(len(G), ctx.tile):
                    f, g = (x.detach().requires_grad_() for x in (F[rows], G[columns]))
                    with torch.enable_grad(), ctx.autocast.again():
                        d = ctx.phi(f, g)
                    wide_d = d.detach().to(scale.dtype)
                    w = torch.exp(scale * wide_d - lse[rows, None])
                    w = (w - _positive_pairs(rows, columns, w).to(w.dtype)) * (gradients[0] / len(F))
                    d_scale += (w * wide_d).sum()
                    tile_gradients = gradients_of(d, [f, g, *parameters], (scale * w).to(d.dtype))
                    for total, part in zip([dF[rows], dG[columns], *d_parameters], tile_gradients, strict=True):
                        if part is not None:
                            total += part
        finally:
            caller_state.restore()
        return None, None, *(x.to(y.dtype) for x, y in zip(totals, (F, G, scale, *parameters), strict=True))


def _slices(length: int, tile: int) -> Iterator[slice]:
    return (slice(low, min(low + tile, length)) for low in range(0, length, tile))


def _positive_pairs(rows: slice, columns: slice, like: Tensor) -> Tensor:
    """A mask of the pairs of a tile that are an anchor and its target."""
    i, j = (torch.arange(part.start, part.stop, device=like.device) for part in (rows, columns))
    return i[:, None] == j


def _check_shape(d: Tensor, f: Tensor, g: Tensor) -> Tensor:
    if d.shape != (len(f), len(g)):
        raise ValueError(
            f"phi must return one similarity for each pair, shape {(len(f), len(g))}, got {tuple(d.shape)}; compare "
            "every row of the first argument with every row of the second"
        )
    return d
