"""Sampled rows of a symmetric loss in float64, and how far a backend may be off there.

The bounds are those of ``contrastile.verify.bounds`` with every logit, norm and product of magnitudes replaced by its
largest value over the batch, so that they can be taken while the columns come by in pieces. They are never smaller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from contrastile.verify.arithmetic import Arithmetic, Lengths, gamma

Tensor = torch.Tensor
FloatArray = npt.NDArray[np.float64]
Pieces = Iterable[tuple[int, Tensor]]


@dataclass(frozen=True)
class Scene:
    """What the bounds need to know of the whole batch.

    Attributes:
        arithmetic: of the backend, on shards as they are.
        pairs: b.
        width: d.
        scale: s.
        longest: the largest norms of a row and of a column.
    """

    arithmetic: Arithmetic
    pairs: int
    width: int
    scale: float
    longest: float

    @property
    def weight(self) -> float:
        """``1 / (2b)`` of every row and column, as float32 holds it."""
        return float(np.float32(0.5 / self.pairs))

    @property
    def largest(self) -> float:
        """No logit is larger."""
        return abs(self.scale) * self.longest**2

    @property
    def logit(self) -> float:
        """E, the error of a logit: by Cauchy and Schwarz ``sum_k |q_k| |k_k| <= |q| |k|``."""
        a = self.arithmetic
        products = a.product(self.width, 2) * self.longest**2
        return abs(self.scale) * (products + self.width * a.tiny) + a.tiny

    @property
    def reference(self) -> float:
        """No exponential is taken against a larger one: see ``bounds._lse_error``."""
        return self.largest if self.arithmetic.accuracy.shared_reference else self.largest + self.logit

    def lse(self, lengths: Lengths) -> float:
        """Error of a log-sum-exp: see ``bounds._lse_error``."""
        a, x, r, E = self.arithmetic, self.largest, self.reference, self.logit
        u, c = a.accuracy.unit, a.accuracy.exp_ulps
        size = x + math.log(self.pairs)
        moved = (1 + 6 * u) * E + u * (3 * x + 3 * r + c)
        summed = gamma(u * (lengths.tile + lengths.parts * (2 * c + 2)))
        stored = u * ((lengths.parts + 1) * size + 2 * r + c * (size + r))
        flushed = u if a.accuracy.shared_reference else self.pairs * a.tiny
        return (moved + summed + stored + flushed) * (1 + gamma(u * (lengths.parts + 4)))

    def positive(self) -> float:
        """Error of a positive logit: see ``bounds._positive_error``."""
        relative = 3 * self.arithmetic.accuracy.unit
        return self.logit + relative / (1 - relative) * (self.largest + self.logit)

    def loss(self, *, given_lse: bool = False) -> float:
        """Error of the loss, or of what the log-sum-exps that were found make of it: see ``_softmax_loss_error``."""
        a = self.arithmetic
        # the weights of a direction add to 1/2, each rounded once
        errors = self.positive() + (0.0 if given_lse else (self.lse(a.over_columns) + self.lse(a.over_rows)) / 2)
        size = 2 * (self.largest + math.log(self.pairs)) + errors
        # float64 sums, the truth's too
        errors += 2 * gamma(2.0**-53 * (2 * self.pairs + self.width + 8 + a.totals)) * size
        errors *= 1 + 2 * a.accuracy.unit
        return errors + a.accuracy.unit * (size + errors) + a.tiny

    def probability(self, lse: float, lengths: Lengths) -> tuple[float, float]:
        """Relative and absolute error of ``exp(x - L)`` where L is known to ``lse``: see ``_probability_error``."""
        a, x = self.arithmetic, self.largest
        u, c = a.accuracy.unit, a.accuracy.exp_ulps
        shared = a.accuracy.shared_reference
        extra = 6 * self.reference + c + 1 if shared else 0.0
        eta = (1 + 6 * u) * (self.logit + lse) + u * (3 * x + 3 * (x + math.log(self.pairs)) + c + extra)
        return math.expm1(eta), a.tiny + (u / lengths.shortest if shared else 0.0)


@torch.no_grad()
def lse_rows(rows: Tensor, columns: Pieces, scale: float) -> Tensor:
    """Log-sum-exps of some rows over all columns, (r,) float64.

    Args:
        rows: (r, d) features.
        columns: the number of each piece's first column, and the piece.
        scale: of the logits.
    """
    q = rows.double()
    found = torch.full((len(q),), -math.inf, dtype=torch.float64, device=q.device)
    for _, piece in columns:
        found = torch.logaddexp(found, torch.logsumexp(scale * (q @ piece.double().T), dim=1))
    return found


@dataclass(frozen=True)
class Gradient:
    """Some rows of a gradient: the truth and its bound, (r, d) each, on the host."""

    exact: FloatArray
    bound: FloatArray


@torch.no_grad()
def gradient_rows(
    scene: Scene,
    rows: Tensor,
    numbers: Tensor,
    columns: Pieces,
    own: Tensor,
    others: Tensor,
    lengths: tuple[Lengths, Lengths],
    slack: float = 0.0,
) -> Gradient:
    """Rows of the gradient for ``rows`` in float64, and their bound; with the towers swapped, of that for the columns.

    A row's own log-sum-exp is the exact one. Those of all columns would take a pass over all pairs: they are the
    measured run's, which its samples are held to by themselves.

    Args:
        scene: the batch.
        rows: (r, d) features.
        numbers: (r,) their numbers in the batch, which are those of their positives.
        columns: the number of each piece's first column, and the piece.
        own: (r,) exact log-sum-exps of the rows, float64.
        others: (b,) the run's log-sum-exps of the columns.
        lengths: how sums over the columns are taken, and those over the rows.
        slack: how far ``others`` may be from what the run had.
    """
    a, w = scene.arithmetic, scene.weight
    facts, rounding = a.accuracy, gamma(6 * a.accuracy.unit)
    first, across = (
        scene.probability(error, length) for error, length in zip((scene.lse(lengths[0]), slack), lengths, strict=True)
    )
    # |dG| <= w (slope p + slope' p') + constant, before G is rounded
    slopes = [relative + rounding * (1 + relative) for relative, _ in (first, across)]
    constant = w * (1 + rounding) * (first[1] + across[1]) + 8 * a.tiny
    q = rows.double()
    total, sizes, moved = (torch.zeros_like(q) for _ in range(3))
    everything = torch.zeros(q.shape[1], dtype=torch.float64, device=q.device)
    for start, piece in columns:
        k = piece.double()
        x = scene.scale * (q @ k.T)
        p, other = torch.exp(x - own[:, None]), torch.exp(x - others[start : start + len(k)].double())
        G, dG = w * (p + other), w * (slopes[0] * p + slopes[1] * other)
        here = (numbers >= start) & (numbers < start + len(k))
        at = here.nonzero()[:, 0], (numbers - start)[here]
        G[at] -= 2 * w
        dG[at] += 2 * rounding * w
        magnitude = k.abs()
        total += G @ k
        sizes += G.abs() @ magnitude
        moved += dG @ magnitude
        everything += magnitude.sum(0)
    wrong = moved + constant * everything
    wrong = wrong + facts.gradient_rounding * (sizes + wrong) + facts.gradient_underflow * w * everything
    wrong = wrong + a.product(lengths[0].longest, lengths[0].parts) * (sizes + wrong) + scene.pairs * a.tiny
    exact, error = (scene.scale * total).cpu().numpy(), (abs(scene.scale) * wrong).cpu().numpy()
    error = error + gamma((2 + 2 * a.shared) * facts.unit) * (np.abs(exact) + error) + 2 * a.tiny
    # the truth is float64 and rounds too: its sums, and its logits in the exponents
    roundings = scene.pairs + 64 + (scene.width + 4) * (1 + 2 * scene.largest)
    double = gamma(2.0**-53 * roundings) * (abs(scene.scale) * (sizes + 2 * w * everything)).cpu().numpy()
    return Gradient(exact, a.cast(exact, error) + double)


def ratio(got: Any, exact: Any, bound: Any) -> float:
    """The largest ``|got - exact| / bound``; inf where a value is not finite."""
    got, exact = (np.asarray(x.cpu() if isinstance(x, Tensor) else x, dtype=np.float64) for x in (got, exact))
    if not exact.size:
        return 0.0
    with np.errstate(all="ignore"):
        found = np.abs(got - exact) / bound
    return float(np.where(np.isfinite(found), found, math.inf).max())
