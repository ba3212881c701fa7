"""The model of floating-point arithmetic behind the bounds: the error of one operation, sum or exponential.

Every operation gives ``fl(a op b) = (a op b)(1 + delta) + eta`` with ``|delta| <= u`` and ``|eta| <= tiny``, tiny the
smallest normal number (results below it may be flushed to zero). A chain of relative errors with sum t costs
``gamma(t) = t / (1 - t)``, since ``prod (1 + delta_i)^(+-1) <= 1 / (1 - sum |delta_i|)``.

An exponential of a difference may be formed as ``exp(a - b)`` or as ``exp2(a c - b c)`` with ``c = log2 e`` rounded and
either product rounded: at most three roundings relative to |a| and three relative to |b| in the exponent (c, product,
difference: ``|a - b| <= |a| + |b|``), and ``exp_ulps`` on the result.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from contrastile.backends.contract import Accuracy, Options
from contrastile.oracle.arrays import FloatArray
from contrastile.verify.rounding import UNDERFLOW, UNIT


def gamma(t: float) -> float:
    """Relative cost of roundings that add to t: t / (1 - t); inf when t >= 1."""
    return t / (1 - t) if t < 1 else float("inf")


@dataclass(frozen=True)
class Lengths:
    """How a sum over one axis is computed: ``parts`` partial sums of at most ``tile`` terms each are merged.

    Attributes:
        tile: number of terms of the longest partial sum.
        parts: number of tiles of all blocks plus number of blocks: each is merged, or added, once.
        longest: length of the longest block.
    """

    tile: int
    parts: int
    longest: int


@dataclass(frozen=True)
class Spread:
    """How the ranks of a world share a problem.

    Attributes:
        rows: rows per rank; the first rank's are the problem's first.
        blocks: sizes of the column blocks of a rank's calls, one block per call.
        halved: whether a rank may compute its rows against one shard in two calls, half of the rows in each.
    """

    rows: tuple[int, ...]
    blocks: tuple[int, ...]
    halved: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """A backend's arithmetic on one problem.

    Attributes:
        accuracy: the backend's facts.
        dtype: the features' dtype.
        over_columns: how sums over a row's columns are computed.
        over_rows: how sums over a column's rows are computed.
        ranks: rows per rank, in order; a single process is one rank.
        totals: number of float64 totals that are added for one number of the whole problem.
    """

    accuracy: Accuracy
    dtype: str
    over_columns: Lengths
    over_rows: Lengths
    ranks: tuple[int, ...]
    totals: int

    @property
    def shared(self) -> int:
        """1 where ranks share the problem: their gradients have a factor that the mean over ranks removes."""
        return int(len(self.ranks) > 1)

    @property
    def tiny(self) -> float:
        """Absolute error of one operation of the state arithmetic that underflows."""
        return UNDERFLOW["float64" if self.accuracy.unit <= UNIT["float64"] else "float32"]

    def facts(self, width: int) -> Hashable:
        """A key of all facts that bounds of a problem of this width depend on: equal keys have equal bounds."""
        lengths = width, self.over_columns.longest, self.over_rows.longest
        depths = [self.accuracy.depth(terms) for terms in lengths if terms]
        return replace(self, accuracy=replace(self.accuracy, depth=int, tile=int)), width, *depths

    @property
    def twice(self) -> Arithmetic:
        """The arithmetic of a problem whose pairs are all computed twice, and added to the same sums."""
        columns, rows = (replace(x, parts=2 * x.parts) for x in (self.over_columns, self.over_rows))
        return replace(self, over_columns=columns, over_rows=rows)

    def product(self, terms: int, roundings: int) -> float:
        """Relative error, against the sum of magnitudes, of a matrix product of ``terms`` terms.

        Both factors are rounded by ``input_rounding``; each term is rounded once as a product and by at most
        ``depth(terms)`` additions; ``roundings`` more roundings follow in the state arithmetic.
        """
        a = self.accuracy
        chain = gamma(a.accumulate_unit * a.depth(terms) + a.unit * (1 + roundings)) if terms else 0.0
        return float((1 + a.input_rounding) ** 2 * (1 + chain) - 1)

    def float64_sum(self, x: FloatArray) -> float:
        """Relative error of the float64 sums over the rows and columns of x, against the sum of magnitudes."""
        return gamma(UNIT["float64"] * (sum(x.shape) + 4 + self.totals))

    def cast(self, exact: FloatArray, error: FloatArray) -> FloatArray:
        """The error of a value after its one cast from the state to a coarser feature dtype, from ``error`` before."""
        if UNIT[self.dtype] <= self.accuracy.unit:
            return error
        return error + UNIT[self.dtype] * (np.abs(exact) + error) + UNDERFLOW[self.dtype]


def arithmetic(
    accuracy: Accuracy,
    dtype: str,
    rows: int,
    blocks: Sequence[int],
    options: Options | None = None,
    spread: Spread | None = None,
) -> Arithmetic:
    """A backend's arithmetic on a problem of ``rows`` rows and column blocks of these sizes.

    ``options.tile``, if given, caps the tile: smaller tiles mean more merges. ``spread`` says how ranks share the
    problem: a row is then computed against ``spread.blocks``, and a column against each rank's rows in turn.
    """
    tile = (None, None) if options is None or options.tile is None else options.tile
    sharing = spread or Spread((rows,), tuple(blocks))
    return Arithmetic(
        accuracy,
        dtype,
        over_columns=_lengths(accuracy, sharing.blocks, tile[1]),
        over_rows=_lengths(accuracy, sharing.rows, tile[0], halved=sharing.halved),
        ranks=sharing.rows,
        totals=0 if spread is None else 2 * len(sharing.rows) * len(sharing.blocks),
    )


def _lengths(accuracy: Accuracy, sizes: Sequence[int], cap: int | None, *, halved: bool = False) -> Lengths:
    """The ``Lengths`` of sums over blocks of these sizes; ``halved``: one block may be split in two."""
    tiles = [max(1, min(accuracy.tile(size), size if cap is None else cap)) for size in sizes]
    parts = sum(-(-size // tile) + 1 for size, tile in zip(sizes, tiles, strict=True))
    # two halves have at most one more tile, and one more partial result
    return Lengths(max(tiles, default=0), parts + 2 * halved, max(sizes, default=0))
