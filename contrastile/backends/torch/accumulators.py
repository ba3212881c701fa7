"""Products of a tile's G, added to the gradients of its rows and of its columns."""

from __future__ import annotations

import torch

from contrastile.backends.torch.pairs import cut
from contrastile.backends.torch.products import Products
from contrastile.backends.torch.tiles import LINE, Tile


class Accumulators:
    """The two gradients of a block, in the state dtype; either may be None."""

    def __init__(self, products: Products, rows: torch.Tensor | None, columns: torch.Tensor | None) -> None:
        self._products, self._rows, self._columns = products, rows, columns
        self._chunk: torch.Tensor | None = None
        # BLAS takes 1.5 times as long to add to many rows that are not aligned to cache lines
        self._staged = products.sync and columns is not None and columns.stride(0) % LINE != 0

    def add(self, tile: Tile, g: torch.Tensor) -> None:
        """Add ``G K`` to the rows and ``G^T Q`` to the columns of the tile. g: (tr, tc)."""
        if self._rows is not None:
            self._products.add(cut(self._rows, tile.rows), g, tile.k)
        if self._columns is None:
            return
        total = cut(self._columns, tile.columns)
        if not self._staged:
            self._products.add(total, g.t(), tile.q)
            return
        if self._chunk is None:
            width = -(-total.shape[1] // LINE) * LINE
            self._chunk = total.new_zeros(total.shape[0], width)[:, : total.shape[1]]
        self._products.add(self._chunk, g.t(), tile.q)
        # rows are the inner loop: these columns are complete
        if tile.last_rows:
            total.add_(self._chunk)
            self._chunk = None
