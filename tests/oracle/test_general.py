"""The general loss and the sigmoid loss against their definitions, pair by pair."""

from __future__ import annotations

from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
from balls import Ball, U, agrees, general, sigmoid
from hypothesis import given, settings
from oracle_problems import PROBLEMS, RAGGED, Problem

from contrastile.oracle.general import Direction, gradient_of_logits, gradients, logits, loss, merge, row_lse
from contrastile.oracle.pairs import Pairs
from contrastile.oracle.sigmoid import gradient_of_sigmoid_logits, sigma, sigmoid_terms, softplus


def pair_kind(pairs: Pairs, i: int, j: int) -> tuple[bool, bool]:
    """(positive, admitted) for one pair, as the definition states them."""
    same_id = pairs.row_ids is not None and pairs.row_ids[i] == pairs.column_ids[j]
    if pairs.excluded is not None and pairs.excluded[i] == j:
        return False, False
    if pairs.match == "target":
        return bool(same_id), True
    if pairs.positives is not None and pairs.positives[i] == j:
        return True, True
    return False, not same_id


def pair_kinds(pairs: Pairs, m: int, n: int) -> np.ndarray:
    """``pair_kind`` of all pairs: (m, n, 2)."""
    kinds = [[pair_kind(pairs, i, j) for j in range(n)] for i in range(m)]
    return np.array(kinds, dtype=np.bool_).reshape(m, n, 2)


def by_autograd(p: Problem, b: float | None = None) -> list[np.ndarray]:
    """The general loss, or with b the sigmoid loss: (loss, d_rows, d_columns, d_scale, d_bias)."""
    leaves = [torch.tensor(t, dtype=torch.float64, requires_grad=True) for t in (p.q, p.k, p.scale, p.bias)]
    q, k, scale, bias = leaves
    x = scale.reshape(-1, 1) * (q @ k.T) + bias
    kinds = torch.from_numpy(pair_kinds(p.pairs, *x.shape))
    value = 0.0 * x.sum()
    if b is None:
        lines = [*zip(p.u, x, kinds, strict=True), *zip(p.v, x.T, kinds.transpose(0, 1), strict=True)]
        for w, logits, kind in lines:
            if w != 0:
                targets = logits[kind[:, 0]]
                target = targets.mean() if len(targets) else 0.0
                value = value + w * (logits[kind[:, 1]].logsumexp(0) - target)
    else:
        z = torch.where(kinds[..., 0], 1.0, -1.0)
        value = value - torch.nn.functional.logsigmoid(z * x)[kinds[..., 1]].sum() / b
    return [value.detach().numpy(), *(g.numpy() for g in torch.autograd.grad(value, leaves))]


B = 7.0


@settings(max_examples=30)
@given(p=PROBLEMS)
def test_autograd_of_the_definition_agrees(p: Problem) -> None:
    softmax = loss(p.sides), gradient_of_logits(p.sides), by_autograd(p), general(p)
    sigmoid_results = sigmoid_terms(p.x, p.P, p.A).sum() / B, gradient_of_sigmoid_logits(p.x, p.P, B, p.A)
    for value, G, definition, balls in (softmax, (*sigmoid_results, by_autograd(p, B), sigmoid(p, B))):
        results = value, *gradients(p.q, p.k, p.scale, G)
        for ours, theirs, ball in zip(results, definition, balls.all, strict=True):
            assert agrees(ours, ball)
            assert agrees(theirs, ball)


def test_one_direction_is_a_zero_column_weight() -> None:
    sides = RAGGED.moved(v=np.zeros(len(RAGGED.k))).sides
    assert loss(sides[:1]) == loss(sides)
    np.testing.assert_array_equal(gradient_of_logits(sides[:1]), gradient_of_logits(sides))


def test_a_row_of_weight_zero_contributes_nothing_even_if_it_is_nan() -> None:
    # a row that admits nothing
    x, u = np.zeros((2, 2)), np.array([0.0, 1.0])
    A = np.array([[False, False], [True, False]])
    sides = [Direction(x, A, A, u, u), Direction(x, A.T, A.T, u[::-1], u[::-1])]
    assert loss(sides) == 0.0
    np.testing.assert_array_equal(gradient_of_logits(sides), np.zeros((2, 2)))
    assert loss([replace(sides[0], weight=np.ones(2))]) == -np.inf
    # a row of NaN, and a target whose logit is infinite
    A, own, ones = np.ones((2, 2), dtype=np.bool_), np.eye(2, dtype=np.bool_), np.ones(2)
    G = Direction(np.array([[np.nan, 1.0], [0.0, 0.0]]), A, own, u, ones).gradient()
    np.testing.assert_array_equal(G, [[0.0, 0.0], [0.5, -0.5]])
    assert loss([Direction(np.array([[1.0, -np.inf]]), A[:1], own[:1], ones[:1], ones[:1])]) == 0.0


def test_the_lse_of_nothing_is_minus_infinity() -> None:
    none = np.zeros((2, 3), dtype=np.bool_)
    np.testing.assert_array_equal(row_lse(np.ones((2, 3)), none), np.full(2, -np.inf))
    assert row_lse(np.ones((2, 0)), np.ones((2, 0), dtype=np.bool_)).tolist() == [-np.inf, -np.inf]


@pytest.mark.parametrize(
    ("a", "b", "merged"),
    [
        (-np.inf, -np.inf, -np.inf),
        (-np.inf, 3.0, 3.0),
        (np.inf, 3.0, np.inf),
        (np.inf, np.inf, np.inf),
        (np.inf, -np.inf, np.inf),
        (1000.0, -1000.0, 1000.0),
        (np.nan, 3.0, np.nan),
        (np.nan, np.inf, np.nan),
        (-np.inf, np.nan, np.nan),
    ],
)
def test_the_merge_handles_infinities_and_nan(a: float, b: float, merged: float) -> None:
    np.testing.assert_array_equal(merge(a, b), merged)
    np.testing.assert_array_equal(merge(b, a), merged)


def test_an_admitted_nan_propagates_and_a_masked_one_does_not() -> None:
    p = RAGGED
    q = p.q.copy()
    q[2, 1] = np.nan
    A = np.ones(p.x.shape, dtype=np.bool_)
    x = logits(q, p.k, p.scale, p.bias)
    L = row_lse(x, A)
    assert np.flatnonzero(np.isnan(L)).tolist() == [2]
    side = replace(p.sides[0], x=x, weight=np.ones(7))
    assert np.isnan(loss([side]))
    result = gradients(q, p.k, p.scale, side.gradient())
    assert np.isnan(result.d_columns[p.A[2]]).all()
    assert np.isnan(result.d_columns[:, 1]).all()
    assert np.flatnonzero(np.isnan(result.d_rows).any(axis=1)).tolist() == [2]


def test_an_infinite_feature_ends_in_nan_without_a_warning() -> None:
    p = RAGGED
    q = p.q.copy()
    q[0, 0] = np.inf
    x = logits(q, p.k, p.scale, p.bias)
    A = np.ones(p.x.shape, dtype=np.bool_)
    assert row_lse(x, A)[0] == np.inf
    G = replace(p.sides[0], x=x, admitted=A, weight=p.u + 1).gradient()
    assert np.isnan(gradients(q, p.k, p.scale, G).d_rows[0]).all()


def test_an_index_outside_of_the_columns_selects_none() -> None:
    far = np.iinfo(np.int64)
    pairs = Pairs(positives=np.array([-1, 3, far.max, far.min]), excluded=np.array([-1, 3, far.max, far.min]))
    assert not pairs.positive(4, 3).any()
    assert pairs.admitted(4, 3).all()


def test_float32_features_are_converted_to_float64_first() -> None:
    q, k = RAGGED.q.astype(np.float32), RAGGED.k.astype(np.float32)
    np.testing.assert_array_equal(logits(q, k, 3.0), logits(q.astype(np.float64), k.astype(np.float64), 3.0))


@pytest.mark.parametrize("t", [0.0, 1e-3, 40.0, -40.0, 800.0, -700.0])
def test_far_tails_keep_their_digits(t: float) -> None:
    with mpmath.workdps(400):
        exact = mpmath.log(1 + mpmath.exp(t)), 1 / (1 + mpmath.exp(-t))
        for ours, value in zip((softplus(np.array(t)), sigma(np.array(t))), exact, strict=True):
            assert agrees(ours, Ball(float(value), 4 * U * float(value)))


def test_nan_and_infinity_follow_ieee() -> None:
    t = np.array([np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(softplus(t), [np.inf, 0.0, np.nan])
    np.testing.assert_array_equal(sigma(t), [1.0, 0.0, np.nan])
    x, P = np.array([[np.nan, 1.0]]), np.array([[True, False]])
    assert np.isnan(sigmoid_terms(x, P, np.ones((1, 2), dtype=np.bool_))[0, 0])
    assert not sigmoid_terms(x, P, np.zeros((1, 2), dtype=np.bool_)).any()
