"""DisCo as printed against DisCo as corrected: each pair differs by what docs/explanation/errata/disco.md says."""

import numpy as np
import pytest
from balls import agrees, contrastive
from paper_towers import LINEAR

from contrastile.oracle.papers import collectives, disco, disco_as_printed


def batch(sizes, D=5, seed=0):
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal((b, D)) for b in sizes] for _ in range(2)]


@pytest.mark.parametrize("N", [1, 2, 4, 8])
def test_averaging_twice_leaves_one_nth_of_the_parameter_gradient(N):
    sizes = [3] * N
    x, T = batch(sizes)
    Theta = np.random.default_rng(1).standard_normal((5, 5))
    I = [LINEAR.forward(Theta, shard, 0) for shard in x]

    def parameters(step):
        shares = [LINEAR.vjp(Theta, shard, 0, u) for shard, u in zip(x, step.image_gradients, strict=True)]
        return collectives.data_parallel_mean(shares)

    printed, corrected = disco_as_printed.algorithm_1(I, T, 2.0), disco.algorithm_1(I, T, 2.0)
    # N is a power of two: dividing by it commits no rounding, so the ratio is exact.
    assert np.array_equal(parameters(printed) * N, parameters(corrected))
    assert printed.loss == corrected.loss
    # t is reduced once, by DDP, so it is right as printed.
    assert printed.t_gradients == corrected.t_gradients


@pytest.mark.parametrize("N", [2, 3, 5])
def test_all_reduce_and_slice_sends_twice_the_bytes_of_reduce_scatter(N):
    I, T = batch([3] * N)
    printed, corrected = disco_as_printed.algorithm_1(I, T, 2.0), disco.algorithm_1(I, T, 2.0)
    assert printed.sent == 2 * corrected.sent
    assert corrected.sent == 2 * (N - 1) * (3 * N) * 5 * 8  # both towers, B x D float64


def test_labels_hold_for_equal_shards_only():
    for rank in range(3):
        assert np.array_equal(disco_as_printed.labels(4, rank), disco.labels((4, 4, 4), rank))
    assert np.array_equal(disco.labels((4, 1, 3), 2), [5, 6, 7])
    assert np.array_equal(disco_as_printed.labels(3, 2), [6, 7, 8])  # 8 is past the batch


def test_a_mean_of_means_is_not_the_mean_for_uneven_shards():
    sizes, t = (5, 1, 3), 2.0
    I, T = batch(sizes)
    means = [disco.rank_gradients(I, T, n, t, sizes[n])[0] for n in range(3)]
    I_A, T_A, r = np.concatenate(I), np.concatenate(T), np.arange(9)
    truth = (contrastive(I_A, T_A, r, t, 9)[0] + contrastive(T_A, I_A, r, t, 9)[0]) * 0.5
    assert agrees(disco.algorithm_1(I, T, t).loss, truth)
    assert not agrees(disco_as_printed.mean_loss(means), truth)
    # Rank 1's only pair weighs 1/3 instead of 1/9.
    assert agrees((means[0] * 5 + means[1] + means[2] * 3) / 9, truth)
