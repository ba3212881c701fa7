"""GradCache as printed against GradCache as corrected: docs/explanation/errata/gradcache.md says how."""

from dataclasses import replace

import numpy as np
import pytest
from balls import Ball, agrees, contrastive
from paper_towers import BATCH_NORM, DROPOUT, TANH, ball_step

from contrastile.oracle.papers import gradcache, gradcache_as_printed
from contrastile.oracle.papers.gradcache import Tower


def representations(seed=0, m=7, n=11, d=5):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, d)), rng.standard_normal((n, d))


def towers(encoder, seed=1):
    rng = np.random.default_rng(seed)
    f = Tower(encoder, rng.standard_normal((3, 4)), rng.standard_normal((7, 3)), (3, 4), (5, 6))
    g = Tower(encoder, rng.standard_normal((3, 4)), rng.standard_normal((9, 3)), (4, 2, 3), (7, 8, 9))
    return f, g, rng.integers(0, 9, 7), 0.5


def test_shared_targets_need_the_sum_of_their_anchors():
    F, G = representations()
    alone, shared = np.array([4, 1, 9, 0, 2, 3, 10]), np.array([4, 1, 4, 0, 4, 1, 10])
    assert np.array_equal(
        gradcache_as_printed.positives_of_targets(F, alone, 11), gradcache.positives_of_targets(F, alone, 11)
    )
    printed = gradcache_as_printed.positives_of_targets(F, shared, 11)
    corrected = gradcache.positives_of_targets(F, shared, 11)
    assert np.array_equal(printed[4], F[0])
    assert np.array_equal(corrected[4], F[0] + F[2] + F[4])
    assert np.array_equal(corrected[1], F[1] + F[5])
    same = [0, 2, 3, 5, 6, 7, 8, 9, 10]
    assert np.array_equal(printed[same], corrected[same])

    truth = contrastive(F, G, shared, Ball(1.0), 7)[2]
    assert agrees(gradcache.target_gradient(F, G, shared, 1.0), truth)
    wrong = gradcache_as_printed.target_gradient(F, G, shared, 1.0)
    assert agrees(wrong[same], truth[same])
    for j in (1, 4):
        assert not agrees(wrong[j], truth[j])
    # What is missing is the other anchors' share of the positive.
    assert agrees(wrong[4], truth[4] + (Ball(F[2]) + F[4]) / 7)


@pytest.mark.parametrize("tau", [0.07, 0.5, 2.0])
def test_tau_is_a_constant_multiplier_only_of_a_gradient_whose_p_knows_tau(tau):
    F, G = representations(2)
    r = np.array([4, 1, 9, 0, 2, 3, 10])
    truth = contrastive(F, G, r, Ball(1.0) / tau, 7)[1]
    assert agrees(gradcache.anchor_gradient(F, G, r, tau), truth)
    printed = gradcache_as_printed.anchor_gradient(F, G, r, tau)
    assert not any(agrees(printed[i], truth[i]) for i in range(7))
    # Not even the directions are those of the gradient.
    along = (printed * truth.mid).sum(axis=1) / np.linalg.norm(printed, axis=1) / np.linalg.norm(truth.mid, axis=1)
    assert along.min() < 63 / 64


def test_tau_of_one_is_as_printed():
    F, G = representations(2)
    r = np.array([4, 1, 9, 0, 2, 3, 10])
    assert np.array_equal(gradcache_as_printed.anchor_gradient(F, G, r, 1.0), gradcache.anchor_gradient(F, G, r, 1.0))


@pytest.mark.parametrize("N", [1, 2, 4])
def test_the_mean_over_gpus_leaves_one_nth(N):
    f, g, r, tau = towers(TANH)

    def deal(tower):
        parts = np.array_split(tower.inputs, N)
        return [replace(tower, inputs=x, sizes=(len(x),), states=(0,)) for x in parts]

    printed = gradcache_as_printed.multi_gpu_step(deal(f), deal(g), r, tau)
    corrected = gradcache.multi_gpu_step(deal(f), deal(g), r, tau)
    for wrong, right in zip(printed, corrected, strict=True):
        assert np.array_equal(wrong * N, right)  # N is a power of two: no rounding


def relative(a, b):
    return np.abs(a - b).max() / np.abs(b).max()


def test_without_batch_statistics_chunks_are_the_large_batch():
    f, g, r, tau = towers(TANH)
    whole = gradcache_as_printed.large_batch_step(f, g, r, tau)
    for ours, theirs, ball in zip(gradcache.step(f, g, r, tau), whole, ball_step(f, g, r, tau), strict=True):
        assert agrees(ours, ball)
        assert agrees(theirs, ball)


def test_batch_norm_statistics_are_per_chunk_so_chunks_are_not_the_large_batch():
    """The chunked gradient is that of the chunked loss (proved by autograd elsewhere), which is another loss."""
    f, g, r, tau = towers(BATCH_NORM)
    chunked, whole = gradcache.step(f, g, r, tau), gradcache_as_printed.large_batch_step(f, g, r, tau)
    assert abs(chunked[0] - whole[0]) > abs(whole[0]) / 64
    assert relative(chunked[1], whole[1]) > 1 / 16
    one_chunk = replace(f, sizes=(7,), states=(5,)), replace(g, sizes=(9,), states=(7,))
    for ours, theirs in zip(gradcache.step(*one_chunk, r, tau), whole, strict=True):
        assert np.array_equal(ours, theirs)


def test_dropout_means_the_same_chunked_run():
    f, g, r, tau = towers(DROPOUT)
    chunked, whole = gradcache.step(f, g, r, tau), gradcache_as_printed.large_batch_step(f, g, r, tau)
    assert relative(chunked[1], whole[1]) > 1 / 16


def test_dropout_needs_the_first_forwards_random_state():
    f, g, r, tau = towers(DROPOUT)
    replayed = gradcache.step(f, g, r, tau)
    same = gradcache_as_printed.step(f, g, r, tau, f.states, g.states)
    fresh = gradcache_as_printed.step(f, g, r, tau, (15, 16), (17, 18, 19))
    for ours, theirs in zip(same, replayed, strict=True):
        assert np.array_equal(ours, theirs)
    assert fresh[0] == replayed[0]  # the loss is of the first forward; the gradient is of neither
    assert relative(fresh[1], replayed[1]) > 1 / 16
    assert relative(fresh[2], replayed[2]) > 1 / 16
