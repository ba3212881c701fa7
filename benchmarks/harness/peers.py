"""The implementations that are measured: each a ``loss(image, text, scale)`` of torch tensors, imported when asked for.

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

from contrastile import clip_loss
from contrastile.backends import registry
from contrastile.bench.peers import plain_loss
from harness.chunked import chunked_loss
from harness.record import said

Loss = Callable[[Any, Any, Any], Any]
OPEN_CLIP = "open_clip formula"
CHUNKED = "chunked PyTorch, compiled"
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Peer:
    """One implementation of other people.

    Attributes:
        load: gives the loss of one process (False) or of several (True); raises ImportError, or what the import
            raises, where it is not to be had.
        bytes_per_pair: held at the peak for each of a rank's rows times all columns, 0 where that grows as b d.
        package: name on PyPI of what must be installed, or "".
        several: whether it knows several processes.
        gpu: whether it needs a GPU.
    """

    load: Callable[[bool], Loss]
    bytes_per_pair: int = 0
    package: str = ""
    several: bool = False
    gpu: bool = True


def ours(backend: str, group: Any = None, exchange: str = LOCAL) -> Loss:
    """The front door with a backend; ``exchange`` "local" takes no group."""
    how: dict[str, Any] = {"backend": backend}
    if exchange != LOCAL:
        how |= {"group": group, "exchange": exchange}
    return lambda image, text, scale: clip_loss(image, text, scale, **how)


def plain_info_nce(query: Any, key: Any, scale: Any) -> Any:
    """One direction by the matrix of logits."""
    target = torch.arange(len(query), device=query.device)
    return torch.nn.functional.cross_entropy(scale * query @ key.T, target)


def loads(backend: str) -> str:
    """Why a backend cannot be loaded, or ""."""
    try:
        registry.load(backend)
    except Exception as error:  # other people's modules may raise anything on import
        return said(error)
    return ""


def _local_loss(image: Any, text: Any, all_image: Any, all_text: Any, scale: Any, first: int) -> Any:
    """Cross entropies of this rank's rows of both matrices of logits, halved."""
    cross_entropy = torch.nn.functional.cross_entropy
    target = torch.arange(first, first + image.shape[0], device=image.device)
    per_image, per_text = scale * image @ all_text.T, scale * text @ all_image.T
    return (cross_entropy(per_image, target) + cross_entropy(per_text, target)) / 2


def _open_clip(several: bool, *, compiled: bool) -> Loss:
    """open_clip's ``ClipLoss``, with ``local_loss`` and ``gather_with_grad``; its formula where it is not installed."""
    # each size is compiled for itself: shapes known in advance are the fastest that the compiler can do
    compiler: Any = (lambda f: torch.compile(f, dynamic=False)) if compiled and torch.cuda.is_available() else None
    if not several:
        return plain_loss if compiler is None else compiler(plain_loss)
    found = importlib.util.find_spec("open_clip")
    if compiler is None and found is not None and found.submodule_search_locations:
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
    inner = _local_loss if compiler is None else compiler(_local_loss)
    gather = importlib.import_module("torch.distributed.nn").all_gather

    def formula(image: Any, text: Any, scale: Any) -> Any:
        all_image, all_text = (torch.cat(gather(x), dim=0) for x in (image, text))
        return inner(image, text, all_image, all_text, scale, dist.get_rank() * image.shape[0])

    return formula


def _two_sided(one_direction: Loss) -> Loss:
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
    return _two_sided(lambda x, weight, target: one(x, weight, target, filter_eps=None))


def _liger(several: bool) -> Loss:
    one = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return _two_sided(lambda x, weight, target: one(weight, x, target))


def _quack(several: bool) -> Loss:
    return _two_sided(importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy)


PEERS = {
    # two matrices of logits and two of their logarithms, two bytes each
    OPEN_CLIP: Peer(lambda several: _open_clip(several, compiled=False), 8, several=True, gpu=False),
    f"{OPEN_CLIP}, compiled": Peer(lambda several: _open_clip(several, compiled=True), 8, several=True),
    CHUNKED: Peer(lambda several: chunked_loss, gpu=False),
    "liger-kernel x2": Peer(_liger, package="liger-kernel"),
    "quack-kernels x2": Peer(_quack, package="quack-kernels"),
    "cut-cross-entropy x2, exact": Peer(_cut_cross_entropy, package="cut-cross-entropy"),
    "inf_cl x2": Peer(_inf_cl, package="inf-cl", several=True),
}
"""From what everybody has to what must be installed."""


def refusal(peer: Peer, *, several: bool, kind: str) -> tuple[Loss | None, str]:
    """The peer's loss, or None and why it is not to be had."""
    if peer.gpu and kind != "cuda":
        return None, "needs a GPU"
    try:
        return peer.load(several), ""
    except Exception as error:  # other people's modules may raise anything on import
        remedy = f"; pip install {peer.package}" if peer.package and isinstance(error, ImportError) else ""
        return None, said(error) + remedy
