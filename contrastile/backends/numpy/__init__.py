"""The numpy backend: the oracle's tiled form behind the contract. Float64 throughout; slow, exact, always there."""

from __future__ import annotations

import numpy as np

from contrastile.backends.arrays import NumpyArrays
from contrastile.backends.contract import Accuracy, Array, Backend, Block, Options, Statistics, Weights
from contrastile.oracle import tiled
from contrastile.oracle.pairs import Pairs

_TILE = (256, 1024)


def _arguments(block: Block, options: Options) -> tuple[tuple[Array, Array, float, float, Pairs], tuple[int, int]]:
    """A block as the oracle's positional arguments, and the tile."""
    p = block.pairs
    pairs = Pairs(p.positives, p.row_ids, p.column_ids, p.match, p.excluded)
    bias = 0.0 if block.bias is None else float(block.bias)
    return (block.rows, block.columns, float(block.scale), bias, pairs), options.tile or _TILE


def lse(block: Block, columns: bool, options: Options) -> Statistics:
    """Row (and column) log-sum-exp and sums of positive logits: see ``contract.Backend``."""
    arguments, tile = _arguments(block, options)
    found = tiled.tile_statistics(*arguments, tile=tile)
    if not columns:
        return Statistics(found.row_lse, found.row_positive)
    return Statistics(found.row_lse, found.row_positive, found.column_lse, found.column_positive)


def gradients(
    block: Block, weights: Weights, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> None:
    """Adds G K and G^T Q: see ``contract.Backend``."""
    arguments, tile = _arguments(block, options)
    found = tiled.tile_gradients(
        *arguments,
        row_lse=weights.row_lse,
        row_weight=weights.row_weight,
        row_target=weights.row_target,
        column_lse=weights.column_lse,
        column_weight=weights.column_weight,
        column_target=weights.column_target,
        tile=tile,
    )
    _add(found, row_gradient, column_gradient)


def sigmoid(
    block: Block, row_weight: Array, row_gradient: Array | None, column_gradient: Array | None, options: Options
) -> tuple[Array, Array]:
    """The sigmoid loss of each row and the row sums of its G; adds the gradients: see ``contract.Backend``."""
    arguments, tile = _arguments(block, options)
    row_loss, found = tiled.tile_sigmoid(*arguments, row_weight=row_weight, tile=tile)
    _add(found, row_gradient, column_gradient)
    return row_loss, found.row_sum


def _add(found: tiled.TileGradients, row_gradient: Array | None, column_gradient: Array | None) -> None:
    if row_gradient is not None:
        row_gradient += found.R
    if column_gradient is not None:
        column_gradient += found.C


def accuracy(dtype: str, device: str) -> Accuracy:
    """Float64 whatever comes in."""
    return Accuracy(unit=2.0**-53, accumulate_unit=2.0**-53)


def state(dtype: str) -> str:
    """The oracle keeps its state in float64."""
    return "float64"


backend = Backend(
    name="numpy",
    arrays=NumpyArrays(np),
    dtypes=frozenset({"float16", "float32", "float64"}),
    devices=frozenset({"cpu"}),
    accuracy=accuracy,
    lse=lse,
    gradients=gradients,
    sigmoid=sigmoid,
    state=state,
)
