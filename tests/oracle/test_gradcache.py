"""GradCache Eq. 1-13 and Sec. 3.3-3.4: the cached gradient is the gradient of the parameters of the encoders."""

from itertools import pairwise

import numpy as np
import torch
from balls import Ball, agrees, contrastive, one_hot
from hypothesis import given
from hypothesis import strategies as st
from paper_towers import BATCH_NORM, BILINEAR, DROPOUT, LINEAR, TANH, ball_forward, ball_step, ball_vjp

from contrastile.oracle.papers import gradcache, gradcache_distance
from contrastile.oracle.papers.gradcache import Tower

SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any)


@st.composite
def problems(draw, encoders=(TANH, LINEAR, DROPOUT)):
    """Two towers with ragged sub-batches; several anchors may share a target, and a target may have none."""
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    d, width = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    towers = []
    for _ in range(2):
        sizes = tuple(draw(SIZES))
        states = tuple(range(draw(st.integers(0, 99)), 1000)[: len(sizes)])
        x = rng.standard_normal((sum(sizes), width))
        encoder = draw(st.sampled_from(encoders))
        towers.append(Tower(encoder, rng.standard_normal((width, d)), x, sizes, states))
    r = rng.integers(0, len(towers[1].inputs), len(towers[0].inputs))
    return *towers, r, draw(st.floats(0.05, 3.0))


class Traced(torch.Tensor):
    """A tensor on which NumPy's functions call torch's, so that autograd differentiates the encoders."""

    def __array_ufunc__(self, ufunc, method, *inputs):
        return getattr(torch, ufunc.__name__)(*map(torch.as_tensor, inputs))


def by_autograd(forward, u, *arrays):
    """The vector-Jacobian products of a function of arrays."""
    leaves = [torch.tensor(x).as_subclass(Traced).requires_grad_() for x in arrays]
    return [x.numpy() for x in torch.autograd.grad(forward(*leaves), leaves, torch.tensor(u))]


@given(problems(encoders=(TANH, LINEAR, DROPOUT, BATCH_NORM)))
def test_the_products_of_the_towers_and_the_distance_are_those_of_autograd(problem):
    f, g, *_ = problem
    rng, d = np.random.default_rng(0), f.parameters.shape[1]
    u = rng.standard_normal((len(f.inputs), d))
    (product,) = by_autograd(lambda Theta: f.encoder.forward(Theta, torch.tensor(f.inputs), 5), u, f.parameters)
    assert agrees(product, f.encoder.vjp(Ball(f.parameters), Ball(f.inputs), 5, Ball(u)))
    arrays = rng.standard_normal((d, d)), u, rng.standard_normal((len(g.inputs), d))
    w = arrays[1] @ arrays[2].T
    for product, ball in zip(
        by_autograd(BILINEAR.forward, w, *arrays), BILINEAR.vjp(*map(Ball, (*arrays, w))), strict=True
    ):
        assert agrees(product, ball)


@given(problems(encoders=(TANH, LINEAR)))
def test_equations_1_2_and_5_to_9_are_the_loss_and_its_gradients_in_sub_batches_of_any_size(problem):
    f, g, r, tau = problem
    F, G = gradcache.graphless_forward(f), gradcache.graphless_forward(g)
    ball = contrastive(F, G, r, Ball(1.0) / tau, len(F))
    cache = gradcache.representation_gradient_cache(F, G, r, tau)
    assert agrees(gradcache.loss(F, G, r, tau), ball[0])
    assert agrees(cache[0], ball[1])
    assert agrees(cache[1], ball[2])
    assert agrees(gradcache.normalized_similarity(F @ G.T, tau), ball[4])
    assert agrees(gradcache.positives_of_targets(F, r, len(G)), Ball(one_hot(r, len(G))).T @ F)
    for tower, u in zip((f, g), cache, strict=True):
        for gradient in (gradcache.chain_rule(tower, u), gradcache.accumulate(tower, u)):
            assert agrees(gradient, ball_vjp(tower, Ball(u)))


@given(problems(encoders=(TANH, LINEAR, DROPOUT, BATCH_NORM)))
def test_the_cached_gradient_is_the_gradient_end_to_end(problem):
    assert all(map(agrees, gradcache.step(*problem), ball_step(*problem)))


@given(problems(encoders=(TANH, LINEAR)), st.data())
def test_multi_gpu_gives_the_gradient_of_the_gathered_batch(problem, data):
    f, g, r, tau = problem
    N = data.draw(st.integers(1, 4))

    def deal(tower):
        """Split a tower over N ranks with sub-batches of their own; some ranks may be empty."""
        n = len(tower.inputs)
        cuts = sorted(data.draw(st.lists(st.integers(0, n), min_size=N - 1, max_size=N - 1)))
        edges = [0, *cuts, n]
        ranks = []
        for low, high in pairwise(edges):
            first = (high - low) // 2
            sizes = (first, high - low - first)
            ranks.append(Tower(tower.encoder, tower.parameters, tower.inputs[low:high], sizes, (0, 1)))
        return ranks

    dTheta, dLambda = gradcache.multi_gpu_step(deal(f), deal(g), r, tau)
    _, ball_theta, ball_lambda = ball_step(f, g, r, tau)
    assert agrees(dTheta, ball_theta * N / N)
    assert agrees(dLambda, ball_lambda * N / N)


@given(problems(encoders=(TANH, LINEAR)))
def test_deep_distance_end_to_end(problem):
    f, g, r, tau = problem
    d = f.parameters.shape[1]
    Omega = np.random.default_rng(d).standard_normal((d, d))
    loss, dTheta, dLambda, dOmega = gradcache_distance.deep_distance_step(f, g, BILINEAR, Omega, r, tau)

    F, G = ball_forward(f), ball_forward(g)
    d_ij = np.tanh(F @ Ball(Omega) @ G.T)
    # With the identity as targets, dot products are the given distances.
    ball_loss, w, _, _, _ = contrastive(d_ij, np.eye(len(G)), r, Ball(1.0) / tau, len(r))
    ball_omega, u, v = BILINEAR.vjp(Ball(Omega), F, G, w)
    balls = ball_loss, ball_vjp(f, u), ball_vjp(g, v), ball_omega
    assert all(map(agrees, (loss, dTheta, dLambda, dOmega), balls))
