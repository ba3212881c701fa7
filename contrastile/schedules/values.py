"""Features and values in one array, which every schedule can send: the features form logits, and G multiplies values.

The first columns of the array are the features. Their sums stay 0, so that ``sum_i <row_i, (G K)_i>`` is over values.
"""

from __future__ import annotations

from dataclasses import replace

from contrastile.backends.contract import Array, Backend, Block, Options, Statistics, Weights


def with_values(backend: Backend, depth: int) -> Backend:
    """The backend for blocks whose first ``depth`` columns are the features; for softmax losses only."""

    def split_values(block: Block) -> Block:
        (q, row_values), (k, column_values) = ((x[:, :depth], x[:, depth:]) for x in (block.rows, block.columns))
        return replace(block, rows=q, columns=k, values=(row_values, column_values))

    def supports(block: Block) -> str | None:
        return backend.supports(split_values(block)) if backend.values else "a teacher must be None here, got one"

    def lse(block: Block, columns: bool, options: Options) -> Statistics:
        return backend.lse(split_values(block), columns, options)

    def gradients(
        block: Block, weights: Weights, row_sums: Array | None, column_sums: Array | None, options: Options
    ) -> None:
        row_part, column_part = (x if x is None else x[:, depth:] for x in (row_sums, column_sums))
        backend.gradients(split_values(block), weights, row_part, column_part, options)

    # remove the functions that do not support values
    base = replace(backend, finished=None, finished_columns=None, keeping=None, keeps=None, rows_alone=None, whole=None)
    return replace(base, lse=lse, gradients=gradients, supports=supports)
