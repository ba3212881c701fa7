"""Inf-CL's equations and algorithms against each other, the dense loss, the tiles and torch."""

from __future__ import annotations

from functools import reduce

import numpy as np
from balls import agrees, general
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_problems import Problem, on_grid

from contrastile.oracle.general import gradient_of_logits, row_lse
from contrastile.oracle.named import info_nce
from contrastile.oracle.pairs import Pairs
from contrastile.oracle.papers import inf_cl


def batch(seed: int, b: int, c: int, heat: float = 1.0) -> Problem:
    """Image rows that include the scale, text columns, and the weights and positives of Eq. 1."""
    rng = np.random.default_rng(seed)
    I, T = on_grid(heat * rng.standard_normal((b, c))), on_grid(rng.standard_normal((b, c)))
    return Problem(I, T, 1.0, pairs=Pairs(np.arange(b)), u=np.ones(b) / max(b, 1), v=np.zeros(b))


batches = st.builds(
    batch,
    seed=st.integers(0, 2**32 - 1),
    b=st.integers(1, 12),
    c=st.integers(1, 5),
    heat=st.sampled_from([1.0, 14.0, 100.0]),
)
cuts = st.lists(st.integers(0, 12), max_size=5).map(sorted)
side = st.integers(1, 13)


@settings(max_examples=80)
@given(p=batches, t_r=side, t_c=side)
def test_equations_1_to_8_are_info_nce_its_lse_and_one_gradient(p: Problem, t_r: int, t_c: int) -> None:
    l, ball = row_lse(p.x, p.A), general(p)
    for loss in (info_nce(p.q, p.k, 1.0).loss, inf_cl.decomposed_loss(p.q, p.k, l)):
        assert agrees(loss, ball.loss)
    small = p.moved(q=on_grid(p.q / 64))
    assert agrees(inf_cl.contrastive_loss(small.q, small.k), general(small).loss)
    tiles = inf_cl.tiled_lse(p.q, p.k, t_r, t_c)
    assert (len(tiles), len(tiles[0])) == inf_cl.tile_counts(len(p.q), t_r, t_c)
    merged = [reduce(inf_cl.merge_lse, row, np.full(len(row[0]), -np.inf)) for row in tiles]
    for L in (np.concatenate(merged), inf_cl.lse(p.x)):
        assert agrees(L, ball.row_lse)
    dI, dT = inf_cl.chain_rule(gradient_of_logits(p.sides), p.q, p.k)
    for gradient in (dI, inf_cl.image_gradient(p.q, p.k, l), inf_cl.tiled_image_gradient(p.q, p.k, l, t_c)):
        assert agrees(gradient, ball.d_rows)
    assert agrees(dT, ball.d_columns)


def test_equation_1_as_printed_overflows() -> None:
    assert np.isnan(inf_cl.contrastive_loss(np.array([[800.0]]), np.array([[1.0]])))


@settings(max_examples=60)
@given(p=batches, t_r=side, t_c=side)
def test_algorithms_2_and_4_are_the_dense_block(p: Problem, t_r: int, t_c: int) -> None:
    l = inf_cl.local_lse(p.q, p.k, t_r, t_c)
    assert agrees(l, general(p).row_lse)
    # Alg. 4 is the gradient of sum_i l_i: no targets, weights of 1
    sums = general(p.moved(pairs=Pairs(), u=np.ones(len(p.q))))
    for gradient, ball in zip(inf_cl.local_backward(p.q, p.k, l, t_r, t_c), (sums.d_rows, sums.d_columns), strict=True):
        assert agrees(gradient, ball)


@settings(max_examples=80)
@given(p=batches, edges=cuts, t_r=side, t_c=side)
def test_algorithms_1_and_3_are_the_global_loss_on_any_ring(p: Problem, edges: list[int], t_r: int, t_c: int) -> None:
    """One to six ranks, uneven and empty shards."""
    I, T = (np.split(t, [min(e, len(p.q)) for e in edges]) for t in (p.q, p.k))
    l, ball = inf_cl.ring_forward(I, T, t_r, t_c), general(p)
    assert [len(l_i) for l_i in l] == [len(I_i) for I_i in I]
    assert agrees(np.concatenate(l), ball.row_lse)
    dI, dT = inf_cl.ring_backward(I, T, l, t_r, t_c)
    assert agrees(np.concatenate(dI), ball.d_rows)
    assert agrees(np.concatenate(dT), ball.d_columns)
