"""Each mistake of Inf-CL, as printed and as corrected, with the difference it makes."""

from __future__ import annotations

import numpy as np
import pytest
from balls import Ball, agrees, excess, general
from test_inf_cl import batch, shards

from contrastile.oracle.general import row_lse
from contrastile.oracle.pairs import Pairs
from contrastile.oracle.papers import inf_cl
from contrastile.oracle.papers import inf_cl_as_printed as as_printed

P = batch(6, 11, 4)
L = row_lse(P.x, P.A)
BALL = general(P)
# of sum_i l_i, whose gradient Alg. 4 is
SUMS = general(P.moved(pairs=Pairs(), u=np.ones(len(P.q))))

# Inf-CL Table 1, loss memory in GB of Inf-CL by batch: on 8 GPUs, on 32 GPUs.
TABLE_1 = {"32k": (0.18, 0.05), "64k": (0.36, 0.09), "128k": (0.72, 0.18), "256k": (1.45, 0.35)}


def differs(actual: np.ndarray, ball: Ball) -> bool:
    """By so much that no rounding explains it."""
    return excess(actual, ball) > 2**20


def plus(number: float, lse: Ball) -> Ball:
    """log(exp(lse) + number): what chains that begin at 0 give."""
    return np.logaddexp(lse, Ball(np.full(len(lse), np.log(number))))


def test_equation_4_from_zero_is_log_of_the_sum_plus_one() -> None:
    found = as_printed.chain(inf_cl.tiled_lse(P.q, P.k, 11, 4)[0])
    assert agrees(found, plus(1, BALL.row_lse))
    assert differs(found, BALL.row_lse)


def test_equation_4_from_zero_hides_every_loss_when_all_logits_are_negative() -> None:
    tiles = [np.array([-50.0]), np.array([-60.0])]
    assert as_printed.chain(tiles)[0] == 0.0
    assert inf_cl.merge_lse(*tiles)[0] < -49


def test_algorithm_2_adds_one_per_chain_so_the_ring_adds_one_per_rank_and_one() -> None:
    """Alg. 1 merges n results of Alg. 2, each of which started at 0, from 0 again: log(S + n + 1)."""
    n = 3
    parts = [as_printed.local_lse(P.q, T_k, 4, 4) for T_k in shards(np.tile(P.k, (n, 1)), [11, 22])]
    S = BALL.row_lse + np.log(Ball(n))
    assert agrees(as_printed.chain(parts), plus(n + 1, S))


def test_equation_4_from_minus_infinity_is_nan() -> None:
    nothing = np.full(1, -np.inf)
    assert np.isnan(as_printed.merge_lse(nothing, nothing))[0]
    assert np.isnan(as_printed.chain([np.zeros(1)], l_0=-np.inf))[0]
    np.testing.assert_array_equal(inf_cl.merge_lse(nothing, nothing), nothing)
    np.testing.assert_array_equal(inf_cl.merge_lse(nothing, np.zeros(1)), np.zeros(1))


@pytest.mark.parametrize(("dtype", "fits", "overflows"), [(np.float32, 88.0, 89.0), (np.float64, 709.0, 710.0)])
def test_equation_4_overflows_on_a_large_step_up(dtype: type, fits: float, overflows: float) -> None:
    start = np.zeros(1, dtype=dtype)
    assert as_printed.merge_lse(start, np.array([fits], dtype=dtype))[0] == fits
    assert as_printed.merge_lse(start, np.array([overflows], dtype=dtype))[0] == np.inf
    assert inf_cl.merge_lse(start, np.array([overflows], dtype=dtype))[0] == overflows


def test_equation_7_first_line_is_not_the_second() -> None:
    printed = as_printed.image_gradient_first_line(P.q, P.k, L)
    assert agrees(inf_cl.image_gradient(P.q, P.k, L), BALL.d_rows)
    assert differs(printed, BALL.d_rows)
    # What is left without the stray factor and the second 1/b, and with the sign of dL/dx_ii kept, is the second line.
    b = len(P.q)
    softmax_part = BALL.d_rows + Ball(P.k) / b
    stray = P.k * Ball(P.k).sum(axis=0)
    assert agrees(printed, softmax_part / b + stray / b / b)


@pytest.mark.parametrize("t_c", [1, 4])
def test_equation_8_counts_scalars_by_tiles(t_c: int) -> None:
    assert agrees(inf_cl.tiled_image_gradient(P.q, P.k, L, t_c), BALL.d_rows)
    assert differs(as_printed.tiled_image_gradient(P.q, P.k, L, t_c), BALL.d_rows) == (t_c > 1)


def test_equation_9_counts_the_tiles_of_the_global_batch() -> None:
    b, n = 1000, 4
    b_s = b // n
    assert as_printed.tile_counts(b, 32, 64) == (32, 16)
    assert inf_cl.tile_counts(b_s, 32, 64) == (8, 4)
    assert len(inf_cl.divide(np.zeros((b_s, 1)), 32)) == 8


@pytest.mark.parametrize(("t_r", "t_c", "right"), [(4, 4, True), (11, 4, False), (4, 11, True)])
def test_algorithm_2_line_6_loops_over_row_tiles(t_r: int, t_c: int, right: bool) -> None:
    """Fewer row tiles than column tiles drop columns; more would read past the end (here: nothing is there)."""
    printed = as_printed.local_lse(P.q, P.k, t_r, t_c)
    # line 5's own mistake, which begins at 0, is kept out of the comparison
    assert differs(printed, plus(1, BALL.row_lse)) != right
    assert agrees(inf_cl.local_lse(P.q, P.k, t_r, t_c), BALL.row_lse)


def test_algorithm_3_line_6_gives_the_text_gradient_of_another_shard_from_three_ranks_on() -> None:
    for n in (1, 2, 3, 4, 5):
        p = batch(7, 3 * n, 4)
        I, T = (shards(t, list(range(3, 3 * n, 3))) for t in (p.q, p.k))
        l = inf_cl.ring_forward(I, T, 2, 2)
        ball = general(p)
        dI, dT = (np.concatenate(t) for t in as_printed.ring_backward(I, T, l, 2, 2))
        b = 3 * n
        dI, dT = (dI - p.k) / b, (dT - p.q) / b  # the positive and 1/b, which Alg. 3 leaves out
        assert agrees(dI, ball.d_rows)
        assert differs(dT, ball.d_columns) == (n >= 3)


def test_algorithm_3_leaves_out_the_positive_and_the_batch() -> None:
    l = inf_cl.ring_forward([P.q], [P.k], 4, 4)
    (printed,), _ = as_printed.ring_backward([P.q], [P.k], l, 4, 4)
    (right,), _ = inf_cl.ring_backward([P.q], [P.k], l, 4, 4)
    for wrong in (printed, printed / 11, printed - P.k):
        assert differs(wrong, BALL.d_rows)
    for correct in (right, (printed - P.k) / 11):
        assert agrees(correct, BALL.d_rows)


def test_algorithm_4_line_8_drops_the_last_columns() -> None:
    dI, dT = inf_cl.local_backward(P.q, P.k, L, 4, 4)
    printed_dI, printed_dT = as_printed.local_backward_floor(P.q, P.k, L, 4, 4)
    assert not printed_dT[8:].any()
    assert dT[8:].all()
    assert differs(printed_dI, SUMS.d_rows)
    assert agrees(dI, SUMS.d_rows)
    np.testing.assert_array_equal(printed_dT[:8], dT[:8])
    for ours, theirs in zip(
        as_printed.local_backward_floor(P.q, P.k[:8], L, 4, 4),
        inf_cl.local_backward(P.q, P.k[:8], L, 4, 4),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_algorithm_4_lines_10_and_14_need_a_transpose() -> None:
    I_i, T_j = P.q[:3], P.k[:2]
    dX = np.exp(I_i @ T_j.T)
    with pytest.raises(ValueError, match="mismatch"):
        as_printed.tile_logits(I_i, T_j)
    with pytest.raises(ValueError, match="mismatch"):
        as_printed.tile_text_gradient(I_i, dX)
    # Square in the wrong way (t = c) the product exists and is another one.
    I_i, T_j = P.q[:4], P.k[:4]
    assert (as_printed.tile_logits(I_i, T_j) != I_i @ T_j.T).any()
    assert (as_printed.tile_text_gradient(I_i, dX=T_j) != T_j.T @ I_i).any()


def test_algorithm_4_with_parallel_rows_loses_updates() -> None:
    assert agrees(inf_cl.local_backward(P.q, P.k, L, 4, 4)[1], SUMS.d_columns)
    assert differs(as_printed.racing_text_gradient(P.q, P.k, L, 4, 4), SUMS.d_columns)
    # A single row tile has no race.
    alone = as_printed.racing_text_gradient(P.q, P.k, L, 11, 4)
    np.testing.assert_array_equal(alone, inf_cl.local_backward(P.q, P.k, L, 11, 4)[1])


def test_memory_falls_with_the_ranks_and_not_with_their_square() -> None:
    """Table 1: from 8 to 32 GPUs by about 4; O(b / n^2) says 16, and it has no feature width."""
    for on_8, on_32 in TABLE_1.values():
        printed = as_printed.loss_memory(2**15, 8) / as_printed.loss_memory(2**15, 32)
        right = inf_cl.loss_memory(2**15, 768, 8) / inf_cl.loss_memory(2**15, 768, 32)
        assert (printed, right) == (16.0, 4.0)
        # The table has two decimals: each number is known to half a unit of its last place.
        least, most = (on_8 - 0.005) / (on_32 + 0.005), (on_8 + 0.005) / (on_32 - 0.005)
        assert round(np.log(least) / np.log(4)) == round(np.log(most) / np.log(4)) == 1
    assert inf_cl.loss_memory(2**15, 768, 8) > 700 * as_printed.loss_memory(2**15, 8)
