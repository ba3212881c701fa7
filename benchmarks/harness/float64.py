"""Features that any rank can draw anew, and the symmetric loss in float64 on them, chunk by chunk on their own device.

With pairs of unit length ``|x| <= s``, and exponentials of float64 reach 709: sums are taken without a maximum, and a
larger scale is refused. Sampled rows of a gradient need the log-sum-exps of all columns. Where a whole float64 pass
takes too long, those of one more forward pass of the backend are taken, and themselves held to samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from contrastile.bench.workloads import COSINE

Tensor = torch.Tensor
CHUNK = 8192
LARGEST_LOGIT = 650.0
_ENTRIES = 2**27


def pairs(first: int, rows: int, d: int, device: Any, dtype: torch.dtype, cosine: float = COSINE) -> tuple[Any, Any]:
    """Pairs ``first`` to ``first + rows - 1`` of the global batch: image and text, (rows, d) unit vectors each.

    The number of a chunk of pairs is its seed, so that nobody has to send the whole batch; another kind of device
    draws other pairs.

    Args:
        first: the number of the first pair.
        rows: how many pairs.
        d: width.
        device: where they are drawn.
        dtype: of the features.
        cosine: of a pair; other pairs are orthogonal on average.
    """
    normalize = torch.nn.functional.normalize
    image, text = (torch.empty(rows, d, device=device, dtype=dtype) for _ in range(2))
    for number in range(first // CHUNK, -(-(first + rows) // CHUNK)):
        generator = torch.Generator(device).manual_seed(number)
        one, noise = (normalize(torch.randn(CHUNK, d, device=device, generator=generator), dim=1) for _ in range(2))
        two = normalize(cosine * one + (1 - cosine**2) ** 0.5 * noise, dim=1)
        start = number * CHUNK
        part = slice(max(first - start, 0), min(first + rows - start, CHUNK))
        to = slice(start + part.start - first, start + part.stop - first)
        image[to], text[to] = one[part].to(dtype), two[part].to(dtype)
    return image, text


def sample(b: int, count: int, device: Any) -> Tensor:
    """``count`` different indices below b, sorted: the first, the last, and drawn ones between."""
    if count >= b:
        return torch.arange(b, device=device)
    drawn = torch.randperm(b, generator=torch.Generator().manual_seed(b))[:count]
    drawn[:2] = torch.tensor([0, b - 1])
    return torch.unique(drawn).to(device)


def _chunks(length: int, across: int) -> Iterator[slice]:
    height = max(1, _ENTRIES // max(across, 1))
    for first in range(0, length, height):
        yield slice(first, min(length, first + height))


def _checked(scale: float) -> float:
    if not abs(scale) <= LARGEST_LOGIT:
        raise ValueError(f"scale must be at most {LARGEST_LOGIT} for sums without a maximum, got {scale}")
    return scale


@torch.no_grad()
def lse_rows(rows: Tensor, columns: Tensor, index: Tensor, scale: float) -> Tensor:
    """Log-sum-exps of the indexed rows over all columns, float64."""
    q = rows[index].double()
    total = torch.zeros(len(index), device=q.device, dtype=torch.float64)
    for part in _chunks(columns.shape[0], len(index)):
        total += torch.exp(_checked(scale) * (q @ columns[part].double().T)).sum(1)
    return total.log()


@torch.no_grad()
def gradient_rows(rows: Tensor, columns: Tensor, index: Tensor, scale: float, own: Tensor, other: Tensor) -> Tensor:
    """The indexed rows of the gradient for ``rows``, float64; with the towers swapped, of that for ``columns``.

    Args:
        rows: (b, d) features.
        columns: (b, d) features of the other tower.
        index: (r,) rows.
        scale: of the logits.
        own: (r,) log-sum-exps of the indexed rows.
        other: (b,) log-sum-exps of all columns.
    """
    q, b = rows[index].double(), rows.shape[0]
    out = torch.zeros_like(q)
    for part in _chunks(columns.shape[0], len(index)):
        k = columns[part].double()
        x = scale * (q @ k.T)
        out += (torch.exp(x - own[:, None]) + torch.exp(x - other[part].double())) @ k
    return scale / (2 * b) * (out - 2 * columns[index].double())
