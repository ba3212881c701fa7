"""What is measured: sizes, variants and features."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
        batch: nominal number of pairs.
        width: nominal number of features.
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


@dataclass(frozen=True, slots=True)
class Arguments:
    """A workload's arguments: image and text (b, d) of unit length, ids (b,) int64 or None, and the scale."""

    image: Any
    text: Any
    ids: Any
    scale: Any = None


def features(workload: Workload) -> Arguments:
    """The workload's features in NumPy's float32: equal on every call, and for all variants of one shape."""
    b, d = workload.shape
    random = np.random.default_rng([b, d])
    image, noise = (random.standard_normal((b, d), dtype=np.float32) for _ in range(2))
    for x in (image, noise):
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    noise *= np.float32(np.sqrt(1 - COSINE**2))
    noise += np.float32(COSINE) * image
    if workload.variant != "ids":
        return Arguments(image, noise, None)
    ids = np.arange(b, dtype=np.int64)
    couples = random.permutation(b)[: 2 * int(b * SHARED / 2)].reshape(-1, 2)
    ids[couples[:, 1]] = ids[couples[:, 0]]
    return Arguments(image, noise, ids)


def arguments(given: Arguments, library: str, dtype: str, device: str, scale: float) -> Arguments:
    """The features in one library's arrays; torch tensors require gradients, and share NumPy's memory where they can.

    Args:
        given: the features.
        library: "numpy", "torch" or "cupy".
        dtype: of the features.
        device: "cpu" or "cuda".
        scale: multiplies the dot products.
    """
    if library == "cupy":
        cupy: Any = importlib.import_module("cupy")
        same = None if given.ids is None else cupy.asarray(given.ids)
        return Arguments(cupy.asarray(given.image, dtype), cupy.asarray(given.text, dtype), same, scale)
    if library == "numpy":
        image, text = (x.astype(np.dtype(dtype), copy=False) for x in (given.image, given.text))
        return Arguments(image, text, given.ids, scale)
    import torch

    def put(x: npt.NDArray[np.float32]) -> Any:
        return torch.from_numpy(x).to(device, getattr(torch, dtype)).requires_grad_()

    state = torch.float64 if dtype == "float64" else torch.float32
    ids = None if given.ids is None else torch.from_numpy(given.ids).to(device)
    factor = torch.tensor(scale, dtype=state, device=device, requires_grad=True)
    return Arguments(put(given.image), put(given.text), ids, factor)
