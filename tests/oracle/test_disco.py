"""DisCo Eq. 1-7 and Alg. 1 against the two terms of the whole batch, with uneven shards."""

import numpy as np
import pytest
from balls import Ball, agrees, contrastive
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_towers import LINEAR

from contrastile.oracle.papers import collectives, disco


def shards(rng, sizes, D):
    return [rng.standard_normal((b, D)) for b in sizes]


@st.composite
def problems(draw):
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    D, t, seed = draw(st.integers(1, 6)), draw(st.floats(0.1, 30.0)), draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    return shards(rng, sizes, D), shards(rng, sizes, D), t


def directions(I, T, t, B):
    """Both terms of Eq. 1 as balls: loss, dI, dT, dt."""
    r = np.arange(len(I))
    loss_1, dI_1, dT_1, dt_1, _ = contrastive(I, T, r, t, B)
    loss_2, dT_2, dI_2, dt_2, _ = contrastive(T, I, r, t, B)
    return loss_1 + loss_2, dI_1 + dI_2, dT_1 + dT_2, dt_1 + dt_2


@settings(max_examples=40)
@given(problems())
def test_equations_2_to_7_are_the_four_terms_and_their_gradients(problem):
    I, T, t = problem
    I_A, T_A, edges = np.concatenate(I), np.concatenate(T), np.cumsum([0, *map(len, I)])
    loss, dI, dT, _ = directions(I_A, T_A, t, len(I_A))
    assert agrees(disco.loss(I_A, T_A, t), loss)
    for n in range(len(I)):
        own = np.arange(edges[n], edges[n + 1])
        others = np.delete(np.arange(len(I_A)), own)
        for ours, theirs in zip(disco.partition(I, n), (I_A[own], I_A[others]), strict=True):
            assert np.array_equal(ours, theirs)

        # the terms of Eq. 3 in its order: for each direction the own rows, and the rows of other ranks
        terms = [contrastive(X[r], Y, r, t, len(I_A)) for X, Y in ((I_A, T_A), (T_A, I_A)) for r in (own, others)]
        for ours, term in zip(disco.decomposed_loss(I, T, n, t), terms, strict=True):
            assert agrees(ours, term[0])
        intra, inter = disco.intra_gpu_gradients(I, T, n, t), disco.inter_gpu_gradients(I, T, n, t)
        for ours, ball in zip(intra, (terms[0][1], terms[2][2][own], terms[0][2][own], terms[2][1]), strict=True):
            assert agrees(ours, ball)
        for ours, ball in zip(inter, (terms[3][2][own], terms[1][2][own]), strict=True):
            assert agrees(ours, ball)
        for ours, ball in zip(disco.gradients(I, T, n, t), (dI[own], dT[own]), strict=True):
            assert agrees(ours, ball)
        sent = [disco.sent_gradients(I, T, i, n, t) for i in range(len(I)) if i != n]
        assert np.array_equal(inter[0], sum((x for x, _ in sent), np.zeros_like(I[n])))
        assert np.array_equal(inter[1], sum((x for _, x in sent), np.zeros_like(T[n])))


@given(problems(), st.integers(1, 3))
def test_algorithm_1_gives_the_parameters_the_gradient_of_the_global_loss(problem, inputs):
    I, T, t = problem
    N, B = len(I), sum(map(len, I))
    rng = np.random.default_rng(B)
    x = shards(rng, [len(shard) for shard in I], inputs)
    Theta = rng.standard_normal((inputs, I[0].shape[1]))
    I = [LINEAR.forward(Theta, shard, 0) for shard in x]
    loss_1, dI_1, dT_1, dt_1, _ = disco.algorithm_1(I, T, t)

    features = Ball(np.concatenate(x)) @ Ball(Theta)
    loss, dI, dT, dt = directions(features, np.concatenate(T), t, B)
    loss, dI, dT, dt = (ball * 0.5 * N / N for ball in (loss, dI, dT, dt))
    assert agrees(loss_1, loss)
    assert agrees(np.concatenate(dI_1), dI * N)
    assert agrees(np.concatenate(dT_1), dT * N)

    dTheta = [LINEAR.vjp(Theta, shard, 0, u) for shard, u in zip(x, dI_1, strict=True)]
    assert agrees(collectives.data_parallel_mean(dTheta), Ball(np.concatenate(x)).T @ (dI * N) / N)
    assert agrees(collectives.data_parallel_mean([np.asarray(g) for g in dt_1]), dt)


@pytest.mark.parametrize("sizes", [(4,), (2, 3), (3, 0, 5), (1, 1, 1, 1), (2, 0, 0, 7, 1)])
def test_collectives_are_exact_on_integers(sizes):
    rng = np.random.default_rng(4)
    parts = [rng.integers(-9, 9, (sum(sizes), 3)).astype(np.float64) for _ in sizes]
    edges = np.cumsum(sizes)[:-1]
    before = [part.copy() for part in parts]
    scattered, sent = collectives.reduce_scatter(parts, sizes)
    for ours, theirs in zip(scattered, np.split(sum(parts), edges), strict=True):
        assert np.array_equal(ours, theirs)
    total, sent_twice = collectives.all_reduce(parts, sizes)
    assert np.array_equal(total, sum(parts))
    assert all(np.array_equal(a, b) for a, b in zip(parts, before, strict=True))
    assert sent == (len(sizes) - 1) * parts[0].nbytes
    assert sent_twice == 2 * sent
