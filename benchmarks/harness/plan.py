"""The sizes of a run, for GPUs and for a run that only shows that it runs.

A batch of b pairs on n ranks costs each of them ``8 b^2 d / n`` FLOPs, forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WIDTH = 512


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to time.

    Attributes:
        b: pairs, of the whole batch or of each rank.
        d: width.
        scale: multiplies the dot products.
        what: "both", "forward" or "backward".
        graph: replayed as a CUDA graph.
        each: b counts the pairs of each rank.
    """

    b: int
    d: int = WIDTH
    scale: float = 100.0
    what: str = "both"
    graph: bool = False
    each: bool = False

    def rows(self, n: int) -> int:
        """Pairs of one of n ranks."""
        return self.b if self.each else self.b // n

    def flops(self, n: int) -> float:
        """Of each rank, for the products that are needed: one forward, three backward (X again, dQ, dK)."""
        return {"both": 8.0, "forward": 2.0, "backward": 6.0}[self.what] * self.rows(n) ** 2 * n * self.d

    def row(self, n: int) -> dict[str, Any]:
        """As columns of a record's row."""
        rows = self.rows(n)
        where = {"n": n, "rows": rows, "b": rows * n, "d": self.d, "scale": self.scale, "what": self.what}
        return where | {"graph": self.graph, "each": self.each}


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run.

    Attributes:
        steps: points of our own, on one process.
        scaling: points of our own on every number of ranks, by every exchange.
        peers: points at which all implementations are timed.
        big: (pairs, sampled rows) of single calls, by the number of ranks: of one, of several.
    """

    steps: tuple[Point, ...]
    scaling: tuple[Point, ...]
    peers: tuple[Point, ...]
    big: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]


GPU = Plan(
    steps=(
        *(Point(b, d) for b in (65536, 32768, 262144) for d in (512, 768, 1024)),
        *(Point(8192, d, graph=True) for d in (512, 1024)),
        Point(8192),
        Point(65536, scale=400.0),
        *(Point(b, what=what) for b in (65536, 32768, 8192) for what in ("forward", "backward")),
    ),
    scaling=(
        Point(32768, each=True),
        Point(65536),
        Point(262144),
        Point(32768, 1024, each=True),
        Point(131072),
        *(Point(b, each=True) for b in (2048, 4096, 8192, 16384, 65536)),
        Point(8192, each=True, graph=True),
    ),
    peers=(Point(65536), Point(32768), Point(8192), Point(8192, graph=True), Point(131072), Point(262144)),
    big=(((1_048_576, 256), (4_194_304, 128)), ((12_582_912, 128),)),
)
SMOKE = Plan(
    steps=(Point(96, 24), Point(96, 24, what="forward"), Point(96, 24, what="backward"), Point(160, 24, 400.0)),
    scaling=(Point(32, 24, each=True), Point(96, 24)),
    peers=(Point(96, 24), Point(160, 24)),
    big=(((257, 19),), ((512, 14),)),
)
"""Sizes that only show that everything runs."""
