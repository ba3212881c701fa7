# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Ranks and nearest columns: each tile of dot products is compared with the rows' thresholds, and never stored.

A dot has the same bits wherever its row and its column are: tensor cores add over the features in one order, whatever
the tile. So a column's dot equals the same dot in another launch, and equal columns tie.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from contrastile.backends.contract import Block, Options
from contrastile.backends.passes import Chunk, ceil_div
from contrastile.backends.triton.common import empties
from contrastile.backends.triton.kernel import kernel
from contrastile.backends.triton.launch import grid, on_device
from contrastile.backends.triton.operands import BlockPass, features_of
from contrastile.backends.triton.tiles import NO_IDS, dots, pairs, place, touched, within_limits

# the modes of ``search_tiles``
_COUNT, _PEAKS, _COLLECT = (tl.constexpr(x) for x in range(3))

_EMPTY = -0x7F800001 << 32
"""The key of an empty place: that of -inf, which is less than the keys of all columns."""


@kernel
@triton.jit(do_not_specialize=["m", "n", "depth", "room"])
def search_tiles(
    rows, columns, bars, limits, row_ids, column_ids, numbers, out, keys, m, n, depth, room,
    WHAT: tl.constexpr, IDS: tl.constexpr, PARTS: tl.constexpr, RAGGED: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compare the dots of m rows and n columns with the rows' bars, or find the parts' maxima, as WHAT says.

    rows, columns: descriptors of features. Columns with the row's id do not count, nor do dots beyond the row's limit.
    A tile's columns that are congruent modulo PARTS form one part of it.

    * _COUNT: adds to out (m,), int64, the number of dots that are not below the row's bar.
    * _PEAKS: writes to out (m, tiles, PARTS) the largest dot of each part of each tile, -inf if no column counts.
    * _COLLECT: writes to keys (m, room) the key of each dot that reaches the row's bar and is not -inf, in any order,
      while there is room; adds their number to out (m,), int32. Keys, int64, have the order of the dots; of equal
      dots, that of the column with the smaller number has the larger key. numbers: (n,) int64, of the columns.

    _PEAKS and _COLLECT require finite dots.
    """
    row_tiles, column_tiles = tl.cdiv(m, BM), tl.cdiv(n, BN)
    masks = None, None, row_ids, column_ids
    # a flattened loop must not branch on values that it has computed
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=WHAT != _COLLECT):
        r, c = place(tile, row_tiles, column_tiles, GROUP)
        x = dots(rows, columns, r * BM, c * BN, depth, BM, BN, BK, PRECISION, False)
        i, j = r * BM + tl.arange(0, BM), c * BN + tl.arange(0, BN)
        inside = i < m
        ignored = 1.0 if WHAT == _COUNT else float("-inf")
        if WHAT != _PEAKS:
            bar = tl.load(bars + i, mask=inside, other=float("inf"))[:, None]
        if limits is not None:
            x = within_limits(x, ignored, x, None, limits, i, m, 1)
        if WHAT == _COUNT:
            x = tl.where(x < bar, 1.0, 0.0)
        if RAGGED and c == column_tiles - 1:
            x = tl.where((j < n)[None, :], x, ignored)
        if IDS != NO_IDS:  # noqa: SIM102 (decided as it is compiled)
            if touched(r * BM, c * BN, m, n, masks, BM, BN, False, False, IDS):
                _positive, admitted = pairs(i, j, m, n, masks, False, False, IDS)
                x = tl.where(admitted, x, ignored)
        if WHAT == _COUNT:
            tl.atomic_add(out + i, (BN - tl.sum(x, 1)).to(tl.int64), mask=inside, sem="relaxed")
        else:
            # one thread holds all columns of a part
            x, parts = tl.reshape(x, (BM, BN // PARTS, PARTS)), tl.arange(0, PARTS)
            if WHAT == _PEAKS:
                pointers = out + i.to(tl.int64)[:, None] * (column_tiles * PARTS) + (c * PARTS + parts)[None, :]
                tl.store(pointers, tl.max(x, 1), mask=inside[:, None])
            else:
                row_keys, positions = keys + i.to(tl.int64)[:, None] * room, tl.arange(0, BN // PARTS)
                counts = out + i[:, None] + tl.zeros((BM, PARTS), tl.int32)
                peaks = tl.max(x, 1)
                # a part seldom has two dots that reach the bar
                while tl.max(tl.reshape((peaks >= bar).to(tl.int32), (BM * PARTS,), can_reorder=True), 0) != 0:
                    reaches_bar = (peaks >= bar) & inside[:, None]
                    position = tl.max(tl.where(x == peaks[:, None, :], positions[None, :, None], 0), 1)
                    number = tl.load(numbers + c * BN + position * PARTS + parts[None, :], mask=reaches_bar, other=0)
                    slot = tl.atomic_add(counts, 1, mask=reaches_bar, sem="relaxed")
                    # + 0.0 turns -0 into 0, so that they tie
                    bits = (peaks + 0.0).to(tl.int32, bitcast=True)
                    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0xFFFFFFFF - number)
                    tl.store(row_keys + slot, key, mask=reaches_bar & (slot < room))
                    x = tl.where(positions[None, :, None] == position[:, None, :], float("-inf"), x)
                    peaks = tl.max(x, 1)


class _Search(BlockPass):
    """One block, searched."""

    def __init__(self, block: Block) -> None:
        super().__init__(block, Options())
        # one shape, also with ids: few tiles compare ids, and otherwise the larger tile still reads less
        self.tile = self.config("search")
        self.across = ceil_div(self.n, self.tile.bn)

    def tiles(
        self, mode: Any, out: Any, bars: Any = None, numbers: Any = None, keys: Any = None, parts: int = 1
    ) -> Any:
        """One launch of ``search_tiles``."""
        features = features_of(self.sides, Chunk(0, 0, self.m, self.n), self.tile)
        with on_device(out):
            search_tiles[grid(self.m, self.n, self.tile, out)](
                *features, bars, self.block.pairs.row_limits, *self.masks.spanned[2:], numbers, out, keys,
                self.m, self.n, depth=self.depth, room=0 if keys is None else keys.shape[1],
                WHAT=mode.value, IDS=self.masks.ids, PARTS=parts, RAGGED=self.n % self.tile.bn != 0, **self.tile.named,
            )  # fmt: skip
        return out


def own(block: Block) -> Any:
    """See ``contract.Search``."""
    logits, sums = empties(block.rows, torch.float64, *[block.rows.shape[0]] * 2)
    with on_device(block.rows):
        _Search(block).positive_dots(logits, sums)
    return logits[: block.rows.shape[0]].float()


def ranks(block: Block) -> Any:
    """See ``contract.Search``."""
    vectors: Any = block.pairs
    count = torch.zeros(block.rows.shape[0], dtype=torch.int64, device=block.rows.device)
    _Search(block).tiles(_COUNT, count, own(block))
    # the positive counts itself, as its dot is not below itself, unless its id is the row's
    return count - (1 if vectors.row_ids is None else (vectors.column_ids[vectors.positives] != vectors.row_ids).long())


def most(columns: Any) -> int:
    """See ``contract.Search``."""
    # ``nearest`` needs 4 (k + 1) parts, of which a tile has 8 at most
    return ceil_div(columns.shape[0], _Search(Block(columns[:0], columns, columns.new_ones(()))).tile.bn) * 2 - 1


def nearest(block: Block, k: int, numbers: Any) -> tuple[Any, Any, Any]:
    """See ``contract.Search``."""
    search, m, positive_numbers = _Search(block), block.rows.shape[0], block.pairs.positives
    needed = k if positive_numbers is None else k + 1
    parts = next(x for x in (1, 2, 4, 8) if x * search.across >= 4 * needed)
    options = {"device": block.rows.device}
    peaks = search.tiles(_PEAKS, torch.empty((m, search.across * parts), **options), parts=parts)
    peaks = peaks.topk(needed, dim=1, sorted=False).values
    # the bar is the least of the ``needed`` largest maxima of parts: at least ``needed`` dots reach it
    bars = peaks.amin(1).clamp_(min=torch.finfo(torch.float32).min)
    keys = torch.full((m, 2 * needed + 64), _EMPTY, **options)
    key_counts = search.tiles(_COLLECT, torch.zeros(m, dtype=torch.int32, **options), bars, numbers, keys, 8)
    if positive_numbers is not None:
        keys.masked_fill_((keys & 0xFFFFFFFF) == (0xFFFFFFFF - positive_numbers)[:, None], _EMPTY)
    room = keys.shape[1]
    keys = keys.topk(k, dim=1).values
    bits = (keys >> 32).int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF), key_counts > room
