"""The losses that are timed beside ours: plain PyTorch's by the matrix of logits, and public kernels.

The linear cross entropies know one direction and no scale: they are called twice, and the scale is multiplied into the
tower that stands for the hidden states, in the features' dtype, as their callers do.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from contrastile.bench.peers import plain_loss
from contrastile.reporting import one_line
from peers import adapters

Loss = Callable[..., Any]
OPEN_CLIP = "open_clip formula"
CHUNK = 4096


def plain_info_nce(query: Any, key: Any, scale: Any) -> Any:
    """One direction by the matrix of logits."""
    return F.cross_entropy(scale * query @ key.T, torch.arange(len(query), device=query.device))


def plain_sigmoid(image: Any, text: Any, scale: Any) -> Any:
    """SigLIP's loss by the matrix of logits."""
    logits = scale * image @ text.T - 10.0
    signs = 2 * torch.eye(len(image), device=image.device, dtype=image.dtype) - 1
    return -F.logsigmoid(signs * logits).sum() / len(image)


def plain_nt_xent(first: Any, second: Any, scale: Any) -> Any:
    """SimCLR's loss by the matrix of logits."""
    views = torch.cat((first, second))
    logits = (scale * views @ views.T).fill_diagonal_(-torch.inf)
    b = len(first)
    return F.cross_entropy(logits, torch.arange(2 * b, device=views.device).roll(b))


def plain_sup_con(features: Any, labels: Any, scale: Any) -> Any:
    """SupCon's L_out by the matrix of logits."""
    logits = (scale * features @ features.T).fill_diagonal_(-torch.inf)
    log_p = F.log_softmax(logits, dim=1)
    same = (labels[:, None] == labels).fill_diagonal_(False)
    count = same.sum(1)
    return -(log_p.masked_fill(~same, 0).sum(1) / count.clamp(min=1)).sum() / (count > 0).sum()


PLAINS: dict[str, Loss] = {
    "clip_loss": plain_loss,
    "clip_loss ids": plain_loss,
    "info_nce": plain_info_nce,
    "sigmoid_loss": plain_sigmoid,
    "nt_xent": plain_nt_xent,
    "sup_con": plain_sup_con,
}


def compiled(function: Any) -> Any:
    """Compiled for each size alone, as fast as the compiler can."""
    return torch.compile(function, dynamic=False)


def _local_loss(image: Any, text: Any, all_image: Any, all_text: Any, scale: Any, first: int) -> Any:
    """Cross entropies of this rank's rows of both matrices of logits, halved."""
    target = torch.arange(first, first + image.shape[0], device=image.device)
    per_image, per_text = scale * image @ all_text.T, scale * text @ all_image.T
    return (F.cross_entropy(per_image, target) + F.cross_entropy(per_text, target)) / 2


def _gathered(inner: Loss) -> Loss:
    """open_clip's ``ClipLoss`` with ``local_loss`` and ``gather_with_grad``."""
    gather = importlib.import_module("torch.distributed.nn").all_gather

    def formula(image: Any, text: Any, scale: Any) -> Any:
        all_image, all_text = (torch.cat(gather(x), dim=0) for x in (image, text))
        return inner(image, text, all_image, all_text, scale, dist.get_rank() * image.shape[0])

    return formula


def _sums(rows: Any, columns: Any, scale: Any) -> tuple[Any, Any]:
    """Log-sum-exps of a chunk's rows, and of the columns over this chunk."""
    x = scale * (rows @ columns.T).float()
    return torch.logsumexp(x, 1), torch.logsumexp(x, 0)


def chunked_loss(image: Any, text: Any, scale: Any) -> Any:
    """The symmetric loss, CHUNK rows of logits at a time, computed anew in backward: no kernels of one's own.

    The logits of a chunk come out of the product in the features' dtype, as they do for whoever writes it this way.
    """
    sums = compiled(_sums) if image.is_cuda else _sums
    found = [checkpoint(sums, part, text, scale, use_reentrant=False) for part in image.split(CHUNK)]
    columns = torch.logsumexp(torch.stack([column for _, column in found]), 0)
    positive = scale * (image.float() * text.float()).sum(1)
    return (torch.cat([row for row, _ in found]) + columns - 2 * positive).mean() / 2


def _inf_cl(several: bool) -> Loss:
    one = importlib.import_module("inf_cl").cal_inf_loss
    if several:
        return lambda image, text, scale: (one(image, text, scale=scale) + one(text, image, scale=scale)) / 2
    # not by its own ``scale``, whose backward needs a process group; the arithmetic is the same
    return adapters.two_sided(lambda rows, weight, target: one(rows, weight))


TIMED: dict[str, tuple[str, Callable[[bool], Loss]]] = {
    OPEN_CLIP: ("cpu ranks", lambda several: _gathered(_local_loss) if several else plain_loss),
    f"{OPEN_CLIP}, compiled": (
        "ranks",
        lambda several: _gathered(compiled(_local_loss)) if several else compiled(plain_loss),
    ),
    "chunked PyTorch, compiled": ("cpu", lambda several: chunked_loss),
    "liger-kernel x2": ("", lambda several: adapters.liger()),
    "quack-kernels x2": ("", lambda several: adapters.quack()),
    "cut-cross-entropy x2, exact": ("", lambda several: adapters.cut_cross_entropy()),
    "inf_cl x2": ("ranks", _inf_cl),
}
"""Implementations of the symmetric loss: whether each runs on a "cpu" and knows "ranks", and its loss, given whether
there are several ranks. From what everybody has to what must be installed."""


def loaded(name: str, *, several: bool, kind: str) -> tuple[Loss | None, str]:
    """The loss of a name of ``TIMED``, or None and why it is not to be had."""
    places, load = TIMED[name]
    if kind != "cuda" and "cpu" not in places:
        return None, "needs a GPU"
    try:
        return load(several), ""
    except Exception as error:  # other people's modules may raise anything on import
        return None, one_line(error)[:200]
