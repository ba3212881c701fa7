"""The mistakes of the papers: each form as printed, and as corrected. docs/explanation/errata describes them.

An erratum is a function of arguments that show or hide the mistake. It returns the values of the printed form and of
the corrected form, the truth as a ball and, if the page names the wrong result, that result as another ball. If an
algorithm has several mistakes, the function corrects all but one, so that each difference has one cause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
from balls import Ball, agrees, contrastive, general, one_hot
from paper_towers import BATCH_NORM, DROPOUT, LINEAR, TANH, ball_step
from test_disco import directions
from test_inf_cl import batch
from test_mbs import Regression, dice_balls, images

from contrastile.oracle.general import row_lse
from contrastile.oracle.pairs import Pairs
from contrastile.oracle.papers import disco, gradcache, inf_cl, mbs, mbs_segmentation
from contrastile.oracle.papers.collectives import all_reduce, data_parallel_mean, row_slices
from contrastile.oracle.papers.gradcache import Tower

ERRATA: list = []


def erratum(shows: list[tuple], hides: list[tuple] = ()) -> Callable:
    """Register a function with arguments that show the mistake and arguments that hide it."""

    def register(function: Callable) -> Callable:
        ERRATA.extend([*((function, x, False) for x in shows), *((function, x, True) for x in hides)])
        return function

    return register


P = batch(6, 11, 4)
I, T, b = P.q, P.k, 11
L = row_lse(P.x, P.A)
BALL = general(P)
# the loss sum_i l_i, whose gradient Inf-CL Alg. 4 computes
SUMS = general(P.moved(pairs=Pairs(), u=np.ones(b)))


def merge(l: np.ndarray, l_ij: np.ndarray) -> np.ndarray:
    """Inf-CL Eq. 4."""
    with np.errstate(all="ignore"):
        return l + np.log(1 + np.exp(l_ij - l))


def from_zero(parts: list[np.ndarray]) -> np.ndarray:
    return reduce(merge, parts, np.zeros_like(parts[0]))


@erratum(shows=[(1,), (3,)])
def inf_cl_equation_4_and_algorithm_2_line_5_start_at_0(n):
    """Alg. 1 starts at 0 and merges n results of Alg. 2, each of which starts at 0, too."""
    truth = BALL.row_lse + np.log(Ball(n))
    printed = from_zero([from_zero(inf_cl.tiled_lse(I, T, b, 4)[0])] * n)
    right = reduce(inf_cl.merge_lse, [inf_cl.local_lse(I, T, 4, 4)] * n)
    return printed, right, truth, np.logaddexp(truth, Ball(np.full(b, np.log(n + 1))))


@erratum(shows=[()])
def inf_cl_equation_7_first_line():
    """-1/b sum_j (dL/dx_ii dx_ii/dI_i dx_ij/dI_i - dL/dl_i dl_i/dx_ij dx_ij/dI_i), products of vectors by entries."""
    positive = -1 / b * T * T.sum(axis=0)
    printed = -1 / b * (positive - 1 / b * (np.exp(I @ T.T - L[:, None]) @ T))
    # the second line has no stray factor, one 1/b, and the sign of dL/dx_ii
    softmax_part, stray = BALL.d_rows + Ball(T) / b, T * Ball(T).sum(axis=0)
    return printed, inf_cl.image_gradient(I, T, L), BALL.d_rows, softmax_part / b + stray / b / b


@erratum(shows=[(4,)], hides=[(1,)])
def inf_cl_equation_8_counts_scalars_by_tiles(t_c):
    """I'_i <- I'_i + e^{x_ij - l_i} T_j for j = 1..n_c."""
    I_prime = sum(np.exp(I @ T_j - L)[:, None] * T_j for T_j in T[: len(inf_cl.divide(T, t_c))])
    return -T / b + I_prime / b, inf_cl.tiled_image_gradient(I, T, L, t_c), BALL.d_rows


@erratum(shows=[(4,)], hides=[(1,)])
def inf_cl_equation_9_counts_the_tiles_of_the_global_batch(n):
    """n_r = ceil(b / t_r) and n_c = ceil(b / t_c) for a block of b_s x b_s."""
    shard = np.zeros((1000 // n, 1))
    truth = Ball([len(inf_cl.divide(shard, t)) for t in (32, 64)])
    return [-(-1000 // t) for t in (32, 64)], inf_cl.tile_counts(len(shard), 32, 64), truth


@erratum(shows=[(11, 4)], hides=[(4, 4), (4, 11)])
def inf_cl_algorithm_2_line_6_loops_over_row_tiles(t_r, t_c):
    """For j = 1 to n_r: fewer steps drop columns; more steps would read past the end (here they read nothing)."""
    tiles = inf_cl.tiled_lse(I, T, t_r, t_c)
    printed = np.concatenate([reduce(inf_cl.merge_lse, row[: len(tiles)]) for row in tiles])
    return printed, inf_cl.local_lse(I, T, t_r, t_c), BALL.row_lse


@erratum(shows=[(3,), (4,), (5,)], hides=[(1,), (2,)])
def inf_cl_algorithm_3_line_6_adds_the_text_gradient_of_another_shard(n):
    """k = (i + j - 1) mod n, while in step j rank i holds the gradient of shard (i - j + 1) mod n."""
    p = batch(7, 3 * n, 4)
    I, T = np.split(p.q, n), np.split(p.k, n)
    l = inf_cl.ring_forward(I, T, 2, 2)
    sums = np.zeros((n, 3, 4))
    for j in range(1, n + 1):
        for i in range(n):
            sums[(i - j + 1) % n] += inf_cl.local_backward(I[i], T[(i + j - 1) % n], l[i], 2, 2)[1]
    printed = (np.concatenate(sums) - p.q) / len(p.q)
    return printed, np.concatenate(inf_cl.ring_backward(I, T, l, 2, 2)[1]), general(p).d_columns


@erratum(shows=[()])
def inf_cl_algorithm_3_leaves_out_the_positive_and_the_batch():
    right = inf_cl.ring_backward([I], [T], [L], 4, 4)[0][0]
    return inf_cl.local_backward(I, T, L, 4, 4)[0], right, BALL.d_rows, SUMS.d_rows


@erratum(shows=[(11,)], hides=[(8,)])
def inf_cl_algorithm_4_line_8_drops_the_last_columns(n):
    """For j = 1 to floor(b / t_c)."""
    l, whole = inf_cl.lse(I @ T[:n].T), n // 4 * 4
    dT = inf_cl.local_backward(I, T[:whole], l, 4, 4)[1]
    printed = np.concatenate([dT, np.zeros_like(T[whole:n])])
    truth = general(P.moved(k=T[:n], pairs=Pairs(), u=np.ones(b), v=np.zeros(n)))
    return printed, inf_cl.local_backward(I, T[:n], l, 4, 4)[1], truth.d_columns


@erratum(shows=[(4,)], hides=[(11,)])
def inf_cl_algorithm_4_lines_13_to_15_race(t_r):
    """Every row tile loads dT^j before any tile stores it, so that only the part of the last tile remains."""
    last = (b - 1) // t_r * t_r
    printed = inf_cl.local_backward(I[last:], T, L[last:], t_r, 4)[1]
    return printed, inf_cl.local_backward(I, T, L, t_r, 4)[1], SUMS.d_columns


# Table 1, memory of the loss in GB for 32k to 256k pairs: on 8 GPUs, on 32 GPUs
@erratum(shows=[(0.18, 0.05), (0.36, 0.09), (0.72, 0.18), (1.45, 0.35)])
def inf_cl_section_1_says_that_memory_falls_with_the_square_of_the_ranks(on_8, on_32):
    """O(b / n^2), by which a GPU of 32 holds 1/16 of the memory of a GPU of 8."""
    memory = [inf_cl.loss_memory(2**15, 768, n) for n in (8, 32)]
    # the table has two decimals, so each number is known to half a unit of its last place
    return 32**2 / 8**2, memory[0] / memory[1], Ball(on_8, 0.005) / Ball(on_32, 0.005), Ball(16.0)


def test_inf_cl_equation_4_hides_every_loss_when_all_logits_are_negative() -> None:
    tiles = [np.array([-50.0]), np.array([-60.0])]
    assert from_zero(tiles)[0] == 0.0
    assert inf_cl.merge_lse(*tiles)[0] < -49


def test_inf_cl_equation_4_from_minus_infinity_is_nan() -> None:
    nothing = np.full(1, -np.inf)
    for l in (nothing, np.zeros(1)):
        assert np.isnan(merge(nothing, l))[0]
        np.testing.assert_array_equal(inf_cl.merge_lse(nothing, l), l)


@pytest.mark.parametrize(("dtype", "fits", "overflows"), [(np.float32, 88.0, 89.0), (np.float64, 709.0, 710.0)])
def test_inf_cl_equation_4_overflows_on_a_large_step_up(dtype: type, fits: float, overflows: float) -> None:
    start, low, high = (np.array([value], dtype=dtype) for value in (0.0, fits, overflows))
    assert merge(start, low)[0] == fits
    assert merge(start, high)[0] == np.inf
    assert inf_cl.merge_lse(start, high)[0] == overflows


def test_inf_cl_algorithm_4_lines_10_and_14_need_a_transpose() -> None:
    """X = I T and dT += I dX: the shapes do not match, or, for tiles as long as features are wide, results differ."""
    for left, right in ((I[:3], T[:2]), (I[:3], np.exp(I[:3] @ T[:2].T))):
        with pytest.raises(ValueError, match="mismatch"):
            left @ right
    assert (I[:4] @ T[:4] != I[:4] @ T[:4].T).any()
    assert (I[:4] @ T[:4] != T[:4].T @ I[:4]).any()


def shards(sizes: tuple[int, ...]) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return [[rng.standard_normal((rows, 5)) for rows in sizes] for _ in range(2)]


@erratum(shows=[(2,), (4,), (8,)], hides=[(1,)])
def disco_algorithm_1_averages_gradients_twice(N):
    """`all_reduce(I.E.grad, op=AVG)`, and then DDP's mean of the parameters' gradients."""
    sizes, t = [3] * N, 2.0
    (x, texts), Theta = shards(sizes), np.random.default_rng(1).standard_normal((5, 5))
    images = [LINEAR.forward(Theta, shard, 0) for shard in x]
    parts = [disco.rank_gradients(images, texts, n, t, 3)[1] for n in range(N)]
    averaged = all_reduce(parts, sizes)[0] / N

    def parameters(features):
        return data_parallel_mean([LINEAR.vjp(Theta, shard, 0, u) for shard, u in zip(x, features, strict=True)])

    right = parameters(disco.algorithm_1(images, texts, t)[1])
    all_x = Ball(np.concatenate(x))
    dI = directions(all_x @ Ball(Theta), np.concatenate(texts), t, 3 * N)[1]
    truth = all_x.T @ (dI * 0.5 * N) / N
    return parameters([averaged[rows] for rows in row_slices(sizes)]), right, truth, truth / N


@erratum(shows=[((4, 1, 3), 2)], hides=[((4, 4, 4), 0), ((4, 4, 4), 2)])
def disco_algorithm_1_labels(sizes, rank):
    """`labels = arange(b) + b * rank`."""
    printed = np.arange(sizes[rank]) + sizes[rank] * rank
    return printed, disco.labels(sizes, rank), Ball(sum(sizes[:rank]) + np.arange(sizes[rank]))


@erratum(shows=[((5, 1, 3),)], hides=[((3, 3, 3),)])
def disco_algorithm_1_takes_a_mean_of_means(sizes):
    """`all_reduce(loss, op=AVG)` of each rank's mean over its own rows."""
    images, texts = shards(sizes)
    means = [disco.rank_gradients(images, texts, n, 2.0, rows)[0] for n, rows in enumerate(sizes)]
    truth = directions(np.concatenate(images), np.concatenate(texts), 2.0, 9)[0] * 0.5
    return sum(means) / 3, disco.algorithm_1(images, texts, 2.0)[0], truth


rng = np.random.default_rng(2)
F, G = rng.standard_normal((7, 5)), rng.standard_normal((11, 5))
ALONE, SHARED = (4, 1, 9, 0, 2, 3, 10), (4, 1, 4, 0, 4, 1, 10)


@erratum(shows=[(SHARED,)], hides=[(ALONE,)])
def gradcache_equation_7_takes_one_anchor_a_target(r):
    """epsilon_j = f(s_k) for one k with r_k = j (here the first), else 0; Eq. 6 with it."""
    r = np.array(r)
    first = np.unique(r, return_index=True)[1]
    epsilon = one_hot(r[first], 11).T @ F[first]
    printed = -(epsilon - gradcache.normalized_similarity(F @ G.T, 1.0).T @ F) / 7
    truth, others = contrastive(F, G, r, Ball(1.0), 7)[2], np.delete(np.arange(7), first)
    missing = Ball(one_hot(r[others], 11)).T @ F[others] / 7
    return printed, gradcache.target_gradient(F, G, r, 1.0), truth, truth + missing


@erratum(shows=[(0.07,), (0.5,), (2.0,)], hides=[(1.0,)])
def gradcache_section_3_1_has_tau_only_as_a_multiplier(tau):
    """Eq. 5 over tau, with p of Eq. 2, which has no tau. Not even the directions, compared here, are right."""
    r = np.array(ALONE)
    printed = -(G[r] - gradcache.normalized_similarity(F @ G.T, 1.0) @ G) / (7 * tau)
    forms = printed, gradcache.anchor_gradient(F, G, r, tau), contrastive(F, G, r, Ball(1.0) / tau, 7)[1]
    return [x / np.sqrt((x * x).sum(axis=1, keepdims=True)) for x in forms]


def towers(encoder):
    rng = np.random.default_rng(1)
    f = Tower(encoder, rng.standard_normal((3, 4)), rng.standard_normal((7, 3)), (3, 4), (5, 6))
    g = Tower(encoder, rng.standard_normal((3, 4)), rng.standard_normal((9, 3)), (4, 2, 3), (7, 8, 9))
    return f, g, rng.integers(0, 9, 7), 0.5


@erratum(shows=[(2,), (4,)], hides=[(1,)])
def gradcache_section_3_4_takes_the_mean_over_gpus(N):
    """Reduction "as with standard parallel training", which is the mean of DDP."""
    f, g, r, tau = towers(TANH)
    dealt = [
        [replace(x, inputs=part, sizes=(len(part),), states=(0,)) for part in np.array_split(x.inputs, N)]
        for x in (f, g)
    ]
    printed = data_parallel_mean(gradcache.local_gradients(*dealt, r, tau)[0])
    truth = ball_step(f, g, r, tau)[1] * N / N
    return printed, gradcache.multi_gpu_step(*dealt, r, tau)[0], truth, truth / N


def whole(tower):
    return replace(tower, sizes=(len(tower.inputs),), states=tower.states[:1])


@erratum(
    shows=[(BATCH_NORM, True), (DROPOUT, True)],
    hides=[(TANH, True), (BATCH_NORM, False), (DROPOUT, False)],
)
def gradcache_claims_the_exact_same_gradient_update(encoder, chunked):
    """The gradient of the large batch (v2, Sec. 1 and 6). BatchNorm makes another function, dropout another draw."""
    f, g, r, tau = towers(encoder)
    large = gradcache.step(whole(f), whole(g), r, tau)[1]
    f, g = (f, g) if chunked else (whole(f), whole(g))
    return large, gradcache.step(f, g, r, tau)[1], ball_step(f, g, r, tau)[1]


@erratum(shows=[(15, 16)], hides=[(5, 6)])
def gradcache_section_3_3_runs_step_3_on_the_next_random_states(*states):
    """The loss of one draw with the gradient of another."""
    f, g, r, tau = towers(DROPOUT)
    u = gradcache.representation_gradient_cache(*map(gradcache.graphless_forward, (f, g)), r, tau)[0]
    printed = gradcache.accumulate(replace(f, states=states), u)
    return printed, gradcache.step(f, g, r, tau)[1], ball_step(f, g, r, tau)[1]


UNEQUAL = [(17, 16), (17, 4), (5, 3), (33, 32)]
EQUAL = [(16, 4), (15, 5), (7, 7), (6, 1)]


def mbs_algorithm_1(loss_and_gradient, N_B, N_mu):
    """Alg. 1, line 11: the gradient of every micro-batch over N_S, however few samples it has."""
    micro = mbs.split(N_B, N_mu)
    return sum(loss_and_gradient(micro_j)[1] / len(micro) for micro_j in micro)


@erratum(shows=UNEQUAL, hides=[*EQUAL, (3, 9)])
def mbs_algorithm_1_line_11_and_equations_12_14_and_15(N_B, N_mu):
    """d(1/N_S sum_j L_mu_j), a mean of means."""
    problem, micro = Regression(N_B), mbs.split(N_B, N_mu)
    means = [problem.samples(Ball)[1][micro_j].sum(axis=0) / len(micro_j) for micro_j in micro]
    right, wrong = mbs.algorithm_1(problem, N_B, N_mu)[1], reduce(lambda a, b: a + b, means) / len(micro)
    return mbs_algorithm_1(problem, N_B, N_mu), right, problem.ball()[1], wrong


@erratum(shows=[()])
def mbs_algorithm_1_weighs_the_last_of_17_samples_in_micro_batches_of_16_eight_and_a_half_times():
    """The gradient of a sample is its unit vector, so that the accumulated gradient has the weight of each sample."""

    def unit_vectors(micro_j):
        return 0.0, np.eye(17)[micro_j].sum(axis=0) / len(micro_j)

    truth = Ball(np.full(17, 16.0)) / 17.0 / 16.0
    wrong = truth * ([17 / 32] * 16 + [8.5])
    return mbs_algorithm_1(unit_vectors, 17, 16), mbs.algorithm_1(unit_vectors, 17, 16)[1], truth, wrong


@erratum(shows=UNEQUAL, hides=EQUAL)
def mbs_equation_6(N_B, N_mu):
    """N_B = N_S N_mu."""
    sizes = [len(micro_j) for micro_j in mbs.split(N_B, N_mu)]
    return len(sizes) * N_mu, mbs.mini_batch_size(sizes), Ball(N_B)


@erratum(shows=UNEQUAL, hides=EQUAL)
def mbs_equations_8_10_11_16_and_17_divide_by_the_missing_samples_too(N_B, N_mu):
    """d(1/(N_S N_mu) sum_j sum_k L_{j,k}), the same sum four times."""
    problem, micro = Regression(N_B), mbs.split(N_B, N_mu)
    dL, truth, counted = problem.samples()[1], problem.ball()[1], len(micro) * N_mu
    return dL.sum(axis=0) / counted, mbs.gradient_of_mean(dL, micro), truth, truth * float(N_B) / counted


@erratum(shows=[(1,), (2,), (3,), (4,)], hides=[(6,), (9,)])
def mbs_equation_19_under_algorithm_1(N_mu):
    """The Dice loss of each micro-batch, over N_S."""
    (A, B), micro = images(6), mbs.split(6, N_mu)
    printed = [mbs_segmentation.dice_loss_gradient(A[micro_j], B[micro_j]) / len(micro) for micro_j in micro]
    return np.concatenate(printed), mbs_segmentation.streamed_dice_loss_gradient(A, B, micro), dice_balls(A, B)[1]


@erratum(shows=[(BATCH_NORM,)], hides=[(TANH,)])
def mbs_section_3_4_provides_the_same_calculation(encoder):
    """Equal micro-batches of a model with batch statistics: no weight corrects the gradient."""
    rng = np.random.default_rng(0)
    x, y, w = rng.standard_normal((12, 3)), rng.standard_normal((12, 2)), rng.standard_normal((3, 2))

    def loss_and_gradient(indices):
        e = encoder.forward(w, x[indices], 0) - y[indices]
        return float((e * e).sum() / (2 * len(indices))), encoder.vjp(w, x[indices], 0, e / len(indices))

    truth = encoder.vjp(Ball(w), Ball(x), 0, (encoder.forward(Ball(w), Ball(x), 0) - y) / 12.0)
    return mbs.algorithm_1(loss_and_gradient, 12, 4)[1], loss_and_gradient(np.arange(12))[1], truth


@pytest.mark.parametrize(("forms", "arguments", "is_hidden"), ERRATA)
def test_the_printed_form_is_wrong_where_nothing_hides_it(forms: Callable, arguments: tuple, is_hidden: bool) -> None:
    printed, right, truth, *wrong = forms(*arguments)
    assert agrees(right, truth)
    assert agrees(printed, truth) == is_hidden
    assert all(agrees(printed, ball) for ball in wrong)
