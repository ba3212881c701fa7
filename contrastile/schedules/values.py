"""Features and values in one array, which every schedule carries: the first columns form logits, G multiplies the rest.

The sums of the first stay 0, so that ``sum_i <row_i, (G K)_i>`` is of the values alone.
"""

from __future__ import annotations

from dataclasses import replace

from contrastile.backends.contract import Array, Backend, Block, Options, Statistics, Weights


def with_values(backend: Backend, depth: int) -> Backend:
    """The backend, of blocks whose first ``depth`` columns are the features; softmax losses alone."""

    def parted(block: Block) -> Block:
        (q, by_q), (k, by_k) = ((x[:, :depth], x[:, depth:]) for x in (block.rows, block.columns))
        return replace(block, rows=q, columns=k, values=(by_q, by_k))

    def supports(block: Block) -> str | None:
        return backend.supports(parted(block)) if backend.values else "a teacher must be None here, got one"

    def lse(block: Block, columns: bool, options: Options) -> Statistics:
        return backend.lse(parted(block), columns, options)

    def gradients(
        block: Block, weights: Weights, row_sums: Array | None, column_sums: Array | None, options: Options
    ) -> None:
        by_rows, by_columns = (x if x is None else x[:, depth:] for x in (row_sums, column_sums))
        backend.gradients(parted(block), weights, by_rows, by_columns, options)

    # what is left out makes and reads no values
    alone = replace(
        backend, finished=None, finished_columns=None, keeping=None, keeps=None, rows_alone=None, whole=None
    )
    return replace(alone, lse=lse, gradients=gradients, supports=supports)
