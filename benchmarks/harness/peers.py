"""Other people's losses of torch tensors, imported when asked for: plain PyTorch's, open_clip's, and public kernels'.

The linear cross entropies know one direction and no scale: they are called twice, and the scale is multiplied into the
tower that stands for the hidden states, in the features' dtype, as their callers do.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from contrastile.bench.peers import plain_loss
from harness.record import said

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


@dataclass(frozen=True, slots=True)
class Peer:
    """One implementation of the symmetric loss.

    Attributes:
        load: gives the loss of one process (False) or of several (True); raises what the import raises.
        package: name on PyPI of what must be installed, or "".
        several: whether it knows several processes.
        gpu: whether it needs a GPU.
    """

    load: Callable[[bool], Loss]
    package: str = ""
    several: bool = False
    gpu: bool = True

    def loaded(self, *, several: bool, kind: str) -> tuple[Loss | None, str]:
        """The loss, or None and why it is not to be had."""
        if self.gpu and kind != "cuda":
            return None, "needs a GPU"
        try:
            return self.load(several), ""
        except Exception as error:  # other people's modules may raise anything on import
            remedy = f"; pip install {self.package}" if self.package and isinstance(error, ImportError) else ""
            return None, said(error) + remedy


def _local_loss(image: Any, text: Any, all_image: Any, all_text: Any, scale: Any, first: int) -> Any:
    """Cross entropies of this rank's rows of both matrices of logits, halved."""
    target = torch.arange(first, first + image.shape[0], device=image.device)
    per_image, per_text = scale * image @ all_text.T, scale * text @ all_image.T
    return (F.cross_entropy(per_image, target) + F.cross_entropy(per_text, target)) / 2


def _open_clip(several: bool) -> Loss:
    """open_clip's ``ClipLoss``, with ``local_loss`` and ``gather_with_grad``; its formula where it is not installed."""
    if not several:
        return plain_loss
    found = importlib.util.find_spec("open_clip")
    if found is None or not found.submodule_search_locations:
        return _gathered(_local_loss)
    # the one module, which needs torch alone: the package itself brings every model along
    place = Path(found.submodule_search_locations[0]) / "loss.py"
    spec = importlib.util.spec_from_file_location("open_clip_loss", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    world = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    loss: Loss = module.ClipLoss(local_loss=True, gather_with_grad=True, **world)
    return loss


def _gathered(inner: Loss) -> Loss:
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


def two_sided(one_direction: Loss) -> Loss:
    """``(rows, weight, target) -> loss``, a linear cross entropy, called for each direction."""

    def loss(image: Any, text: Any, scale: Any) -> Any:
        target = torch.arange(image.shape[0], device=image.device)
        return (one_direction(scale * image, text, target) + one_direction(scale * text, image, target)) / 2

    return loss


def _inf_cl(several: bool) -> Loss:
    one = importlib.import_module("inf_cl").cal_inf_loss
    if several:
        return lambda image, text, scale: (one(image, text, scale=scale) + one(text, image, scale=scale)) / 2
    # not by its own ``scale``, whose backward needs a process group; the arithmetic is the same
    return lambda image, text, scale: (one(scale * image, text) + one(scale * text, image)) / 2


def _cut_cross_entropy(several: bool) -> Loss:
    one = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    # by default it leaves out small gradients
    return two_sided(lambda x, weight, target: one(x, weight, target, filter_eps=None))


def _liger(several: bool) -> Loss:
    one = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return two_sided(lambda x, weight, target: one(weight, x, target))


def _quack(several: bool) -> Loss:
    return two_sided(importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy)


PEERS = {
    OPEN_CLIP: Peer(_open_clip, several=True, gpu=False),
    f"{OPEN_CLIP}, compiled": Peer(
        lambda several: _gathered(compiled(_local_loss)) if several else compiled(plain_loss), several=True
    ),
    "chunked PyTorch, compiled": Peer(lambda several: chunked_loss, gpu=False),
    "liger-kernel x2": Peer(_liger, "liger-kernel"),
    "quack-kernels x2": Peer(_quack, "quack-kernels"),
    "cut-cross-entropy x2, exact": Peer(_cut_cross_entropy, "cut-cross-entropy"),
    "inf_cl x2": Peer(_inf_cl, "inf-cl", several=True),
}
"""From what everybody has to what must be installed."""
