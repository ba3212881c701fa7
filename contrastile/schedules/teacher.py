"""The part of a loss that is linear in the student's logits: what a teacher's softmax as the target adds to the loss.

Let G be the gradient of the teacher's loss by its own logits, and x the student's logits. The student's loss with the
teacher's targets is its loss with its own targets minus ``sum_ij G_ij x_ij = s sum_i <q_i, (G K)_i>``.

Rows and columns hold the features of both, which every schedule can send in one array: the teacher's, ``depth`` of
them, form the logits, and G multiplies the student's, the *values*. The sums of the teacher's columns stay 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contrastile.backends.contract import Array, Backend, Block, Options, Statistics, Weights
from contrastile.schedules import local
from contrastile.schedules.problem import Problem


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


def loss(
    problem: Problem, wanted: local.Wanted | None, work: local.Work, schedule: Any
) -> tuple[Array, local.Sums | None]:
    """``s sum_ij G_ij <q_i, k_j>`` over all ranks, 0-d, and the sums that give its gradients.

    ``schedule`` computes softmax losses. The weights of G are negative: this part is subtracted from the loss.
    """
    assert problem.depth is not None
    arrays, placement, is_blocked = work.backend.arrays, problem.placement, problem.blocking is not None
    if placement is not None:
        placement = replace(placement, reduction="sum")
    softmax: Any = {"kind": "softmax", "scale": problem.bias, "bias": None, "placement": placement}
    teacher, work = replace(problem, **softmax), work._replace(backend=with_values(work.backend, problem.depth))
    forward = schedule.forward(teacher, work)
    seed = arrays.full((), 1.0, arrays.dtype(problem.scale), problem.scale)
    wanted_columns = (False,) * len(problem.columns) if wanted is None else wanted.columns
    sums = schedule.backward(teacher, forward, seed, local.Wanted(True, wanted_columns), work)
    value = problem.scale * sums.scale * (1 if placement is None else placement.size)
    if wanted is None:
        return value, None
    rows = sums.rows if wanted.rows or wanted.scale else None
    columns = (*sums.columns, sums.scale) if is_blocked else sums.columns
    return value, local.Sums(rows, columns, arrays.full((), 0.0, "float64", problem.scale))
