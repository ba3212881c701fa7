"""What is measured: sizes of the parts of a run, for GPUs and for a run that only shows that it runs."""

from __future__ import annotations

from dataclasses import dataclass

RING, GATHER, AUTO, LOCAL = "ring", "gather", "auto", "local"
OPEN_CLIP = "open_clip local_loss + gather_with_grad"
COMPILED = "the same formula, compiled"
INF_CL = "inf_cl cal_inf_loss x2"
OURS = "contrastile"
IN_A_GRAPH = ", in a CUDA graph"


@dataclass(frozen=True, slots=True)
class Size:
    """A batch: so many pairs on every rank, or so many altogether.

    Attributes:
        pairs: how many.
        d: width.
        each: on every rank; else altogether.
    """

    pairs: int
    d: int
    each: bool = False

    def rows(self, n: int) -> int:
        """Pairs of one of n ranks."""
        return self.pairs if self.each else self.pairs // n


@dataclass(frozen=True, slots=True)
class Trial:
    """A check: ``pairs`` cut in proportion to the first n of ``weights`` (0 is a rank without rows), and joined."""

    pairs: int
    d: int
    scale: float
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run.

    Attributes:
        trials: held to the oracle in every element.
        sampled: pairs for each rank, d, and rows whose gradients are held to float64.
        scaling: timed on every number of ranks, by every schedule.
        shards: (pairs of a rank, d) at which ring and gather are timed on every number of ranks.
        hidden: (pairs of a rank, d) at which messages and products are timed apart.
        overlap: (pairs of a rank, d) at which one block is timed beside one message.
        grids: (waves, multiprocessors left alone) of a block's kernels: see ``overlap.launching``.
        peers: (b, d) at which others are timed.
        headline: pairs of the largest batch, d, sampled rows.
        scale: multiplies the dot products.
        dtype: of the features.
        graphs: pairs of a rank up to which steps are timed in CUDA graphs too.
    """

    trials: tuple[Trial, ...]
    sampled: tuple[int, int, int]
    scaling: tuple[Size, ...]
    shards: tuple[tuple[int, int], ...]
    hidden: tuple[tuple[int, int], ...]
    overlap: tuple[tuple[int, int], ...]
    grids: tuple[tuple[int, int], ...]
    peers: tuple[tuple[int, int], ...]
    headline: tuple[int, int, int]
    scale: float
    dtype: str
    graphs: int = 16384


GPU = Plan(
    trials=(
        Trial(1024, 512, 100.0, (5, 3, 0, 8, 1, 7, 2, 6)),
        Trial(1024, 512, 14.3, (1, 0, 2, 1, 0, 0, 5, 3)),
    ),
    sampled=(16384, 512, 256),
    scaling=(
        Size(32768, 512, each=True),
        Size(65536, 512),
        Size(262144, 512),
        Size(32768, 1024, each=True),
        Size(131072, 512),
        Size(262144, 1024),
        Size(8192, 512, each=True),
    ),
    shards=tuple((2048 << i, 512) for i in range(6)) + tuple((4096 << i, 1024) for i in range(3)),
    hidden=((32768, 512), (8192, 512), (16384, 512), (65536, 512), (32768, 1024)),
    overlap=((8192, 512), (32768, 512)),
    grids=((1, 0), (2, 0), (4, 0), (8, 0), (64, 0), (1, 16)),
    peers=((65536, 512), (32768, 512), (262144, 512), (131072, 512)),
    headline=(12_582_912, 512, 32),
    scale=100.0,
    dtype="bfloat16",
)

SMOKE = Plan(
    trials=(Trial(64, 24, 100.0, (5, 3, 0, 8)), Trial(64, 24, 14.3, (1, 0, 2, 1))),
    sampled=(48, 24, 9),
    scaling=(Size(32, 24, each=True), Size(96, 24)),
    shards=((32, 24),),
    hidden=((32, 24),),
    overlap=((32, 24),),
    grids=((1, 0),),
    peers=((64, 24),),
    headline=(512, 24, 7),
    scale=20.0,
    dtype="float32",
)
"""Sizes that only show that everything runs."""
