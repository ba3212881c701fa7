"""MBS Eq. 1-19 and Alg. 1: streamed micro-batches of any sizes give the gradient of the mini-batch."""

import math

import numpy as np
import pytest
import torch
from balls import Ball, agrees
from hypothesis import given
from hypothesis import strategies as st

from contrastile.oracle.papers import mbs, mbs_segmentation

SIZES = st.tuples(st.integers(1, 33), st.integers(1, 40))


class Regression:
    """L_i = (tanh(x_i w) - y_i)^2 / 2, a loss of single samples, and its gradient with respect to w."""

    def __init__(self, N_B, P=3, seed=0):
        rng = np.random.default_rng(seed)
        self.x, self.y, self.w = rng.standard_normal((N_B, P)), rng.standard_normal(N_B), rng.standard_normal(P)

    def samples(self, array=np.asarray):
        """The loss and the gradient of every sample; with array=Ball, as balls."""
        x, w = array(self.x), array(self.w[:, None])
        h = np.tanh(x @ w)
        e = h - self.y[:, None]
        return (e * e * 0.5)[:, 0], x * (e * (1.0 - h * h))

    def __call__(self, indices):
        L, dL = self.samples()
        return mbs.mini_batch_loss(L[indices]), mbs.mini_batch_gradient(dL[indices])

    def ball(self):
        """The loss and the gradient of the mini-batch, as balls that allow for a weight and a mean per micro-batch."""
        L, dL = self.samples(Ball)
        N_B = len(self.x)
        return tuple((x * float(N_B) / N_B * 1.0).sum(axis=0) / N_B for x in (L, dL))


@given(SIZES)
def test_equations_1_to_3_and_6_state_a_partition(sizes):
    N_B, N_mu = sizes
    micro = mbs.split(N_B, N_mu)
    batch = mbs.mini_batch(micro)
    assert np.array_equal(batch, np.arange(N_B))
    assert all(mbs.is_micro_batch(micro_j, batch) for micro_j in micro)
    assert not mbs.is_micro_batch(np.array([0, N_B]), batch)
    assert max(map(len, micro)) == mbs.micro_batch_size(N_B, N_mu) <= N_mu
    assert len(micro) == math.ceil(N_B / N_mu)
    assert mbs.mini_batch_size([len(micro_j) for micro_j in micro]) == N_B
    assert min(map(len, micro)) >= 1


@given(SIZES)
def test_equations_4_to_17_all_give_the_mini_batch(sizes):
    problem = Regression(sizes[0])
    micro, (L, dL), (loss, grad) = mbs.split(*sizes), problem.samples(), problem.ball()
    n = [len(micro_j) for micro_j in micro]
    for value in (mbs.mini_batch_loss(L), mbs.mean_loss(L, micro), mbs.summed_loss(L, micro) / sizes[0]):
        assert agrees(value, loss)
    dL_mu = np.stack([mbs.mini_batch_gradient(dL[micro_j]) for micro_j in micro])
    for value in (
        mbs.mini_batch_gradient(dL),
        mbs.gradient_of_mean(dL, micro),
        mbs.gradient_of_micro_means(dL, micro),
        mbs.gradient_of_micro_losses(dL_mu, n),
        mbs.normalized_gradient(dL_mu, n),
        mbs.normalized_sample_gradient(dL, micro),
    ):
        assert agrees(value, grad)
    shares = [mbs.normalized_loss(mbs.mini_batch_loss(L[m]), len(m), sizes[0]) for m in micro]
    assert agrees(sum(shares), loss)
    L_1, grad_1 = mbs.algorithm_1(problem, *sizes)
    assert agrees(L_1, loss)
    assert agrees(grad_1, grad)


def test_equation_13_is_as_many_mini_batch_gradients_as_equal_micro_batches():
    problem = Regression(24)
    dL = problem.samples()[1]
    dL_mu = np.stack([mbs.mini_batch_gradient(dL[micro_j]) for micro_j in mbs.split(24, 6)])
    grad = problem.ball()[1]
    assert agrees(mbs.accumulated_gradient(dL_mu), grad * 4.0)
    assert not agrees(mbs.accumulated_gradient(dL_mu), grad)


def images(n=5, pixels=7, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.random((n, pixels)) < 0.5).astype(np.float64), rng.uniform(0.05, 0.95, (n, pixels))


def dice_balls(A, B):
    """Eq. 19 and its gradient, as balls."""
    B = Ball(B)
    X, Y = (A * B).sum(), A.sum() + B.sum()
    return 1.0 - X * 2.0 / Y, X * 2.0 / (Y * Y) - 2.0 * A / Y


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**31))
def test_equations_18_and_19_against_autograd(n, pixels, seed):
    A, B = images(n, pixels, seed)
    leaf, truth = torch.tensor(B, requires_grad=True), torch.tensor(A)
    dice = 1 - 2 * (truth * leaf).sum() / (truth.sum() + leaf.sum())
    loss, gradient = dice_balls(A, B)
    assert agrees(mbs_segmentation.dice_loss(A, B), loss)
    assert agrees(dice.item(), loss)
    assert agrees(mbs_segmentation.dice_coefficient(A, B), 1.0 - loss)
    (theirs,) = torch.autograd.grad(dice, leaf)
    assert agrees(theirs.numpy(), gradient)
    assert agrees(mbs_segmentation.dice_loss_gradient(A, B), gradient)


@pytest.mark.parametrize("N_mu", [1, 2, 3, 4, 9])
def test_one_ratio_an_image_streams_exactly(N_mu):
    A, B = images(5)

    def loss_and_gradient(indices):
        dB = np.zeros_like(B)
        dB[indices] = mbs_segmentation.image_dice_loss_gradient(A[indices], B[indices])
        return mbs_segmentation.image_dice_loss(A[indices], B[indices]), dB

    L, dB = mbs.algorithm_1(loss_and_gradient, 5, N_mu)
    rows = [dice_balls(A[i : i + 1], B[i : i + 1]) for i in range(5)]
    loss = sum((row[0] for row in rows[1:]), rows[0][0]) * 5.0 / 5.0 / 5.0
    grad = [row[1] * 5.0 / 5.0 / 5.0 for row in rows]
    assert agrees(L, loss)
    for i in range(5):
        assert agrees(dB[i : i + 1], grad[i])
