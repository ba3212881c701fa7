"""The tiled forms against the dense ones, for any tile, and their memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from float64_bound import SigmoidBound, SoftmaxBound, assert_within
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_problems import RAGGED, Problem, problems

from contrastile.oracle.general import column_lse, gradient_of_logits, gradients, loss, row_lse
from contrastile.oracle.sigmoid import gradient_of_sigmoid_logits, sigmoid_terms
from contrastile.oracle.tiled import TileGradients, tile_gradients, tile_sigmoid, tile_statistics

tiles = st.tuples(st.integers(1, 9), st.integers(1, 9))


def folded(p: Problem) -> Problem:
    """The same logits with a scale per row inside q, as the tiles want it."""
    return p.moved(q=p.scale[:, None] * p.q, scale=1.0) if np.ndim(p.scale) else p


def targets(p: Problem) -> dict:
    return {
        "row_weight": p.u,
        "row_target": p.y.max(axis=1, initial=0.0),
        "column_weight": p.v,
        "column_target": p.y_c.max(axis=0, initial=0.0),
    }


def backward(p: Problem, tile: tuple[int, int]) -> TileGradients:
    s = tile_statistics(p.q, p.k, p.scale, p.bias, p.pairs, tile=tile)
    lses = {"row_lse": s.row_lse, "column_lse": s.column_lse}
    return tile_gradients(p.q, p.k, p.scale, p.bias, p.pairs, **lses, **targets(p), tile=tile)


@settings(max_examples=80, deadline=None)
@given(p=problems(), tile=tiles)
def test_statistics_are_the_dense_ones(p: Problem, tile: tuple[int, int]) -> None:
    p = folded(p)
    found, bound = tile_statistics(p.q, p.k, p.scale, p.bias, p.pairs, tile=tile), SoftmaxBound(p)
    assert_within(found.row_lse, row_lse(p.x, p.A), 2 * bound.row_lse)
    assert_within(found.column_lse, column_lse(p.x, p.A), 2 * bound.column_lse)
    for axis, sums in ((1, found.row_positive), (0, found.column_positive)):
        size = (p.P * (2 * bound.x + 4 * bound.depth * 2.0**-53 * np.abs(p.x))).sum(axis)
        assert_within(sums, (p.P * p.x).sum(axis), size)


@settings(max_examples=80, deadline=None)
@given(p=problems(), tile=tiles)
def test_value_and_gradients_are_the_dense_ones(p: Problem, tile: tuple[int, int]) -> None:
    p = folded(p)
    t, s = targets(p), tile_statistics(p.q, p.k, p.scale, p.bias, p.pairs, tile=tile)
    with np.errstate(invalid="ignore"):
        rows = p.u * (s.row_lse - t["row_target"] * s.row_positive)
        columns = p.v * (s.column_lse - t["column_target"] * s.column_positive)
    value = rows[p.u != 0].sum() + columns[p.v != 0].sum()
    bound, G = SoftmaxBound(p), gradient_of_logits(*p.general())
    dense = gradients(p.q, p.k, p.scale, G)
    assert_within(value, loss(*p.general()), 2 * bound.loss)
    found = backward(p, tile)
    assert_within(found.R, G @ p.k, 2 * bound.R)
    assert_within(found.C, G.T @ p.q, 2 * bound.C)
    assert_within(found.row_sum, G.sum(axis=1), 2 * bound.row_sum)

    assert_within((p.q * found.R).sum(), dense.d_scale, 2 * bound.d_scale)
    assert_within(found.row_sum.sum(), dense.d_bias, 2 * bound.d_bias)


def test_no_column_vectors_is_one_direction() -> None:
    p = folded(RAGGED)
    one_way = backward(p.moved(v=np.zeros(len(p.k))), (3, 4))
    rows = {name: value for name, value in targets(p).items() if name.startswith("row")}
    L = tile_statistics(p.q, p.k, p.scale, p.bias, p.pairs, tile=(3, 4)).row_lse
    found = tile_gradients(p.q, p.k, p.scale, p.bias, p.pairs, row_lse=L, **rows, tile=(3, 4))
    for ours, theirs in zip(found, one_way, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@settings(max_examples=60, deadline=None)
@given(p=problems(), tile=tiles)
def test_the_sigmoid_loss_in_one_pass_is_the_dense_one(p: Problem, tile: tuple[int, int]) -> None:
    p, b = folded(p), 4.0
    row_loss, found = tile_sigmoid(p.q, p.k, p.scale, p.bias, p.pairs, row_weight=np.full(len(p.q), 1 / b), tile=tile)
    G, bound = gradient_of_sigmoid_logits(p.x, p.P, b, p.A), SigmoidBound(p, b)
    assert_within(row_loss / b, sigmoid_terms(p.x, p.P, p.A).sum(axis=1) / b, 2 * bound.row_loss)
    assert_within(found.R, G @ p.k, 2 * bound.R)
    assert_within(found.C, G.T @ p.q, 2 * bound.C)
    assert_within(found.row_sum, G.sum(axis=1), 2 * bound.row_sum)


def test_a_row_weight_of_the_sigmoid_loss_weighs_its_row_and_nothing_else() -> None:
    """Weights are powers of two, so a weighted row is exactly its own gradient; 0 silences even a NaN."""
    p, tile = folded(RAGGED), (3, 4)
    u = np.where(np.arange(len(p.q)) % 3 == 0, 0.0, -(2.0 ** (np.arange(len(p.q)) % 3)))
    loss_1, one = tile_sigmoid(p.q, p.k, p.scale, p.bias, p.pairs, row_weight=np.ones(len(p.q)), tile=tile)
    loss_u, found = tile_sigmoid(p.q, p.k, p.scale, p.bias, p.pairs, row_weight=u, tile=tile)
    np.testing.assert_array_equal(loss_u, loss_1)
    np.testing.assert_array_equal(found.R, u[:, None] * one.R)
    np.testing.assert_array_equal(found.row_sum, u * one.row_sum)
    alone = np.eye(len(p.q)) * u
    parts = [tile_sigmoid(p.q, p.k, p.scale, p.bias, p.pairs, row_weight=w, tile=tile)[1].C for w in alone]
    assert_within(found.C, np.sum(parts, axis=0), 4 * np.abs(u).max() * SigmoidBound(p, 1.0).C)
    nan = p.q.copy()
    nan[0] = np.nan
    assert (tile_sigmoid(nan, p.k, p.scale, p.bias, p.pairs, row_weight=u, tile=tile)[1].row_sum[0] == 0).all()


@pytest.mark.parametrize(("m", "n"), [(0, 0), (0, 3), (3, 0)])
def test_nothing_is_a_shape_too(m: int, n: int) -> None:
    q, k = np.ones((m, 2)), np.ones((n, 2))
    s = tile_statistics(q, k, 1.0, tile=(2, 2))
    assert [len(t) for t in s] == [m, n, m, n]
    assert (s.row_lse == -np.inf).all()
    assert (s.column_lse == -np.inf).all()
    g = tile_gradients(q, k, 1.0, row_lse=s.row_lse, row_weight=np.ones(m), row_target=np.zeros(m), tile=(2, 2))
    losses, h = tile_sigmoid(q, k, 1.0, row_weight=np.ones(m), tile=(2, 2))
    for found in (g, h):
        assert [t.shape for t in found] == [(m, 2), (n, 2), (m,)]
        assert not any(t.any() for t in found)
    np.testing.assert_array_equal(losses, np.zeros(m))


def test_float32_features_are_widened_first() -> None:
    p = folded(RAGGED)
    narrow = p.moved(q=p.q.astype(np.float32), k=p.k.astype(np.float32))
    wide = narrow.moved(q=narrow.q.astype(np.float64), k=narrow.k.astype(np.float64))
    for ours, theirs in zip(backward(narrow, (3, 4)), backward(wide, (3, 4)), strict=True):
        assert ours.dtype == np.float64
        np.testing.assert_array_equal(ours, theirs)


def test_nan_comes_out() -> None:
    p = folded(RAGGED)
    q = p.q.copy()
    q[2, 1] = np.nan
    found = tile_statistics(q, p.k, 1.0, tile=(3, 4))
    assert np.flatnonzero(np.isnan(found.row_lse)).tolist() == [2]
    assert np.isnan(found.column_lse).all()
    g = backward(p.moved(q=q, u=p.u + 1), (3, 4))
    assert np.isnan(g.R[2]).all()
    assert np.isnan(tile_sigmoid(q, p.k, 1.0, row_weight=np.ones(len(p.q)), tile=(3, 4))[0][2])


def test_memory_is_linear_in_the_batch() -> None:
    """At b = 512 the peak is far below one b x b mask, let alone logits; twice the batch is twice the peak."""
    peaks = {}
    for b in (512, 1024):
        rng = np.random.default_rng(0)
        q, k, ids = rng.standard_normal((b, 4)), rng.standard_normal((b, 4)), np.arange(b) // 2
        pairs = RAGGED.pairs._replace(positives=np.arange(b), row_ids=ids, column_ids=ids, excluded=None)
        p = Problem(q, k, 1.0, pairs=pairs)
        ones = {name: np.ones(b) for name in ("row_weight", "row_target", "column_weight", "column_target")}
        tracemalloc.start()
        s = tile_statistics(p.q, p.k, 1.0, 0.0, pairs, tile=(32, 32))
        tile_gradients(q, k, 1.0, 0.0, pairs, row_lse=s.row_lse, column_lse=s.column_lse, **ones, tile=(32, 32))
        tile_sigmoid(q, k, 1.0, 0.0, pairs, row_weight=ones["row_weight"], tile=(32, 32))
        peaks[b] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[512] < 512 * 512
    assert peaks[1024] < 2 * peaks[512]
