"""What is measured: what was aimed at, all implementations side by side, a grid, errors, and big batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TRITON = "contrastile triton"
CUPY = "contrastile cupy"
AMPERE = "contrastile cupy, sm_80 kernels"
ROOMY_MIB = 2048
ROOMY = "contrastile cupy, workspace 2 GiB"
"""Four times the default of 512 MiB, for whoever has the memory."""
KEEPING_MIB = 2048
KEEPING = "contrastile cupy, keeping 2 GiB"
"""Exponentials kept from forward for backward: every one at b = 32,768, a quarter of them at b = 65,536."""
EVERY_MIB = 8192
EVERY = "contrastile cupy, keeping 8 GiB"
"""Every one at b = 65,536 too."""
TORCH = "contrastile torch"
OPEN_CLIP = "open_clip formula"
CHUNKED = "chunked PyTorch, compiled"
INF_CL = "inf_cl x2"
DEFAULT_CCE = "cut-cross-entropy x2, default"

FUSED = (TRITON, CUPY, AMPERE)
"""What the measurements are about: the implementations of this package that are made for GPUs."""

MORE_MEMORY = (ROOMY, KEEPING, EVERY)
"""One of them with more memory than it takes by default."""

WITHOUT_GPU = (TORCH, OPEN_CLIP, CHUNKED)
"""What also runs on a CPU, for a dry run."""

WIDTH = 512
"""The d at which all are compared."""

SAFE = 400.0
"""A scale at which unit features prove too little: no shared reference is safe for logits up to 400."""


@dataclass(frozen=True, slots=True)
class Point:
    """One thing to time.

    Attributes:
        b: pairs.
        d: width.
        scale: multiplies the dot products.
        what: "both", "forward" or "backward".
        graph: replayed as a CUDA graph.
    """

    b: int
    d: int
    scale: float = 100.0
    what: str = "both"
    graph: bool = False

    @property
    def flops(self) -> float:
        """Of the products that are needed: one forward, three backward (X again, dQ, dK), ``2 b^2 d`` each."""
        return {"both": 8.0, "forward": 2.0, "backward": 6.0}[self.what] * self.b * self.b * self.d

    def row(self) -> dict[str, Any]:
        """As the first columns of a record's row."""
        return {"b": self.b, "d": self.d, "scale": self.scale, "what": self.what, "graph": self.graph}


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run.

    Attributes:
        aims: the points that were aimed at, and the fraction of the ceiling for each implementation.
        peers: (b, rounds) at which all implementations are timed.
        peer_width: the d of the comparison.
        grid: further points of the fused backends.
        errors: (b, scale, sampled rows) at which all are held to float64; b of them are every row.
        repeats: (b, how many) that must agree bit for bit.
        pairs: sizes at which the loss of pairs that are alike must not be negative.
        big: (b, sampled rows) of single calls.
    """

    aims: tuple[tuple[Point, dict[str, float]], ...]
    peers: tuple[tuple[int, int], ...]
    peer_width: int
    grid: tuple[Point, ...]
    errors: tuple[tuple[int, float, int], ...]
    repeats: tuple[tuple[int, int], ...]
    pairs: tuple[int, ...]
    big: tuple[tuple[int, int], ...]


_AIMS = (
    (Point(65536, 512), {TRITON: 0.82, CUPY: 0.98, ROOMY: 0.98, KEEPING: 0.98, EVERY: 0.98, AMPERE: 0.55}),
    (Point(65536, 768), {CUPY: 0.99, KEEPING: 0.99, EVERY: 0.99}),
    (Point(65536, 1024), {TRITON: 0.88, CUPY: 1.0, KEEPING: 1.0, EVERY: 1.0}),
    (Point(32768, 512), {TRITON: 0.80, CUPY: 0.95, ROOMY: 0.95, KEEPING: 0.95, AMPERE: 0.55}),
    (Point(32768, 768), {CUPY: 0.97, KEEPING: 0.97}),
    (Point(32768, 1024), {TRITON: 0.86, CUPY: 0.98, KEEPING: 0.98}),
    (Point(262144, 512), {TRITON: 0.80, CUPY: 0.93}),
    (Point(262144, 1024), {TRITON: 0.86, CUPY: 0.96}),
    (Point(8192, 512, graph=True), {TRITON: 0.60, CUPY: 0.72}),
    (Point(65536, 512, SAFE), {TRITON: 0.68, CUPY: 0.80}),
)

_GRID = (
    *(Point(b, 512, what=what) for b in (65536, 32768, 8192) for what in ("forward", "backward")),
    *(Point(65536, d, 14.3) for d in (512, 768, 1024)),
    *(Point(b, 768) for b in (65536, 32768, 131072, 262144, 8192)),
    *(Point(b, d) for b in (131072, 16384, 8192) for d in (512, 1024)),
    *(Point(8192, d, graph=True) for d in (768, 1024)),
    Point(16384, 512, graph=True),
    Point(65536, 1024, SAFE),
)

GPU = Plan(
    aims=_AIMS,
    peers=((65536, 4), (32768, 3), (8192, 3), (131072, 3), (262144, 3)),
    peer_width=WIDTH,
    grid=_GRID,
    errors=((4096, 100.0, 4096), (4096, 14.3, 4096), (65536, 14.3, 512), (65536, 100.0, 512)),
    repeats=((65536, 20), (8191, 20)),
    pairs=(4096, 4099, 32768),
    big=((1048576, 256), (4194304, 128)),
)

SMOKE = Plan(
    aims=((Point(96, 24), {TORCH: 0.8}), (Point(160, 24), {TORCH: 0.8}), (Point(96, 24, 400.0), {TORCH: 0.6})),
    peers=((96, 2), (160, 2)),
    peer_width=24,
    grid=(Point(96, 24, what="forward"), Point(96, 24, what="backward"), Point(160, 40)),
    errors=((67, 14.3, 67), (160, 100.0, 31)),
    repeats=((97, 3),),
    pairs=(64,),
    big=((257, 19),),
)
"""Sizes that only show that everything runs."""
