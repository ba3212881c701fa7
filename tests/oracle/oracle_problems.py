"""Problems for the tests of the oracle: ragged, with every kind of pair, drawn by hypothesis.

Features, scales and biases are on a dyadic grid.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from contrastile.oracle.general import Direction, logits
from contrastile.oracle.pairs import Pairs, target_weights

Floats = npt.NDArray[np.float64]
GRID = 2.0**-12


def on_grid(values: npt.ArrayLike) -> Floats:
    return np.round(np.asarray(values) / GRID) * GRID


@dataclass(frozen=True)
class Problem:
    """A problem: rows, columns, scale of shape () or (m,), bias, pairs, weights of rows and of columns."""

    q: Floats
    k: Floats
    scale: Any
    bias: float = 0.0
    pairs: Pairs = field(default_factory=Pairs)
    u: Floats = field(default_factory=lambda: np.zeros(0))
    v: Floats = field(default_factory=lambda: np.zeros(0))

    @cached_property
    def x(self) -> Floats:
        return logits(self.q, self.k, self.scale, self.bias)

    @cached_property
    def P(self) -> npt.NDArray[np.bool_]:  # noqa: N802
        return self.pairs.positive(*self.x.shape)

    @cached_property
    def A(self) -> npt.NDArray[np.bool_]:  # noqa: N802
        return self.pairs.admitted(*self.x.shape)

    @cached_property
    def y(self) -> Floats:
        return self.P * target_weights(self.P)[:, None]

    @cached_property
    def y_c(self) -> Floats:
        return self.P * target_weights(self.P.T)

    def moved(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    @property
    def sides(self) -> list[Direction]:
        """The argument of `loss` and `gradient_of_logits`."""
        rows = Direction(self.x, self.A, self.P, self.u, target_weights(self.P))
        return [rows, Direction(self.x.T, self.A.T, self.P.T, self.v, target_weights(self.P.T))]


def random_pairs(rng: np.random.Generator, m: int, n: int, kind: str, exclude: bool) -> Pairs:
    """Random pairs. Indices run from -1 to n, so that some rows have no positive and some exclude nothing."""
    ids = rng.integers(0, max(2, (m + n) // 3), size=m), rng.integers(0, max(2, (m + n) // 3), size=n)
    return Pairs(
        positives=None if kind == "labels" else rng.integers(-1, n + 1, size=m),
        row_ids=None if kind == "plain" else ids[0],
        column_ids=None if kind == "plain" else ids[1],
        match="target" if kind == "labels" else "drop",
        excluded=rng.integers(-1, n + 1, size=m) if exclude else None,
    )


def random_problem(
    seed: int, m: int, n: int, d: int, kind: str, exclude: bool, per_row: bool, heat: float, bias: bool
) -> Problem:
    """A random problem with signed weights. Some are 0, and so is the weight of a row or column that admits nothing."""
    rng = np.random.default_rng(seed)
    scale = on_grid(heat * rng.uniform(0.5, 1.0, size=m if per_row else ()))
    p = Problem(
        q=on_grid(rng.standard_normal((m, d))),
        k=on_grid(rng.standard_normal((n, d))),
        scale=scale if per_row else float(scale),
        bias=float(on_grid(rng.standard_normal())) if bias else 0.0,
        pairs=random_pairs(rng, m, n, kind, exclude),
    )
    u, v = (rng.standard_normal(size) * rng.integers(0, 4, size=size).clip(0, 1) for size in (m, n))
    return p.moved(u=np.where(p.A.any(axis=1), u, 0.0), v=np.where(p.A.any(axis=0), v, 0.0))


PROBLEMS = st.builds(
    random_problem,
    seed=st.integers(0, 2**32 - 1),
    m=st.integers(0, 5),
    n=st.integers(0, 5),
    d=st.integers(1, 5),
    kind=st.sampled_from(["plain", "ids", "labels"]),
    exclude=st.booleans(),
    per_row=st.booleans(),
    heat=st.sampled_from([1.0, 14.0, 100.0]),
    bias=st.booleans(),
)
RAGGED = random_problem(1, 7, 11, 5, "ids", True, True, 14.0, True)
