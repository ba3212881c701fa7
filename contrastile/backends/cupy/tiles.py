"""Launches of tile kernels, of any family, over one chunk of a block."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

import cupy
import numpy as np

from contrastile.backends.contract import Block, Pairs
from contrastile.backends.crossing import dtype_name
from contrastile.backends.cupy.arguments import constant, struct
from contrastile.backends.cupy.common import THREADS, contiguous
from contrastile.backends.cupy.configs import (
    NARROW_SIDE,
    Family,
    Shares,
    kernel_family,
    narrow,
    uses_hopper_kernels,
    weighted_blocks,
)
from contrastile.backends.cupy.instances import (
    DROP,
    DROP_GUIDE,
    DROP_LIMITS,
    EXCLUSIONS,
    GUIDE,
    LIMITED,
    LIMITS,
    PLAIN,
    TARGET,
    instance,
    keeping_kernel,
    narrow_kernel,
    tile_kernel,
    weighted_kernel,
)
from contrastile.backends.cupy.launch import (
    aligned,
    capability,
    empty,
    is_postponed,
    launch,
    multiprocessors,
    pointer,
    row_stride,
)
from contrastile.backends.cupy.tensor_maps import tensor_map
from contrastile.backends.passes import Chunk, contiguous_pairs, own_references

_WIDE = 64
"""Columns of a block of a tensor map: the 128 bytes of a swizzle."""

_JOINS = constant("NARROW_JOINS")

_STORED_ROWS = 16
"""Rows of G that one store writes."""


class Tiles:
    """A block prepared for the tile kernels: aligned features, their tensor maps, which pairs count.

    Attributes:
        dtype: name of the features' dtype.
        mask: the one of ``instances.MASKS`` that the block needs.
        exact: see ``passes.own_references``.
    """

    def __init__(self, block: Block, precision: str) -> None:
        self.precision = precision
        self.rows, self.columns = aligned(block.rows), aligned(block.columns)
        guide_features = block.pairs.row_guide, block.pairs.column_guide
        self.guide = [aligned(x) for x in guide_features if x is not None]
        self.dtype = dtype_name(self.rows.dtype)
        self.exact = own_references(self.dtype)
        self.pairs = contiguous_pairs(block.pairs if not block.pairs.limited else _limited(block), contiguous)
        without_ids = PLAIN if self.pairs.excluded is None else EXCLUSIONS
        self.mask = {"drop": DROP, "target": TARGET, None: without_ids}[self.pairs.of_ids]
        if block.pairs.limited:
            masks = (GUIDE, DROP_GUIDE) if self.guide else (LIMITS, DROP_LIMITS)
            self.mask = masks[self.mask != PLAIN]
        device = cupy.cuda.get_device_id()
        self.family: Family = kernel_family(self.dtype, capability(device), hopper=uses_hopper_kernels())
        self.multiprocessors = multiprocessors(device)

    @cached_property
    def _maps(self) -> tuple[bytes, ...]:
        heights = self.family.bm, self.family.bn // self.family.cluster
        matrices = self.rows, self.columns, *self.guide
        return tuple(tensor_map(x, (heights[i % 2], _WIDE)) for i, x in enumerate(matrices))

    def common(self, chunk: Chunk) -> dict[str, Any]:
        """The arguments that every tile kernel takes."""
        return {"features": self._features, "chunk": struct("Chunk")(*chunk), "pairs": self._pairs}

    @cached_property
    def _features(self) -> Any:
        return struct("Features")(
            rows=pointer(self.rows),
            columns=pointer(self.columns),
            row_stride=row_stride(self.rows),
            column_stride=row_stride(self.columns),
            depth=self.rows.shape[1],
            guide_depth=self.guide[0].shape[1] if self.guide else 0,
            band=self.family.band,
        )

    @cached_property
    def _pairs(self) -> Any:
        vectors = self.pairs
        named = vectors.positives, vectors.excluded, vectors.row_ids, vectors.column_ids
        return struct("PairVectors")(*map(pointer, (*named, vectors.row_limits, vectors.column_limits)))

    def run(self, name: str, arguments: Any, g: Any | None = None, safe: bool | None = None) -> None:
        """Queue the kernel over the chunk that the arguments name.

        Args:
            name: "forward", "forward_keeping", "gradient" or "sigmoid".
            arguments: the kernel's own struct.
            g: the matrix that the kernel writes; None where it writes none, and the map is a dummy.
            safe: for "forward", whether to take the safe path.
        """
        maps: tuple[bytes, ...] = ()
        if self.family.maps:
            maps = self._maps
            if name != "forward":
                maps += (maps[0] if g is None else tensor_map(g, (_STORED_ROWS, _WIDE)),)
        chunk = arguments.chunk
        blocks = self.family.blocks(chunk.height, chunk.width, self.multiprocessors)
        kernel = (
            keeping_kernel(self.family)
            if name == "forward_keeping"
            else tile_kernel(name, self.family, self.dtype, self.mask, safe=safe, precision=self.precision)
        )
        launch(kernel, blocks, self.family.threads, *maps, arguments, shared=self.family.shared)

    def compile_gradients(self, *, narrow: bool, kept: bool) -> None:
        """Request the compilation of a backward pass's large kernels, after such a forward pass."""
        is_postponed((narrow_kernel if narrow else tile_kernel)("gradient", self.family, self.dtype, self.mask))
        for across in (False, True) if kept else ():
            is_postponed(weighted_kernel(self.family, across=across))

    @property
    def narrow(self) -> bool:
        """Whether the kernels of narrow features can compute the block's rows."""
        return narrow(self.rows.shape[1], self.family) and self.mask not in LIMITED

    def narrow_gradient(self, gradient: Any, out: Any, *, fresh: bool) -> None:
        """Queue the rows' gradient of a chunk that has all columns, without G in memory.

        Args:
            gradient: the arguments of "gradient", without its g.
            out: (height, d) float32, unit stride along rows, to which the gradient is added.
            fresh: whether out is overwritten instead.
        """
        shares = self.shares(gradient.chunk)
        parts = empty(2 * shares.blocks, NARROW_SIDE, NARROW_SIDE)
        arguments = struct("NarrowGradientArguments")(
            gradient=gradient,
            out=pointer(out),
            out_stride=row_stride(out),
            parts=pointer(parts),
            blocks=shares.blocks,
            fresh=fresh,
        )
        self._launch_narrow("gradient", shares, arguments)
        launch(instance(f"narrow_gradient_{self.family.name}", "narrow_join"), _JOINS * shares.rows, THREADS, arguments)

    def narrow_forward(self, forward: Any) -> None:
        """Queue the rows' statistics over a chunk that has all columns, on the fast path.

        Args:
            forward: the arguments of "forward"; the kernel stores ``shares(chunk).most`` partials of each row.
        """
        shares = self.shares(forward.chunk)
        arguments = struct("NarrowForwardArguments")(forward=forward, blocks=shares.blocks, parts=shares.most)
        self._launch_narrow("forward", shares, arguments)

    def shares(self, chunk: Any) -> Shares:
        """How the kernels of narrow features divide a chunk among their blocks."""
        return Shares.of(chunk.height, chunk.width, self.multiprocessors)

    def _launch_narrow(self, name: str, shares: Shares, arguments: Any) -> None:
        maps = (tensor_map(x, (NARROW_SIDE, _WIDE)) for x in (self.rows, self.columns))
        kernel = narrow_kernel(name, self.family, self.dtype, self.mask)
        launch(kernel, shares.blocks, self.family.threads, *maps, arguments, shared=self.family.shared)

    def weighted(self, kept: Any, features: Any, shares: int, *, across: bool, **arguments: Any) -> None:
        """Queue the product of kept exponentials, their factors and features.

        Args:
            kept: (h, n) exponentials.
            features: (n, d) columns, or with ``across`` the (h, d) rows of the exponentials.
            shares: shares of the contraction, whose products are not added.
            across: whether to compute the columns' sums instead of the rows'.
            arguments: fields of the kernel's struct, without the sizes.
        """
        lines, depth = reversed(kept.shape) if across else kept.shape
        width = features.shape[1]
        structure = struct("WeightedArguments")(height=lines, width=width, depth=depth, shares=shares, **arguments)
        blocks = weighted_blocks(lines, width) * shares
        maps = (tensor_map(x, (_WIDE, _WIDE)) for x in (kept, features))
        kernel = weighted_kernel(self.family, across=across)
        launch(kernel, blocks, self.family.threads, *maps, structure, shared=self.family.shared)


def _limited(block: Block) -> Pairs:
    """A block's pairs for the kernels with limits: both limits, as base-2 logits without the bias.

    These kernels take exclusions only with ids: without ids, all rows and columns get different ones.
    """
    pairs, m, n = block.pairs, block.rows.shape[0], block.columns.shape[0]
    row_ids, column_ids = pairs.row_ids, pairs.column_ids
    if pairs.excluded is not None and (row_ids is None or column_ids is None):
        # in ranges far apart, so that a tile sees at once that none are equal
        row_ids, column_ids = cupy.arange(2**30, 2**30 + m), cupy.arange(n)

    def prepared_limits(limits: Any, length: int) -> Any:
        if limits is None:
            return cupy.full(length, cupy.inf, "float32")
        if pairs.row_guide is not None:
            return limits
        base_2_limits = (limits - (0.0 if block.bias is None else block.bias)) * np.float32(math.log2(math.e))
        # a NaN limit must leave no pair out: the kernels mark pairs that are already out by a NaN dot
        return cupy.fmin(base_2_limits, np.float32(math.inf))

    return replace(
        pairs,
        row_ids=row_ids,
        column_ids=column_ids,
        row_limits=prepared_limits(pairs.row_limits, m),
        column_limits=prepared_limits(pairs.column_limits, n),
    )
