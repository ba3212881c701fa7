# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Operands of the products: the features themselves, or float32 features divided into factors, chunk by chunk.

Only the factors of one chunk of rows and one of columns are held: O(d) bytes for each row of a chunk.
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
"""Bytes of each row and column: a running sum in float64; scales of the epilogue, weights and G at the positives."""

# as parts.PART
PART = torch.float32 if INTERPRETED else torch.bfloat16


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the products of one precision are taken.

    Attributes:
        how: parts.PLAIN, TF32 or SPLIT: the factors in the product X.
        parts: 1, 2 or 3 factors of G and of the features in the products that follow.
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
            # cuBLAS would take tf32 by a switch of the whole process; three products of bfloat16 cost about as much
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

    Where torch sees no GPU it is that of a Hopper.
    """
    like = torch.empty(0, dtype=getattr(torch, dtype))
    scheme = Scheme.of(like, options)
    place = torch.empty(0, device="cuda") if torch.cuda.is_available() else None
    here = 90 if place is None else architecture(place)

    def config(kernel: str) -> Config:
        return tile_config(kernel, scheme.dtype, here, width, scheme.precision)

    partials, c = 0, config("lse")
    for numbers in (1, 2):
        high, wide = forward_chunk(m, n, c.shape, options, numbers)
        partials = max(partials, 4 * numbers * (ceil_div(wide, c.bn) * high + ceil_div(high, c.bm) * wide))
    itemsize = int(scheme.g_dtype(like).itemsize) * scheme.parts
    # of the rows' and the columns' chunk: what the products read, and what the second ones multiply with
    factors = 0 if scheme.how == parts.PLAIN.value else 2 * width * (scheme.parts + (0 if scheme.divided else 2))

    def space(others: int, sums: int) -> int:
        high, wide = backward_chunk(m, n, itemsize, config("gradient").bm, options, others)
        return high * wide * itemsize + sums * high + factors * (high + wide) + _BACKWARD_VECTORS * (m + n)

    return Footprint(
        partials + _FORWARD_VECTORS * (m + n),
        space(0, 0),
        space(row_bytes(m, width, like.itemsize), 4 * width),
        inner=4 * (m + min(m, ARRAYS.inner_rows(width, host=False)) * width),
    )


def row_bytes(m: int, width: int, itemsize: int) -> int:
    """Workspace for the rows' gradient: float32 sums of a chunk of 16,384 rows, and the whole gradient."""
    return 4 * min(m, 2**14) * width + m * width * itemsize


class Side:
    """The rows or the columns of a block.

    Attributes:
        x: (length, d) features, rows 16-byte aligned.
        depth: features that the tile kernels take, zeros included.
        plain: whether they take the features themselves.
    """

    def __init__(self, features: Any, scheme: Scheme) -> None:
        self.x, self.scheme, self.plain = aligned(features), scheme, scheme.how == parts.PLAIN.value
        self.span = -(-self.x.shape[1] // PAD) * PAD
        self.depth = self.span if scheme.divided else self.x.shape[1]
        self._held: dict[tuple[int, int], tuple[tuple[int, int], Any]] = {}

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
        held = self._factors(start, length, parts.SPLIT.value, self.scheme.parts, PART)
        return [held[:, which * self.span :][:, : self.x.shape[1]] for which in range(self.scheme.parts)]

    def _factors(self, start: int, length: int, how: int, count: int, dtype: Any) -> Any:
        """The factors of a chunk, part beside part; those of the last chunk are kept."""
        place, held = self._held.get((how, count), ((0, 0), None))
        if held is None or place != (start, length):
            x = lines(self.x, start, length)
            if held is None or held.shape[0] < length:
                held = workspace(length, count * self.span, dtype, x)
            held = held[:length]
            tall, width = max(1, LINES // 2), step(self.span)
            sizes = length, x.shape[1], self.span, x.stride(0), held.stride(0)
            programs = ceil_div(length, tall), ceil_div(self.span, width)
            parts.divide[programs](x, held, *sizes, HOW=how, PARTS=count, LINES=tall, BD=width)
            self._held[how, count] = (start, length), held
        return held


def features_of(sides: Sequence[Side], chunk: Chunk, config: Config) -> list[Any]:
    """Descriptors of a chunk's rows and columns, of which ``sides`` has the features."""
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
        guide: the rows' and the columns' features of the guide; none where there is no guide.
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
        of_guide = block.pairs.row_guide, block.pairs.column_guide
        self.guide = [Side(x, self.scheme) for x in of_guide if x is not None]
        self.depth = self.sides[0].depth
        self._marks: Any = None
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
        """The descriptor of a guide's marks of a chunk, until the next call; None where there is no guide."""
        if not self.guide:
            return None
        high, wide = chunk.height, ceil_div(chunk.width, config.bn) * config.bn // 2
        held = self._marks
        if held is None or held.shape[0] < high or held.shape[1] < wide:
            held = self._marks = workspace(high, wide, torch.int8, self.rows)
        marks = descriptor(held[:high, :wide], (config.bm, config.bn // 2))
        guide.mark_tiles[grid(chunk.height, chunk.width, config, self.rows)](
            *features_of(self.guide, chunk, config), marks, status, *self.masks.limits, self.m, self.n, *chunk,
            depth=self.guide[0].depth, SAFE=safe, DIVIDED=self.scheme.divided, **config.named,
        )  # fmt: skip
        return marks

    def positive_dots(self, logits: Any, sums: Any) -> None:
        """Each row's positive logit to logits and sums, (m,) float64; -inf and 0 where it has none."""
        q, k, scheme = self.rows, self.columns, self.scheme
        narrow = scheme.divided or q.itemsize == 2
        size, depth = (16, 16) if INTERPRETED else (64, 64 if narrow else 32)
        features = q, k, q.stride(0), k.stride(0), self.m, self.n
        scalars = self.block.scale, self.block.bias
        positives.positive_dots[(ceil_div(self.m, size),)](
            *features, self.masks.pairs.positives, self.masks.pairs.excluded, *scalars, logits, sums,
            depth=q.shape[1], HOW=scheme.how, PRECISION=scheme.precision, BM=size, BK=depth,
        )  # fmt: skip
