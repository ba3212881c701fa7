"""The losses that are timed beside ours: plain PyTorch's by the matrix of logits, and public kernels.

The linear cross entropies know one direction and no scale: they are called twice, and the scale is multiplied into the
tower that stands for the hidden states, in the features' dtype, as their callers do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from contrastile.bench import plain
from contrastile.reporting import one_line
from peers import adapters

Loss = Callable[..., Any]
OPEN_CLIP = "open_clip formula"
CHUNK = 4096


PLAINS: dict[str, Loss] = {
    "clip_loss": plain.clip,
    "clip_loss ids": plain.clip,
    "info_nce": plain.info_nce,
    "sigmoid_loss": partial(plain.sigmoid, bias=-10.0),
    "nt_xent": plain.nt_xent,
    "sup_con": plain.sup_con,
}


@cache
def compiled(function: Any) -> Any:
    """The function compiled for each size separately, which makes the fastest code."""
    return torch.compile(function, dynamic=False)


def _local_loss(image: Any, text: Any, all_image: Any, all_text: Any, scale: Any, first: int) -> Any:
    """Cross entropies of this rank's rows of both matrices of logits, halved."""
    target = torch.arange(first, first + image.shape[0], device=image.device)
    per_image, per_text = scale * image @ all_text.T, scale * text @ all_image.T
    return (F.cross_entropy(per_image, target) + F.cross_entropy(per_text, target)) / 2


def _gathered_loss(local_loss: Loss) -> Loss:
    """open_clip's ``ClipLoss`` with ``local_loss`` and ``gather_with_grad``."""
    gather = importlib.import_module("torch.distributed.nn").all_gather

    def formula(image: Any, text: Any, scale: Any) -> Any:
        all_image, all_text = (torch.cat(gather(x), dim=0) for x in (image, text))
        return local_loss(image, text, all_image, all_text, scale, dist.get_rank() * image.shape[0])

    return formula


def _sums(rows: Any, columns: Any, scale: Any) -> tuple[Any, Any]:
    """Log-sum-exps of a chunk's rows, and of the columns over this chunk."""
    x = scale * (rows @ columns.T).float()
    return torch.logsumexp(x, 1), torch.logsumexp(x, 0)


def _chunk_gradient(rows: Any, columns: Any, scale: Any, row_lse: Any, column_lse: Any, first: Any) -> Any:
    """``2 b G`` of a chunk whose first row has number ``first``, in the features' dtype."""
    x = scale * (rows @ columns.T).float()
    g = torch.exp(x - row_lse[:, None]) + torch.exp(x - column_lse)
    row_numbers, column_numbers = (torch.arange(len(side), device=x.device) for side in (rows, columns))
    return torch.where(row_numbers[:, None] + first == column_numbers, g - 2, g).to(rows.dtype)


class _Chunked(torch.autograd.Function):
    """The symmetric loss without custom kernels: CHUNK rows of logits at a time, formed again in backward.

    The backward is written by hand, because ``torch.utils.checkpoint`` takes 1.4 to 3 times as long. The product gives
    the logits of a chunk in the features' dtype, as it does in everyday code of this kind.
    """

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, scale: Any) -> Any:
        lse_pairs = [_compiled_on_gpu(_sums, q)(part, k, scale) for part in q.split(CHUNK)]
        row_lse, column_lse = torch.cat([row_part for row_part, _ in lse_pairs]), lse_pairs[0][1]
        for _, column_part in lse_pairs[1:]:
            column_lse = torch.logaddexp(column_lse, column_part)
        ctx.save_for_backward(q, k, scale, row_lse, column_lse)
        positive = scale * (q.float() * k.float()).sum(1)
        return (row_lse + column_lse - 2 * positive).mean() / 2

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        q, k, scale, row_lse, column_lse = ctx.saved_tensors
        factor, chunk_gradient = upstream[0] / (2 * len(q)), _compiled_on_gpu(_chunk_gradient, q)
        d_q, d_k = torch.empty_like(q, dtype=torch.float32), torch.zeros_like(k, dtype=torch.float32)
        # on the device, because a Python number would be compiled in, or copied for each chunk
        starts = torch.arange(0, len(q), CHUNK, device=q.device)
        for first, rows, lse, d_rows in zip(starts, *(x.split(CHUNK) for x in (q, row_lse, d_q)), strict=True):
            g = chunk_gradient(rows, k, scale, lse, column_lse, first)
            d_rows.copy_(g @ k)
            d_k += g.T @ rows
        d_scale = factor * (q.float() * d_q).sum()
        return *((scale * factor * x).to(q.dtype) for x in (d_q, d_k)), d_scale


def _compiled_on_gpu(function: Any, like: Any) -> Any:
    return compiled(function) if like.is_cuda else function


def _inf_cl(several: bool) -> Loss:
    inf_loss = importlib.import_module("inf_cl").cal_inf_loss
    if several:
        return lambda image, text, scale: (inf_loss(image, text, scale=scale) + inf_loss(text, image, scale=scale)) / 2
    # do not use its ``scale``, whose backward needs a process group; the arithmetic is the same
    return adapters.two_sided(lambda rows, weight, target: inf_loss(rows, weight))


TIMED: dict[str, tuple[str, Callable[[bool], Loss]]] = {
    OPEN_CLIP: ("cpu ranks", lambda several: _gathered_loss(_local_loss) if several else plain.clip),
    f"{OPEN_CLIP}, compiled": (
        "ranks",
        lambda several: _gathered_loss(compiled(_local_loss)) if several else compiled(plain.clip),
    ),
    "chunked PyTorch, compiled": ("cpu", lambda several: _Chunked.apply),
    "liger-kernel x2": ("", lambda several: adapters.liger()),
    "quack-kernels x2": ("", lambda several: adapters.quack()),
    "cut-cross-entropy x2, exact": ("", lambda several: adapters.cut_cross_entropy()),
    "inf_cl x2": ("ranks", _inf_cl),
}
"""Implementations of the symmetric loss: whether each runs on a "cpu" and over "ranks", and a function that returns its
loss, given whether there are several ranks. PyTorch's own come first, then those that must be installed."""


def load_loss(name: str, *, several: bool, kind: str) -> tuple[Loss | None, str]:
    """The loss of this name in ``TIMED``, or None and the reason."""
    places, load = TIMED[name]
    if kind != "cuda" and "cpu" not in places:
        return None, "needs a GPU"
    try:
        return load(several), ""
    except Exception as error:  # another package may raise anything on import
        return None, one_line(error)[:200]
