"""The implementations that are measured: each a ``loss(image, text, scale)`` of torch tensors, imported when asked for.

The linear cross entropies know one direction and no scale: they are called twice, and the scale is multiplied into the
tower that plays the hidden states, in the features' dtype, as their callers do.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from contrastile.backends import registry
from contrastile.bench.peers import plain_loss
from gpu_run.chunked import chunked_loss
from gpu_run.plan import (
    AMPERE,
    CHUNKED,
    CUPY,
    DEFAULT_CCE,
    EVERY,
    EVERY_MIB,
    INF_CL,
    KEEPING,
    KEEPING_MIB,
    MORE_MEMORY,
    OPEN_CLIP,
    ROOMY,
    ROOMY_MIB,
    TORCH,
    TRITON,
)

LARGER = {ROOMY: {"workspace": ROOMY_MIB}, KEEPING: {"keep": KEEPING_MIB}, EVERY: {"keep": EVERY_MIB}}
"""The cupy backend with more memory, whatever the environment says."""

Loss = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """One implementation.

    Attributes:
        name: in the record and on the page.
        load: gives the loss; raises ImportError, or what the import raises, where it is not to be had.
        bytes_per_pair: what it holds at its peak for each of the b x b pairs, 0 where that grows as b d.
        package: name on PyPI of what must be installed, or "".
        backend: name of the backend that must pass ``verify`` first, or "".
    """

    name: str
    load: Callable[[], Loss]
    bytes_per_pair: int = 0
    package: str = ""
    backend: str = ""


def backend_name(short: str) -> str:
    """What the front door calls a backend of this package: its registered name, or where it lives."""
    return short if ":" in short or short in registry.names() else f"contrastile.backends.{short}:backend"


def _ours(short: str, *, sm_80: bool = False, **options: Any) -> Loss:
    """With ``sm_80`` the cupy backend without Hopper's own kernels."""
    name = backend_name(short)
    registry.load(name)
    from contrastile import clip_loss

    def loss(image: Any, text: Any, scale: Any) -> Any:
        # for the backward pass too, which follows
        os.environ.pop("CONTRASTILE_CUPY_KERNELS", None)
        if sm_80:
            os.environ["CONTRASTILE_CUPY_KERNELS"] = "sm80"
        return clip_loss(image, text, scale, backend=name, **options)

    return loss


def _compiled() -> Loss:
    import torch

    # each size is compiled for itself: shapes known in advance are the fastest that the compiler can do
    return torch.compile(plain_loss, dynamic=False)


def _two_sided(one_direction: Loss) -> Loss:
    def loss(image: Any, text: Any, scale: Any) -> Any:
        import torch

        target = torch.arange(image.shape[0], device=image.device)
        return (one_direction(scale * image, text, target) + one_direction(scale * text, image, target)) / 2

    return loss


def _inf_cl() -> Loss:
    one = importlib.import_module("inf_cl").cal_inf_loss

    def loss(image: Any, text: Any, scale: Any) -> Any:
        # not by its own ``scale``, whose backward needs a process group; the arithmetic is the same
        return (one(scale * image, text) + one(scale * text, image)) / 2

    return loss


def _cut_cross_entropy(filter_eps: str | None) -> Loss:
    one = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return _two_sided(lambda x, weight, target: one(x, weight, target, filter_eps=filter_eps))


def _liger() -> Loss:
    one = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return _two_sided(lambda x, weight, target: one(weight, x, target))


def _quack() -> Loss:
    return _two_sided(importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy)


PEERS = {
    each.name: each
    for each in (
        Peer(TRITON, lambda: _ours("triton"), backend="triton"),
        Peer(CUPY, lambda: _ours("cupy"), backend="cupy"),
        *(Peer(name, partial(_ours, "cupy", **LARGER[name]), backend="cupy") for name in MORE_MEMORY),
        Peer(AMPERE, lambda: _ours("cupy", sm_80=True), backend="cupy"),
        Peer(TORCH, lambda: _ours("torch"), backend="torch"),
        # two matrices of logits and two of their logarithms
        Peer(OPEN_CLIP, lambda: plain_loss, bytes_per_pair=8),
        Peer(f"{OPEN_CLIP}, compiled", _compiled, bytes_per_pair=8),
        Peer(CHUNKED, lambda: chunked_loss),
        Peer("liger-kernel x2", _liger, package="liger-kernel"),
        Peer("quack-kernels x2", _quack, package="quack-kernels"),
        Peer("cut-cross-entropy x2, exact", lambda: _cut_cross_entropy(None), package="cut-cross-entropy"),
        Peer(DEFAULT_CCE, lambda: _cut_cross_entropy("high"), package="cut-cross-entropy"),
        Peer(INF_CL, _inf_cl, package="inf-cl"),
    )
}
"""Ours first, then from what everybody has to what must be installed."""

TIMED = tuple(name for name in PEERS if name not in (DEFAULT_CCE, AMPERE, *MORE_MEMORY))
"""The default of cut-cross-entropy leaves out small gradients: it is held to the reference and not timed. The sm_80
kernels have no place in a comparison on a newer GPU, nor has more memory than the default."""


def refusal(peer: Peer) -> tuple[Loss | None, str]:
    """The peer's loss, or None and why it is not to be had."""
    try:
        return peer.load(), ""
    except Exception as error:  # other people's modules may raise anything on import
        mend = f"; pip install {peer.package}" if peer.package and isinstance(error, ImportError) else ""
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{mend}"
