"""The walk over a block: tile after tile of logits in one workspace, in one fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from contrastile.backends.arrays import TorchArrays
from contrastile.backends.contract import Block, Footprint, Options
from contrastile.backends.torch.kept import keeps
from contrastile.backends.torch.pairs import BlockPairs, TilePairs, cut
from contrastile.backends.torch.products import Products, has_mixed_product

# 4 MiB of float32: the tile, its spare, a chunk of columns and their gradient stay in a shared cache of 16 MiB or more;
# square, because then the fewest bytes of the gradients are read and written again
CPU_TILE = (1024, 1024)
# large enough to fill an accelerator, and a small share of its memory
DEVICE_TILE = (4096, 8192)
# float32 elements of a cache line
LINE = 16

# bytes of a row or column: statistics in float64; and log-sum-exps, weights and targets of ``gradients``
_FORWARD_VECTORS, _BACKWARD_VECTORS = 28, 72

P = ParamSpec("P")
R = TypeVar("R")


class Tile(NamedTuple):
    """One tile: its ranges, the factors q (tr, d) and k (tc, d) of G, its logits x and a spare of x's shape, its pairs.

    x may hold kept exponentials instead of logits. ``last_rows``: no later tile has the same columns.
    """

    rows: slice
    columns: slice
    last_rows: bool
    q: torch.Tensor
    k: torch.Tensor
    x: torch.Tensor
    spare: torch.Tensor
    pairs: TilePairs


def tiles(
    block: Block,
    pairs: BlockPairs,
    products: Products,
    options: Options,
    kept: torch.Tensor | None = None,
    *,
    is_filled: bool = False,
) -> Iterator[Tile]:
    """The block's tiles, logits computed; the next tile reuses the memory of the last.

    With ``kept`` each tile has its own memory there; if that is filled already, no logits are computed.

    Columns are the outer loop: a wide chunk of columns and its gradient stay in the cache while chunks of rows pass.
    """
    m, n = block.rows.shape[0], block.columns.shape[0]
    tr, tc = tile_shape(m, n, options, products.sync)
    x = block.rows.new_empty(tr * tc, dtype=products.state) if kept is None else kept
    spare, offset = block.rows.new_empty(tr * tc, dtype=products.state), x.storage_offset()
    for c in range(0, n, tc):
        columns = slice(c, min(c + tc, n))
        k = products.operand(cut(block.columns, columns))
        for r in range(0, m, tr):
            rows = slice(r, min(r + tr, m))
            q = products.operand(cut(block.rows, rows))
            shape, strides = (q.shape[0], k.shape[0]), (k.shape[0], 1)
            # as_strided is one operation; a slice and its view would be two
            logits, spare_tile = x.as_strided(shape, strides, offset), spare.as_strided(shape, strides)
            if not is_filled:
                products.logits(q, k, logits, diagonal=rows == columns)
            if kept is not None:
                offset += logits.numel()
            factors = q, k
            if block.values is not None:
                factors = products.operand(cut(block.values[0], rows)), products.operand(cut(block.values[1], columns))
            yield Tile(rows, columns, rows.stop == m, *factors, logits, spare_tile, TilePairs(pairs, rows, columns))


def tile_shape(m: int, n: int, options: Options, is_on_host: bool) -> tuple[int, int]:
    """Rows and columns of a tile: the requested ones, or chosen so that the last tile is not a sliver."""
    if options.tile is not None:
        return max(1, min(options.tile[0], m)), max(1, min(options.tile[1], n))
    largest = CPU_TILE if is_on_host else DEVICE_TILE
    return _piece_length(m, largest[0]), _piece_length(n, largest[1])


def footprint(m: int, n: int, width: int, dtype: str, device: str, options: Options) -> Footprint:
    """See ``contract.Backend``: a tile and its spare, operands in the dtype of the products, and vectors.

    Where exponentials are kept, only the spare is counted here, because ``keeps`` counts the tiles.
    """
    on_host, state, itemsize = device == "cpu", 8 if dtype == "float64" else 4, getattr(torch, dtype).itemsize
    tr, tc = tile_shape(m, n, options, on_host)
    is_mixed = itemsize < state and not on_host and has_mixed_product()
    tile = (1 if keeps(m, n, dtype, device, options) else 2) * tr * tc * state
    if itemsize < state and not is_mixed:
        # operands of the rows and the columns; while the next operands are made, also those of the tile before
        tile += (tr * (1 + (m > tr)) + tc * (1 + (n > tc))) * width * state
    logits = tr * tc * state if is_mixed else 0
    # G in the features' dtype; G times its gain for float16; a product before it is added; on a host, the chunk of
    # sums of columns that are not aligned to cache lines
    scaled_g = tr * tc * state if dtype == "float16" else 0
    product = tr * tc * itemsize + max(max(tr, tc) * width * state, scaled_g) if is_mixed else 0
    if on_host and width % LINE:
        product += tc * -(-width // LINE) * LINE * state
    vectors = m + n
    return Footprint(
        tile + logits + _FORWARD_VECTORS * vectors,
        tile + max(logits, product) + _BACKWARD_VECTORS * vectors,
        # products of a chunk of rows, whose features are widened first, and their sums
        inner=min(m, TorchArrays(torch).inner_rows(width, on_host)) * width * (state + (4 if itemsize < state else 0))
        + m * state,
    )


def _piece_length(count: int, most: int) -> int:
    """The length of equal pieces of ``count``, at most ``most`` each, rounded up to a multiple of LINE."""
    if count <= most:
        return max(1, count)
    pieces = -(-count // most)
    return -(-count // (pieces * LINE)) * LINE


def primitive(function: Callable[P, R]) -> Callable[P, R]:
    """Run a primitive without autograd and autocast: it must not be recorded, nor its products narrowed."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        block = args[0]
        assert isinstance(block, Block)
        device_type = block.rows.device.type
        # both are usually off already, and setting them again takes as long as a small batch
        if not (torch.is_grad_enabled() or torch.is_autocast_enabled(device_type)):
            return function(*args, **kwargs)
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            return function(*args, **kwargs)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run
