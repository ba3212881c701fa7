"""MBS as printed against MBS as corrected: each pair differs by what docs/explanation/errata/mbs.md says."""

import numpy as np
import pytest
from balls import Ball, agrees
from paper_towers import BATCH_NORM
from test_mbs import Regression, dice_balls, images

from contrastile.oracle.papers import mbs, mbs_as_printed, mbs_segmentation


def weights(algorithm, N_B, N_mu):
    """What each sample weighs in the accumulated gradient: a sample's gradient is its own unit vector."""
    eye = np.eye(N_B)
    return algorithm(lambda micro_j: (0.0, eye[micro_j].sum(axis=0) / len(micro_j)), N_B, N_mu)[1]


def test_the_last_of_17_samples_in_micro_batches_of_16_weighs_eight_and_a_half_times():
    printed, corrected = (weights(m.algorithm_1, 17, 16) for m in (mbs_as_printed, mbs))
    assert printed[16] * 17 == 8.5
    assert np.all(printed[:16] * 17 == 17 / 32)
    assert agrees(corrected, (Ball(np.full(17, 16.0)) / 17.0) / 16.0)
    assert corrected[16] == 1 / 17
    assert printed.sum() == 1


@pytest.mark.parametrize(
    ("N_B", "N_mu", "equal"),
    [
        *((N_B, N_mu, False) for N_B, N_mu in ((17, 16), (17, 4), (5, 3), (33, 32))),
        *((N_B, N_mu, True) for N_B, N_mu in ((16, 4), (15, 5), (7, 7), (3, 9), (6, 1))),
    ],
)
def test_algorithm_1_is_right_as_printed_only_when_micro_batches_are_equal(N_B, N_mu, equal):
    problem = Regression(N_B)
    for algorithm, right in ((mbs.algorithm_1, True), (mbs_as_printed.algorithm_1, equal)):
        for found, ball in zip(algorithm(problem, N_B, N_mu), problem.ball(), strict=True):
            assert agrees(found, ball) is right


def test_equation_6_counts_samples_that_are_not_there():
    micro = mbs.split(17, 16)
    assert mbs_as_printed.mini_batch_size(len(micro), 16) == 32
    assert mbs.mini_batch_size([len(micro_j) for micro_j in micro]) == 17


def test_equations_8_10_11_16_and_17_divide_by_the_missing_samples_too():
    problem, micro = Regression(17), mbs.split(17, 16)
    (L, dL), (loss, grad) = problem.samples(), problem.ball()
    assert agrees(mbs_as_printed.mean_loss(L, micro, 16), loss * 17.0 / 32.0)
    assert agrees(mbs_as_printed.gradient_of_mean(dL, micro, 16), grad * 17.0 / 32.0)
    assert not agrees(mbs_as_printed.gradient_of_mean(dL, micro, 16), grad)
    assert agrees(mbs.gradient_of_mean(dL, micro), grad)


def test_equations_12_14_and_15_are_another_wrong_answer_than_11():
    problem, micro = Regression(17), mbs.split(17, 16)
    dL, grad = problem.samples()[1], problem.ball()[1]
    dL_mu = np.stack([mbs.mini_batch_gradient(dL[micro_j]) for micro_j in micro])
    mean_of_means = mbs_as_printed.gradient_of_micro_losses(dL_mu)
    ball = problem.samples(Ball)[1]
    expected = (ball[:16].sum(axis=0) / 16.0 + ball[16]) / 2.0
    assert agrees(mean_of_means, expected)
    assert agrees(mbs_as_printed.normalized_gradient(dL_mu), expected)
    assert not agrees(mean_of_means, grad)
    assert not agrees(mbs_as_printed.gradient_of_mean(dL, micro, 16), expected)
    assert mbs_as_printed.normalized_loss(3.0, 2) == 1.5
    assert mbs.normalized_loss(3.0, 1, 17) == 1 / 17 * 3.0


@pytest.mark.parametrize("N_mu", [1, 2, 3])
def test_dice_is_not_separable_even_over_equal_micro_batches(N_mu):
    A, B = images(6)
    micro, truth = mbs.split(6, N_mu), dice_balls(A, B)
    printed = mbs_as_printed.streamed_dice_loss_gradient(A, B, micro)
    assert not agrees(printed, truth[1])
    assert agrees(mbs_segmentation.streamed_dice_loss_gradient(A, B, micro), truth[1])
    chunks = sum(mbs_segmentation.dice_loss(A[micro_j], B[micro_j]) for micro_j in micro) / len(micro)
    assert not agrees(chunks, truth[0])


def test_dice_in_one_micro_batch_is_the_dice_of_the_mini_batch():
    A, B = images(6)
    assert agrees(mbs_as_printed.streamed_dice_loss_gradient(A, B, mbs.split(6, 6)), dice_balls(A, B)[1])


def test_batch_norm_statistics_are_per_micro_batch_so_equal_ones_are_not_exact():
    rng = np.random.default_rng(0)
    x, y, w = rng.standard_normal((12, 3)), rng.standard_normal((12, 2)), rng.standard_normal((3, 2))

    def loss_and_gradient(indices):
        e = BATCH_NORM.forward(w, x[indices], 0) - y[indices]
        return float((e * e).sum() / (2 * len(indices))), BATCH_NORM.vjp(w, x[indices], 0, e / len(indices))

    def whole():
        e = BATCH_NORM.forward(Ball(w), Ball(x), 0) - y
        return (e * e).sum() / 24.0, BATCH_NORM.vjp(Ball(w), Ball(x), 0, e / 12.0)

    loss, grad = whole()
    streamed = mbs.algorithm_1(loss_and_gradient, 12, 4)
    assert agrees(loss_and_gradient(np.arange(12))[0], loss)
    assert agrees(loss_and_gradient(np.arange(12))[1], grad)
    assert not agrees(streamed[0], loss)
    assert not agrees(streamed[1], grad)
    # No weight corrects it: with equal micro-batches both forms of Alg. 1 agree on the same other number.
    printed = mbs_as_printed.algorithm_1(loss_and_gradient, 12, 4)
    assert agrees(printed[1], Ball(streamed[1], grad.rad))
