"""DisCo Eq. 1-7 and Alg. 1: against the general loss and autograd, over uneven shards."""

import numpy as np
import pytest
import torch
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


def torch_terms(I, T, n, t):
    """The four terms of Eq. 3 by torch, with the shards as leaves."""
    I = [torch.tensor(x, requires_grad=True) for x in I]
    T = [torch.tensor(x, requires_grad=True) for x in T]
    B, edges = sum(map(len, I)), np.cumsum([0, *map(len, I)])

    def term(X, Y, ranks):
        logits = t * torch.cat([X[i] for i in ranks] or [X[0][:0]]) @ torch.cat(Y).T
        labels = torch.tensor([k for i in ranks for k in range(edges[i], edges[i + 1])], dtype=torch.long)
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / B

    others = [i for i in range(len(I)) if i != n]
    return I, T, [term(I, T, [n]), term(I, T, others), term(T, I, [n]), term(T, I, others)]


@settings(max_examples=40, deadline=None)
@given(problems())
def test_equations_2_to_7_against_autograd(problem):
    I, T, t = problem
    B = sum(map(len, I))
    edges = np.cumsum([0, *map(len, I)])
    loss, dI, dT, _ = directions(np.concatenate(I), np.concatenate(T), t, B)
    for n in range(len(I)):
        I_n, I_others = disco.partition(I, n)
        assert np.array_equal(I_n, I[n])
        assert np.array_equal(np.delete(np.concatenate(I), np.arange(edges[n], edges[n + 1]), axis=0), I_others)

        leaves_I, leaves_T, terms = torch_terms(I, T, n, t)
        assert agrees(sum(disco.decomposed_loss(I, T, n, t)), loss)
        assert agrees(disco.loss(np.concatenate(I), np.concatenate(T), t), loss)
        for ours, theirs in zip(disco.decomposed_loss(I, T, n, t), terms, strict=True):
            assert agrees(ours, Ball(theirs.item(), loss.rad))

        rows = slice(edges[n], edges[n + 1])
        bound_I, bound_T = dI.rad[rows], dT.rad[rows]
        leaf_I, leaf_T = leaves_I[n], leaves_T[n]

        def grad(term, leaf):
            (g,) = torch.autograd.grad(term, leaf, retain_graph=True)
            return g.numpy()

        intra = disco.intra_gpu_gradients(I, T, n, t)
        for ours, (term, leaf, bound) in zip(
            intra,
            [(0, leaf_I, bound_I), (2, leaf_I, bound_I), (0, leaf_T, bound_T), (2, leaf_T, bound_T)],
            strict=True,
        ):
            assert agrees(ours, Ball(grad(terms[term], leaf), bound))
        inter = disco.inter_gpu_gradients(I, T, n, t)
        assert agrees(inter[0], Ball(grad(terms[3], leaf_I), bound_I))
        assert agrees(inter[1], Ball(grad(terms[1], leaf_T), bound_T))
        total = disco.gradients(I, T, n, t)
        assert agrees(total[0], dI[rows])
        assert agrees(total[1], dT[rows])
        assert agrees(grad(sum(terms), leaf_I), dI[rows])
        sent = [disco.sent_gradients(I, T, i, n, t) for i in range(len(I)) if i != n]
        assert np.array_equal(inter[0], sum((x for x, _ in sent), np.zeros_like(I[n])))
        assert np.array_equal(inter[1], sum((x for _, x in sent), np.zeros_like(T[n])))


@settings(deadline=None)
@given(problems(), st.integers(1, 3))
def test_algorithm_1_gives_the_parameters_the_gradient_of_the_global_loss(problem, inputs):
    I, T, t = problem
    N, B = len(I), sum(map(len, I))
    rng = np.random.default_rng(B)
    x = shards(rng, [len(shard) for shard in I], inputs)
    Theta = rng.standard_normal((inputs, I[0].shape[1]))
    I = [LINEAR.forward(Theta, shard, 0) for shard in x]
    step = disco.algorithm_1(I, T, t)

    features = Ball(np.concatenate(x)) @ Ball(Theta)
    loss, dI, dT, dt = directions(features, np.concatenate(T), t, B)
    loss, dI, dT, dt = (ball * 0.5 * N / N for ball in (loss, dI, dT, dt))
    assert agrees(step.loss, loss)
    assert agrees(np.concatenate(step.image_gradients), dI * N)
    assert agrees(np.concatenate(step.text_gradients), dT * N)

    dTheta = [LINEAR.vjp(Theta, shard, 0, u) for shard, u in zip(x, step.image_gradients, strict=True)]
    weights = torch.tensor(Theta, requires_grad=True)
    scale = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    logits = scale * (torch.tensor(np.concatenate(x)) @ weights) @ torch.tensor(np.concatenate(T)).T
    labels = torch.arange(B)
    cross_entropy = torch.nn.functional.cross_entropy
    ((cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2).backward()
    expected = Ball(np.concatenate(x)).T @ (dI * N) / N
    assert agrees(collectives.data_parallel_mean(dTheta), expected)
    assert agrees(weights.grad.numpy(), expected)
    assert agrees(collectives.data_parallel_mean([np.asarray(g) for g in step.t_gradients]), dt)
    assert agrees(scale.grad.item(), dt)


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
