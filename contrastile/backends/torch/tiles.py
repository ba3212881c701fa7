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
# square, so that the least of the gradients is read and written again
CPU_TILE = (1024, 1024)
# large enough to fill an accelerator, and a small share of its memory
DEVICE_TILE = (4096, 8192)
# float32 elements of a cache line
LINE = 16

# bytes of each row and column: statistics in float64; log-sum-exps, weights and targets of ``gradients``, both dtypes
_FORWARD_VECTORS, _BACKWARD_VECTORS = 28, 72

P = ParamSpec("P")
R = TypeVar("R")


class Tile(NamedTuple):
    """One tile: its place, what G multiplies (tr, d) and (tc, d), its logits and a spare of their shape, its pairs.

    Instead of logits it may have what was kept of them. ``last_rows``: no tile after this one has the same columns.
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
    known: bool = False,
) -> Iterator[Tile]:
    """The block's tiles, logits computed; the next tile reuses the memory of the last.

    With ``kept`` each tile has its own memory there, and where it is ``known`` what that holds is left as it is.

    Columns are the outer loop: a chunk of columns is wide and its gradient with it, so they are the ones to stay in
    the cache while the narrow chunks of rows pass.
    """
    m, n = block.rows.shape[0], block.columns.shape[0]
    tr, tc = tile_shape(m, n, options, products.sync)
    x = block.rows.new_empty(tr * tc, dtype=products.state) if kept is None else kept
    spare, start = block.rows.new_empty(tr * tc, dtype=products.state), x.storage_offset()
    for c in range(0, n, tc):
        columns = slice(c, min(c + tc, n))
        k = products.operand(cut(block.columns, columns))
        for r in range(0, m, tr):
            rows = slice(r, min(r + tr, m))
            q = products.operand(cut(block.rows, rows))
            shape, strides = (q.shape[0], k.shape[0]), (k.shape[0], 1)
            # one operation each, where a slice and its view are two
            here, beside = x.as_strided(shape, strides, start), spare.as_strided(shape, strides)
            if not known:
                products.logits(q, k, here, diagonal=rows == columns)
            if kept is not None:
                start += here.numel()
            both = q, k
            if block.values is not None:
                both = products.operand(cut(block.values[0], rows)), products.operand(cut(block.values[1], columns))
            yield Tile(rows, columns, rows.stop == m, *both, here, beside, TilePairs(pairs, rows, columns))


def tile_shape(m: int, n: int, options: Options, cpu: bool) -> tuple[int, int]:
    """Rows and columns of a tile: as asked for, or chosen so that the last tile is not a sliver."""
    if options.tile is not None:
        return max(1, min(options.tile[0], m)), max(1, min(options.tile[1], n))
    most = CPU_TILE if cpu else DEVICE_TILE
    return _even(m, most[0]), _even(n, most[1])


def footprint(m: int, n: int, width: int, dtype: str, device: str, options: Options) -> Footprint:
    """See ``contract.Backend``: a tile and its spare, operands in the dtype of the products, and vectors.

    Of a tile whose exponentials are kept, which ``keeps`` counts, the spare alone.
    """
    host, state, item = device == "cpu", 8 if dtype == "float64" else 4, getattr(torch, dtype).itemsize
    tr, tc = tile_shape(m, n, options, host)
    mixed = item < state and not host and has_mixed_product()
    tile = (1 if keeps(m, n, dtype, device, options) else 2) * tr * tc * state
    if item < state and not mixed:
        # of the rows and the columns, and those of the tile before while the next ones are made
        tile += (tr * (1 + (m > tr)) + tc * (1 + (n > tc))) * width * state
    logits = tr * tc * state if mixed else 0
    # G in the features' dtype, made of G times its gain for float16, and a product before it is added; on a host,
    # ragged columns' chunk of sums
    gained = tr * tc * state if dtype == "float16" else 0
    product = tr * tc * item + max(max(tr, tc) * width * state, gained) if mixed else 0
    if host and width % LINE:
        product += tc * -(-width // LINE) * LINE * state
    numbers = m + n
    return Footprint(
        tile + logits + _FORWARD_VECTORS * numbers,
        tile + max(logits, product) + _BACKWARD_VECTORS * numbers,
        # products of a chunk of rows, of features that are widened first, and their sums
        inner=min(m, TorchArrays(torch).inner_rows(width, host)) * width * (state + (4 if item < state else 0))
        + m * state,
    )


def _even(count: int, most: int) -> int:
    """The length of equal pieces of ``count``, at most ``most`` each, a multiple of a cache line."""
    if count <= most:
        return max(1, count)
    pieces = -(-count // most)
    return -(-count // (pieces * LINE)) * LINE


def primitive(function: Callable[P, R]) -> Callable[P, R]:
    """Run a primitive outside autograd and autocast: it must not record, nor may its products be narrowed."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        block = args[0]
        assert isinstance(block, Block)
        kind = block.rows.device.type
        # as a rule it is so already, and to say it again takes a small batch's time
        if not (torch.is_grad_enabled() or torch.is_autocast_enabled(kind)):
            return function(*args, **kwargs)
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            return function(*args, **kwargs)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run
