"""The tile kernels of each GPU, their tiles, and the size of a chunk of X.

They are fixed by measurement (``docs/benchmarks/gpu.md``): the same shapes give the same bits everywhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from contrastile.backends.contract import Footprint, Options
from contrastile.backends.cupy.arguments import constant
from contrastile.backends.passes import backward_chunk, ceil_div, forward_chunk
from contrastile.backends.settings import CUPY_KERNELS, workspace_bytes

CUBLAS_BYTES = 32 * 2**20
"""Workspace of cuBLAS for a pass: the size that NVIDIA recommends for Hopper."""

NARROW_SIDE, _ALL_SHARED = constant("NARROW_SIDE"), constant("ALL_SHARED")


@dataclass(frozen=True, slots=True)
class Family:
    """The tile kernels of one kind of GPU.

    Attributes:
        name: the suffix of the kernels' names and files.
        bm: rows of a tile.
        bn: columns of a tile.
        threads: threads of a block.
        resident: blocks that share a multiprocessor: one's epilogue runs behind another's products.
        cluster: blocks that work together, on tiles above one another.
        maps: whether features and G are passed as tensor maps too.
        stages: steps of the pipeline held in shared memory, where that is a template argument.
        band: tile rows (or rows of clusters) walked together, which then share the L2 cache.
    """

    name: str
    bm: int
    bn: int
    threads: int
    resident: int = 1
    cluster: int = 1
    maps: bool = False
    stages: int | None = None
    band: int = 16

    def blocks(self, height: int, width: int, multiprocessors: int) -> int:
        """Blocks of a persistent kernel over the tiles of a (height, width) matrix: no more than can be resident."""
        units = ceil_div(height, self.step) * ceil_div(width, self.bn)
        return self.cluster * min(multiprocessors * self.resident // self.cluster, units)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.bm, self.bn

    @property
    def step(self) -> int:
        """Rows of the tiles that are computed together."""
        return self.bm * self.cluster

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory; each of Hopper's own kernels has a multiprocessor alone, and takes all."""
        return _ALL_SHARED if self.stages is None else self.stages * 32768 + 10240


HOPPER = Family("sm90", bm=128, bn=192, threads=384, cluster=2, maps=True)
AMPERE = Family("sm80", bm=128, bn=128, threads=128, resident=2, band=8, stages=2)

_MULTIPROCESSORS = 132
"""The number of a Hopper GPU, used on every GPU, so that the same shapes give the same bits."""

_STEP_OF_ALL = 128 * 256 * 64 * _MULTIPROCESSORS
_FIRST_STEPS, _ADDED_A_STEP = 5, 2**19
"""Products of kept exponentials: multiplications in one step of all blocks, the overhead of a block in steps, and the
number of sums that are added in the time of a step."""

# the GPUs whose multiprocessors have 228 KiB of shared memory, enough for two blocks of three stages
_THREE_STAGES = (90, 100, 103, 110)


def uses_hopper_kernels() -> bool:
    """Whether Hopper uses its own kernels: unless a test sets CONTRASTILE_CUPY_KERNELS=sm80.

    Raises:
        ValueError: the environment names unknown kernels.
    """
    value = os.environ.get(CUPY_KERNELS)
    if value not in (None, "sm80"):
        raise ValueError(f"{CUPY_KERNELS} must be sm80 or unset, got {value!r}; unset it for the GPU's own kernels")
    return value is None


def kernel_family(dtype: str, capability: int, *, hopper: bool = True) -> Family:
    """The kernels for features of a dtype on a GPU.

    Args:
        dtype: name of the features' dtype.
        capability: compute capability times 10. Only Hopper has the instructions of its kernels: newer GPUs lack them.
        hopper: whether Hopper's own kernels may be used.
    """
    if capability == 90 and hopper and dtype != "float32":
        return HOPPER
    return replace(AMPERE, stages=3) if capability in _THREE_STAGES else AMPERE


def narrow(width: int, family: Family) -> bool:
    """Whether the rows' statistics and gradient, if no others are requested, have kernels of their own.

    These kernels compute the logits of a symmetric block twice, and take little more than the time of its products.
    For narrower features they would multiply zeros; for wider ones, the sums do not fit beside the logits.
    """
    return family.maps and NARROW_SIDE // 2 < width <= NARROW_SIDE


@dataclass(frozen=True, slots=True)
class Shares:
    """How the kernels of narrow features divide the tiles of a chunk among their blocks: as ``Shares`` in CUDA.

    Attributes:
        rows: the number of tile rows.
        blocks: the number of blocks of the grid.
        most: the largest number of blocks that share a tile row.
    """

    rows: int
    blocks: int
    most: int

    @staticmethod
    def of(height: int, width: int, multiprocessors: int) -> Shares:
        """An equal share of a chunk of (height, width) for each block."""
        rows, columns = ceil_div(height, NARROW_SIDE), ceil_div(width, NARROW_SIDE)
        blocks = min(multiprocessors, rows * columns)
        # the shares that begin in a tile row, and one that begins before it
        return Shares(rows, blocks, min(columns, ceil_div(blocks, rows) + 1))


def kept_stride(n: int) -> int:
    """Elements from one row of kept exponentials to the next: rows of bfloat16 begin at multiples of 16 bytes."""
    return ceil_div(n, 8) * 8


def kept_rows(m: int, n: int, room: int) -> int:
    """How many of the first rows have their exponentials kept.

    Args:
        m: rows of the block.
        n: its columns.
        room: bytes that the exponentials may take.
    """
    most, step = room // (2 * kept_stride(n)), HOPPER.step
    return _whole_units(m, most, step) if most >= min(m, step) else 0


def weighted_blocks(lines: int, width: int) -> int:
    """Blocks of a product of kept exponentials, (lines, width): two blocks compute 256 lines and columns together."""
    return 2 * ceil_div(lines, 256) * ceil_div(width, 256)


def _weighted_steps(lines: int, width: int, depth: int, shares: int) -> float:
    """The time of a product of kept exponentials over ``depth``, and of adding its shares, in steps of one block."""
    waves = ceil_div(weighted_blocks(lines, width) * shares, _MULTIPROCESSORS)
    return waves * (ceil_div(depth, 64 * shares) + _FIRST_STEPS) + shares * lines * width / _ADDED_A_STEP


def weighted_shares(lines: int, width: int, depth: int) -> int:
    """The number of shares of the contraction of such a product that leaves the fewest multiprocessors idle."""
    most = min(8, ceil_div(depth, 64))
    return min(range(1, most + 1), key=lambda shares: _weighted_steps(lines, width, depth, shares))


def keeping_pays(m: int, n: int, width: int) -> bool:
    """Whether a step of m rows is faster with their exponentials kept.

    It is faster where both products fill the multiprocessors well; narrow features need less, because forming their G
    costs more than its products.
    """
    shapes = (m, n), (n, m)
    steps = sum(_weighted_steps(a, width, b, weighted_shares(a, width, b)) for a, b in shapes)
    return 2 * m * n * width / _STEP_OF_ALL >= steps * (0.82 if width > 256 else 0.65)


def narrow_rows(m: int, options: Options) -> int:
    """Rows whose sums fit in the workspace, for kernels that keep G out of memory."""
    return min(m, max(1, workspace_bytes(options) // (4 * NARROW_SIDE)))


def footprint(m: int, n: int, width: int, dtype: str, capability: int, options: Options) -> Footprint:
    """The memory of a block: tiles' partial results; the workspace for G, sums of its rows, and vectors.

    It does not include kept exponentials.

    Args:
        m: rows of the block.
        n: columns of the block.
        width: features of a row.
        dtype: name of the features' dtype.
        capability: compute capability times 10.
        options: tile and workspace.
    """
    family = kernel_family(dtype, capability, hopper=uses_hopper_kernels())
    high, wide = forward_chunk(m, n, family.shape, options, 2, family.cluster)
    partials = 8 * (ceil_div(wide, family.bn) * high + ceil_div(high, family.bm) * wide)
    itemsize = 4 if dtype == "float32" else 2
    high, wide = backward_chunk(m, n, itemsize, family.step, options)
    gradient_bytes = high * wide * itemsize + CUBLAS_BYTES + 20 * (m + n)
    return Footprint(partials + 8 * (m + n), gradient_bytes, gradient_bytes + 4 * high * width)


def _whole_units(length: int, most: int, step: int) -> int:
    """The length, or its largest part that is at most ``most`` and a multiple of 8,192, or else of ``step``."""
    return length if most >= length else next(most // unit * unit for unit in (8192, step) if most >= unit)
