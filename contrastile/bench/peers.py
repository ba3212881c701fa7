"""The workloads, and the implementations: contrastile's backends, and a plain loss with the full logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from contrastile.backends.contract import Backend, Options
from contrastile.backends.registry import load
from contrastile.losses import clip_loss
from contrastile.verify.losses import Claims, Loss
from contrastile.verify.losses.arguments import Arguments
from contrastile.verify.losses.ours import both
from contrastile.verify.losses.subject import prepare

PLAIN = "plain"
VARIANTS = ("aligned", "ragged", "ids")

COSINE = 0.3
"""Cosine of a positive pair, about that of a trained image-text model; other pairs are orthogonal on average."""

SHARED = 0.2
"""Share of the pairs of the ``ids`` variant that share their id with another pair."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One size and variant.

    Attributes:
        variant: "aligned"; "ragged", one row and three features less; or "ids", aligned with false negatives.
        batch: nominal number of pairs; ``width`` is the nominal number of features.
    """

    variant: str
    batch: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """(b, d) of the features."""
        if self.variant != "ragged":
            return self.batch, self.width
        return max(1, self.batch - 1), max(1, self.width - 3)

    @property
    def flops(self) -> int:
        """``8 b^2 d``: the four products that a symmetric loss needs when it stores no logits."""
        b, d = self.shape
        return 8 * b * b * d


def features(workload: Workload, scale: float) -> Arguments:
    """The workload's arguments: unit pairs in float32, the same on every call and for all variants of one shape."""
    b, d = workload.shape
    random = np.random.default_rng([b, d])
    image, noise = pairs = tuple[Any, ...](random.standard_normal((b, d), dtype=np.float32) for _ in range(2))
    for x in pairs:
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    noise *= np.float32(np.sqrt(1 - COSINE**2))
    noise += np.float32(COSINE) * image
    keywords = {}
    if workload.variant == "ids":
        keywords["ids"] = ids = np.arange(b, dtype=np.int64)
        shared = random.permutation(b)[: 2 * int(b * SHARED / 2)].reshape(-1, 2)
        ids[shared[:, 1]] = ids[shared[:, 0]]
    return Arguments(pairs, scale, keywords=keywords)


@dataclass(frozen=True, slots=True)
class Implementation:
    """An implementation of the symmetric loss and its gradients.

    Attributes:
        name: a backend's name, or "plain".
        library: the library of its arrays: "numpy", "torch", or "cupy" where there is no torch.
        target: called as ``target(image, text, scale, ids=None)``; returns the loss and its gradients by image, text
            and scale, and accumulates none.
        backend: the backend that computes it; None for a plain computation.
    """

    name: str
    library: str
    target: Callable[..., Any]
    backend: Backend | None = None

    def refuses(self, dtype: str, device: str) -> str | None:
        """Why it cannot run in a dtype on a device, or None."""
        if self.backend is None:
            return None
        if device not in self.backend.devices:
            return f"runs on {' or '.join(sorted(self.backend.devices))} only"
        return None if dtype in self.backend.dtypes else f"takes {', '.join(sorted(self.backend.dtypes))} only"

    def predicted_bytes(self, workload: Workload, itemsize: int) -> int:
        """Predicted bytes at the peak; ``itemsize`` is the size of one feature."""
        b, d = workload.shape
        if self.backend is not None:
            # Both gradients, and their accumulators in the state dtype.
            return 2 * b * d * (itemsize + 8)
        # Two matrices of logits, two of log-probabilities, and the mask of false negatives.
        return b * b * (4 * itemsize + (workload.variant == "ids")) + 4 * b * d * itemsize

    def loss(self, dtype: str, device: str) -> Loss:
        """The implementation as a loss under test of ``contrastile verify``, with the backend's facts."""
        claims, facts = Claims(library=self.library, ids=True, dtypes=(dtype,), devices=(device,)), None
        if self.backend is not None:
            options = Options(precision=self.backend.auto_precision)
            facts = self.backend.accuracy(dtype, device, *(() if options == Options() else (options,)))
        return Loss(self.name, self.target, claims, facts)

    def step(self, workload: Workload, dtype: str, device: str, scale: float) -> Callable[[], Any]:
        """A callable that runs one forward and backward pass of this workload; its arrays are created here."""
        call = prepare(self.loss(dtype, device), features(workload, scale), dtype, device)
        return partial(self.target, *call.leaves, *call.numbers, **call.keywords)


def ours(name: str) -> Implementation:
    """A backend behind the public functions, so that the benchmark times the calls that users make.

    Raises:
        ValueError, BackendUnavailableError, TypeError: see ``contrastile.backends.load``.
    """
    backend = load(name)
    library = backend.arrays.name if backend.arrays.name == "numpy" or find_spec("torch") is None else "torch"
    target = with_autograd(partial(clip_loss, backend=name))
    if library != "torch":
        target = both(clip_loss, {"backend": name})
    return Implementation(name, library, target, backend)


def plain() -> Implementation:
    """open_clip's formula in plain torch: two matrices of logits, two cross entropies, halved.

    Raises:
        ImportError: torch is not installed.
    """
    from contrastile.bench import plain as losses

    return Implementation(PLAIN, "torch", with_autograd(losses.clip))


def with_autograd(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Forward and backward pass of a differentiable loss of torch tensors. Gradients are returned, not accumulated."""

    def target(image: Any, text: Any, scale: Any, ids: Any = None) -> Any:
        import torch

        leaves = image, text, scale
        value = loss(*leaves, ids=ids)
        return value.detach(), *torch.autograd.grad(value, leaves)

    return target
