"""The symmetric loss in float64 on the very features that were given, chunk by chunk on their own device.

With pairs of unit length ``|x| <= s``, and exponentials of float64 reach 709: sums are taken without a maximum, and a
larger scale is refused. Sampled rows of dQ need every column's log-sum-exp: where a whole float64 pass is too dear,
those of the measured run are taken, themselves checked on samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from contrastile.bench.workloads import COSINE, Arguments

LARGEST_LOGIT = 650.0
_ENTRIES = 2**27


def features(b: int, d: int, scale: float, device: str, dtype: str, *, cosine: float = COSINE, seed: int = 0) -> Any:
    """Unit pairs of this cosine, rounded to ``dtype``, as arguments of a loss; drawn on the device, the same each time.

    Args:
        b: pairs.
        d: width.
        scale: multiplies the dot products.
        device: "cuda" or "cpu".
        dtype: of the features.
        cosine: of a pair; other pairs are orthogonal on average.
        seed: of the generator.
    """
    generator = torch.Generator(device).manual_seed(seed)
    image, text = (torch.empty(b, d, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    normalize = torch.nn.functional.normalize
    for first in range(0, b, 65536):
        part = slice(first, min(b, first + 65536))
        shape = part.stop - first, d
        one, noise = (normalize(torch.randn(shape, device=device, generator=generator), dim=1) for _ in range(2))
        image[part] = one
        text[part] = normalize(cosine * one + (1 - cosine**2) ** 0.5 * noise, dim=1)
    s = torch.tensor(scale, device=device, requires_grad=True)
    return Arguments(image.requires_grad_(), text.requires_grad_(), s, None)


def sample(b: int, count: int, device: str) -> Any:
    """``count`` different indices below b, sorted: the first, the last, and drawn ones between."""
    if count >= b:
        return torch.arange(b, device=device)
    drawn = torch.randperm(b, generator=torch.Generator().manual_seed(b))[:count]
    drawn[:2] = torch.tensor([0, b - 1])
    return torch.unique(drawn).to(device)


def relative(got: Any, exact: Any) -> float:
    """``|got - exact| / |exact|`` in the Frobenius norm, in float64; NaN stays NaN."""
    got, exact = (torch.as_tensor(x, dtype=torch.float64) for x in (got, exact))
    return float((got - exact).norm() / exact.norm())


def _chunks(length: int, across: int) -> Iterator[slice]:
    height = max(1, _ENTRIES // max(across, 1))
    for first in range(0, length, height):
        yield slice(first, min(length, first + height))


def _checked(scale: float) -> float:
    if not abs(scale) <= LARGEST_LOGIT:
        raise ValueError(f"scale must be at most {LARGEST_LOGIT} for sums without a maximum, got {scale}")
    return scale


@dataclass(frozen=True, slots=True)
class Whole:
    """The loss over all pairs: (b,) log-sum-exps of rows and columns, the loss and its derivative by the scale."""

    row_lse: Any
    column_lse: Any
    loss: Any
    d_scale: Any


@torch.no_grad()
def whole(given: Arguments) -> Whole:
    """Everything but the features' gradients, from one pass over the dot products z.

    ``dscale = sum_i u (E_p[z_i] + E_p'[z_i] - 2 z_ii)``, ``u = 1 / (2b)``: sums of ``exp(s z)``, ``z exp(s z)``.
    """
    q, k, s = given.image, given.text.double(), _checked(float(given.scale.detach()))
    b = q.shape[0]
    row, row_z = (torch.empty(b, device=q.device, dtype=torch.float64) for _ in range(2))
    column, column_z = (torch.zeros(b, device=q.device, dtype=torch.float64) for _ in range(2))
    for part in _chunks(b, b):
        z = q[part].double() @ k.T
        e = torch.exp(s * z)
        row[part], at = e.sum(1), e.sum(0)
        column += at
        z *= e
        row_z[part] = z.sum(1)
        column_z += z.sum(0)
    own = torch.cat([(q[part].double() * k[part]).sum(1) for part in _chunks(b, k.shape[1])])
    loss = (row.log() - s * own).mean() / 2 + (column.log() - s * own).mean() / 2
    d_scale = ((row_z / row + column_z / column) / 2 - own).mean()
    return Whole(row.log(), column.log(), loss, d_scale)


@torch.no_grad()
def lse_rows(rows: Any, columns: Any, index: Any, scale: float) -> Any:
    """Log-sum-exps of the indexed rows over all columns, float64."""
    q = rows[index].double()
    total = torch.zeros(len(index), device=q.device, dtype=torch.float64)
    for part in _chunks(columns.shape[0], len(index)):
        total += torch.exp(_checked(scale) * (q @ columns[part].double().T)).sum(1)
    return total.log()


@torch.no_grad()
def gradient_rows(rows: Any, columns: Any, index: Any, scale: float, own: Any, other: Any) -> Any:
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


def errors(given: Arguments, exact: Whole, index: Any, loss: Any, gradients: Any) -> dict[str, float]:
    """Relative errors of a loss and its gradients: image and text over the indexed rows, Frobenius."""
    s = float(given.scale.detach())
    image, text = given.image.detach(), given.text.detach()
    d_image = gradient_rows(image, text, index, s, exact.row_lse[index], exact.column_lse)
    d_text = gradient_rows(text, image, index, s, exact.column_lse[index], exact.row_lse)
    return {
        "loss": relative(loss, exact.loss),
        "d_image": relative(gradients[0][index], d_image),
        "d_text": relative(gradients[1][index], d_text),
        "d_scale": relative(gradients[2], exact.d_scale),
    }
