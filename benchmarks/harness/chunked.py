"""The symmetric loss in chunks of rows, written in plain PyTorch and compiled: what needs no kernels of one's own.

The logits of a chunk come out of the product in the features' dtype, as they do for whoever writes it this way.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

CHUNK = 4096


def _forward(q: Any, k: Any, scale: Any) -> tuple[Any, Any]:
    """Log-sum-exps of a chunk's rows, and of the columns over this chunk."""
    x = scale * (q @ k.T).float()
    return torch.logsumexp(x, 1), torch.logsumexp(x, 0)


def _gradient(q: Any, k: Any, scale: Any, row_lse: Any, column_lse: Any, first: Any) -> Any:
    """``2 b G`` of a chunk whose first row has number ``first``, in the features' dtype."""
    x = scale * (q @ k.T).float()
    g = torch.exp(x - row_lse[:, None]) + torch.exp(x - column_lse)
    own = torch.arange(q.shape[0], device=q.device)[:, None] + first == torch.arange(k.shape[0], device=k.device)
    return torch.where(own, g - 2, g).to(q.dtype)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function, dynamic=False) if torch.cuda.is_available() else function


class _Chunked(torch.autograd.Function):
    """Value and gradients; nothing of b x b outlives its chunk."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, scale: Any) -> Any:
        rows, column_lse = [], None
        for part in q.split(CHUNK):
            row, column = _compiled(_forward)(part, k, scale)
            rows.append(row)
            column_lse = column if column_lse is None else torch.logaddexp(column_lse, column)
        row_lse = torch.cat(rows)
        ctx.save_for_backward(q, k, scale, row_lse, column_lse)
        positive = scale * (q.float() * k.float()).sum(1)
        return ((row_lse - positive).mean() + (column_lse - positive).mean()) / 2

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        q, k, scale, row_lse, column_lse = ctx.saved_tensors
        factor = upstream[0] / (2 * q.shape[0])
        d_q, d_k = torch.empty_like(q, dtype=torch.float32), torch.zeros_like(k, dtype=torch.float32)
        # numbers on the device: a Python number would be compiled in, or copied there chunk by chunk
        starts = torch.arange(0, q.shape[0], CHUNK, device=q.device)
        for chunk, first in enumerate(range(0, q.shape[0], CHUNK)):
            part = slice(first, first + CHUNK)
            g = _compiled(_gradient)(q[part], k, scale, row_lse[part], column_lse, starts[chunk])
            d_q[part] = g @ k
            d_k += g.T @ q[part]
        d_scale = factor * (q.float() * d_q).sum()
        return (scale * factor * d_q).to(q.dtype), (scale * factor * d_k).to(k.dtype), d_scale


def chunked_loss(image: Any, text: Any, scale: Any) -> Any:
    """``(CE(s I T^t) + CE(s T I^t)) / 2``, CHUNK rows of logits at a time.

    Args:
        image: (b, d) tensor.
        text: (b, d).
        scale: 0-d tensor.
    """
    apply: Any = _Chunked.apply
    return apply(image, text, scale)
