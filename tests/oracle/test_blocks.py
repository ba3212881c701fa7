"""Several column blocks under one LSE against the same columns in one matrix, and GTE's four against loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from float64_bound import SoftmaxBound, assert_within
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_problems import RAGGED, Problem, on_grid, problems

from contrastile.oracle.general import gradient_of_logits, gradients, loss, merge, row_lse
from contrastile.oracle.papers.blocks import Block, gradients_over_blocks, loss_over_blocks, lse_over_blocks


def cut(p: Problem, places: list[int], both_ways: bool, queue: bool = False) -> list[Block]:
    """The problem's columns in pieces, empty ones too; the last is a queue where asked."""
    edges = [0, *sorted(min(c, len(p.k)) for c in places), len(p.k)]
    pieces = [slice(a, b) for a, b in pairwise(edges)]
    return [
        Block(
            p.q,
            p.k[c],
            p.scale,
            p.bias,
            p.A[:, c],
            p.y[:, c],
            v=p.v[c] if both_ways else None,
            y_c=p.y_c[:, c] if both_ways else None,
            columns_need_gradient=not (queue and c is pieces[-1]),
        )
        for c in pieces
    ]


@settings(max_examples=60, deadline=None)
@given(p=problems(), places=st.lists(st.integers(0, 8), max_size=3), both_ways=st.booleans())
def test_columns_in_pieces_are_the_columns(p: Problem, places: list[int], both_ways: bool) -> None:
    p = p if both_ways else p.moved(v=np.zeros(len(p.k)))
    blocks, bound = cut(p, places, both_ways), SoftmaxBound(p)
    assert_within(merge(*lse_over_blocks(blocks)), row_lse(p.x, p.A), 2 * bound.row_lse)
    assert_within(loss_over_blocks(blocks, p.u), loss(*p.general()), 2 * bound.loss)
    found = gradients_over_blocks(blocks, p.u)
    whole = gradients(p.q, p.k, p.scale, gradient_of_logits(*p.general()))
    # Adding the blocks' parts costs one rounding a block, of partial sums the bound's magnitudes cover.
    assert_within(sum(f.d_rows for f in found), whole.d_rows, 2 * bound.d_rows)
    assert_within(np.concatenate([f.d_columns for f in found]), whole.d_columns, 2 * bound.d_columns)
    assert_within(sum(f.d_scale for f in found), whole.d_scale, 2 * bound.d_scale)
    assert_within(sum(f.d_bias for f in found), whole.d_bias, 2 * bound.d_bias)


def test_a_queue_gets_no_gradient_and_changes_no_other() -> None:
    plain = gradients_over_blocks(cut(RAGGED, [6], False), RAGGED.u)
    queued = gradients_over_blocks(cut(RAGGED, [6], False, queue=True), RAGGED.u)
    assert queued[1].d_columns is None
    np.testing.assert_array_equal(queued[0].d_columns, plain[0].d_columns)
    for ours, theirs in zip(queued, plain, strict=True):
        np.testing.assert_array_equal(ours.d_rows, theirs.d_rows)


def test_four_blocks_with_rows_of_their_own_share_one_lse() -> None:
    """GTE: pair i's query and document each against all documents and all queries, themselves left out."""
    rng, m, s = np.random.default_rng(2), 5, 3.0
    Q, D = on_grid(rng.standard_normal((m, 3))), on_grid(rng.standard_normal((m, 3)))
    others, everyone = ~np.eye(m, dtype=np.bool_), np.ones((m, m), dtype=np.bool_)
    nothing, u = np.zeros((m, m)), np.full(m, 1 / m)
    blocks = [
        Block(Q, D, s, 0.0, everyone, np.eye(m)),
        Block(Q, Q, s, 0.0, others, nothing),
        Block(D, Q, s, 0.0, others, nothing),
        Block(D, D, s, 0.0, others, nothing),
    ]

    def by_loops(Q: torch.Tensor, D: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i in range(m):
            terms = [s * Q[i] @ D[j] for j in range(m)]
            for row, columns in ((Q[i], Q), (D[i], Q), (D[i], D)):
                terms += [s * row @ columns[j] for j in range(m) if j != i]
            total = total + (torch.stack(terms).logsumexp(0) - s * Q[i] @ D[i]) / m
        return total

    L = merge(*lse_over_blocks(blocks))
    bounds = [
        SoftmaxBound(
            Problem(b.q, b.k, s, u=u, v=np.zeros(m)).moved(
                pairs=RAGGED.pairs._replace(positives=np.arange(m), row_ids=None, column_ids=None, excluded=None)
            ),
            row_lse=L,
        )
        for b in blocks
    ]
    leaves = [torch.tensor(x, requires_grad=True) for x in (Q, D)]
    expected = by_loops(*leaves)
    assert_within(loss_over_blocks(blocks, u), expected.item(), 2 * sum(b.loss for b in bounds))
    found = gradients_over_blocks(blocks, u)
    dQ = found[0].d_rows + found[1].d_rows + found[1].d_columns + found[2].d_columns
    # the sums of four parts are covered by the magnitudes of each
    allowed = 4 * (bounds[0].d_rows + bounds[1].d_rows + bounds[1].d_columns + bounds[2].d_columns)
    assert_within(dQ, torch.autograd.grad(expected, leaves)[0].numpy(), allowed)
