# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Operands of the products: the features themselves, or float32 features divided into parts, chunk by chunk.

Only the parts of one chunk of rows and of one chunk of columns are held: O(d) bytes for each row of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from contrastile.backends.contract import Block, Footprint, Options
from contrastile.backends.crossing import dtype_name
from contrastile.backends.passes import Chunk, backward_chunk, ceil_div, forward_chunk, lines, own_references
from contrastile.backends.triton import guide, parts, positives
from contrastile.backends.triton.arrays import ARRAYS
from contrastile.backends.triton.common import LINES, Masks, step
from contrastile.backends.triton.configs import INTERPRETED, PAD, Config, tile_config
from contrastile.backends.triton.launch import aligned, architecture, descriptor, grid, workspace

_FORWARD_VECTORS, _BACKWARD_VECTORS = 8, 20
"""Bytes of a row or column: a running sum in float64; scales of the epilogue, weights and G at the positives."""

# the torch dtype of parts.PART
PART = torch.float32 if INTERPRETED else torch.bfloat16


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the products of one precision are computed.

    Attributes:
        how: parts.PLAIN, TF32 or SPLIT: the form of the features in the product X.
        parts: 1, 2 or 3 parts of G and of the features in the second products.
        dtype: name of the dtype for which ``configs.tile_config`` picks the tiles.
        precision: ``input_precision`` of the kernels' products.
    """

    how: int
    parts: int
    dtype: str
    precision: str = "ieee"

    @staticmethod
    def of(features: Any, options: Options) -> Scheme:
        """The scheme for features of this dtype; the precision concerns float32 alone."""
        dtype = dtype_name(features.dtype)
        if dtype != "float32" or options.precision == "ieee":
            return Scheme(parts.PLAIN.value, 1, dtype)
        if options.precision == "tf32":
            # cuBLAS would need a global switch for tf32; three products of bfloat16 cost about as much
            return Scheme(parts.TF32.value, 2, "tf32", "tf32")
        return Scheme(parts.SPLIT.value, 3, "split")

    @property
    def divided(self) -> bool:
        """Whether X is the sum of several products."""
        return bool(self.how == parts.SPLIT.value)

    def g_dtype(self, features: Any) -> Any:
        """The dtype of G, or of its parts."""
        return features.dtype if self.parts == 1 else PART


def footprint(m: int, n: int, width: int, dtype: str, device: str, options: Options) -> Footprint:
    """See ``contract.Backend``: tiles' partial results; the workspace for G, sums of its rows, and vectors.

    Where torch sees no GPU, the footprint is that on a Hopper.
    """
    like = torch.empty(0, dtype=getattr(torch, dtype))
    scheme = Scheme.of(like, options)
    gpu = torch.empty(0, device="cuda") if torch.cuda.is_available() else None
    capability = 90 if gpu is None else architecture(gpu)

    def config(kernel: str) -> Config:
        return tile_config(kernel, scheme.dtype, capability, width, scheme.precision)

    partials, tile = 0, config("lse")
    for quantities in (1, 2):
        high, wide = forward_chunk(m, n, tile.shape, options, quantities)
        partials = max(partials, 4 * quantities * (ceil_div(wide, tile.bn) * high + ceil_div(high, tile.bm) * wide))
    itemsize = int(scheme.g_dtype(like).itemsize) * scheme.parts
    # bytes of the divided features of the rows' and the columns' chunk, for the product X and for the second products
    factors = 0 if scheme.how == parts.PLAIN.value else 2 * width * (scheme.parts + (0 if scheme.divided else 2))

    def gradient_bytes(other_bytes: int, sum_bytes: int) -> int:
        high, wide = backward_chunk(m, n, itemsize, config("gradient").bm, options, other_bytes)
        return high * wide * itemsize + sum_bytes * high + factors * (high + wide) + _BACKWARD_VECTORS * (m + n)

    return Footprint(
        partials + _FORWARD_VECTORS * (m + n),
        gradient_bytes(0, 0),
        gradient_bytes(row_bytes(m, width, like.itemsize), 4 * width),
        inner=4 * (m + min(m, ARRAYS.inner_rows(width, host=False)) * width),
    )


def row_bytes(m: int, width: int, itemsize: int) -> int:
    """Workspace for the rows' gradient: float32 sums of a chunk of 16,384 rows, and the whole gradient."""
    return 4 * min(m, 2**14) * width + m * width * itemsize


class Side:
    """The rows or the columns of a block.

    Attributes:
        x: (length, d) features, rows 16-byte aligned.
        depth: features that the tile kernels take, including padding.
        plain: whether the tile kernels take the features themselves.
    """

    def __init__(self, features: Any, scheme: Scheme) -> None:
        self.x, self.scheme, self.plain = aligned(features), scheme, scheme.how == parts.PLAIN.value
        self.span = -(-self.x.shape[1] // PAD) * PAD
        self.depth = self.span if scheme.divided else self.x.shape[1]
        self._cache: dict[tuple[int, int], tuple[tuple[int, int], Any]] = {}

    def tiles(self, start: int, length: int) -> Any:
        """The operand of the tile kernels for a chunk."""
        if self.plain:
            return lines(self.x, start, length)
        if self.scheme.divided:
            return self._factors(start, length, parts.SPLIT.value, 3, PART)
        return self._factors(start, length, parts.TF32.value, 1, torch.float32)

    def factors(self, start: int, length: int) -> list[Any]:
        """The operands of the second products: one matrix (length, d), or one for each part."""
        if self.scheme.parts == 1:
            return [lines(self.x, start, length)]
        memory = self._factors(start, length, parts.SPLIT.value, self.scheme.parts, PART)
        return [memory[:, part * self.span :][:, : self.x.shape[1]] for part in range(self.scheme.parts)]

    def _factors(self, start: int, length: int, how: int, count: int, dtype: Any) -> Any:
        """The parts of a chunk's features, side by side; those of the last chunk are cached."""
        cached_chunk, memory = self._cache.get((how, count), ((0, 0), None))
        if memory is None or cached_chunk != (start, length):
            x = lines(self.x, start, length)
            if memory is None or memory.shape[0] < length:
                memory = workspace(length, count * self.span, dtype, x)
            memory = memory[:length]
            rows_at_once, width = max(1, LINES // 2), step(self.span)
            sizes = length, x.shape[1], self.span, x.stride(0), memory.stride(0)
            programs = ceil_div(length, rows_at_once), ceil_div(self.span, width)
            parts.divide[programs](x, memory, *sizes, HOW=how, PARTS=count, LINES=rows_at_once, BD=width)
            self._cache[how, count] = (start, length), memory
        return memory


def features_of(sides: Sequence[Side], chunk: Chunk, config: Config) -> list[Any]:
    """Descriptors of the features of a chunk's rows and columns."""
    return [
        descriptor(side.tiles(start, length), (size, config.bk))
        for side, start, length, size in zip(sides, chunk[:2], chunk[2:], config.shape, strict=True)
    ]


class BlockPass:
    """A block prepared for one pass.

    Attributes:
        sides: the rows and the columns.
        rows: (m, d) features, rows 16-byte aligned.
        columns: (n, d) likewise.
        guide: the guide's features of the rows and of the columns; empty where there is no guide.
        depth: see ``Side``.
        plan: (PLAN_SIZE,) float32, written by one kernel and read by later ones; allocated by the pass.
        exact: see ``passes.own_references``.
    """

    plan: Any

    def __init__(self, block: Block, options: Options) -> None:
        self.block, self.options = block, options
        self.scheme = Scheme.of(block.rows, options)
        self.sides = Side(block.rows, self.scheme), Side(block.columns, self.scheme)
        self.rows, self.columns = (side.x for side in self.sides)
        guide_features = block.pairs.row_guide, block.pairs.column_guide
        self.guide = [Side(x, self.scheme) for x in guide_features if x is not None]
        self.depth = self.sides[0].depth
        self._marks_memory: Any = None
        self.m, self.n = self.rows.shape[0], self.columns.shape[0]
        self.masks = Masks(block)
        self.exact = own_references(dtype_name(self.rows.dtype))

    def config(self, kernel: str) -> Config:
        """The configuration of a kernel for this block."""
        scheme, width = self.scheme, self.rows.shape[1]
        if self.guide and kernel in ("lse", "gradient"):
            kernel = "guided"
        return tile_config(kernel, scheme.dtype, architecture(self.rows), width, scheme.precision)

    def marks(self, chunk: Chunk, config: Config, status: Any = None, *, safe: bool = False) -> Any:
        """The descriptor of a chunk's marks, valid until the next call; None where there is no guide."""
        if not self.guide:
            return None
        height, width = chunk.height, ceil_div(chunk.width, config.bn) * config.bn // 2
        memory = self._marks_memory
        if memory is None or memory.shape[0] < height or memory.shape[1] < width:
            memory = self._marks_memory = workspace(height, width, torch.int8, self.rows)
        marks = descriptor(memory[:height, :width], (config.bm, config.bn // 2))
        guide.mark_tiles[grid(chunk.height, chunk.width, config, self.rows)](
            *features_of(self.guide, chunk, config), marks, status, *self.masks.limits, self.m, self.n, *chunk,
            depth=self.guide[0].depth, SAFE=safe, DIVIDED=self.scheme.divided, **config.named,
        )  # fmt: skip
        return marks

    def positive_dots(self, logits: Any, sums: Any) -> None:
        """Write each row's positive logit to logits and sums, (m,) float64; -inf and 0 without a positive."""
        q, k, scheme = self.rows, self.columns, self.scheme
        is_16_bit = scheme.divided or q.itemsize == 2
        block, depth = (16, 16) if INTERPRETED else (64, 64 if is_16_bit else 32)
        features = q, k, q.stride(0), k.stride(0), self.m, self.n
        scalars = self.block.scale, self.block.bias
        positives.positive_dots[(ceil_div(self.m, block),)](
            *features, self.masks.pairs.positives, self.masks.pairs.excluded, *scalars, logits, sums,
            depth=q.shape[1], HOW=scheme.how, PRECISION=scheme.precision, BM=block, BK=depth,
        )  # fmt: skip
