"""MaxSim of the oracle against its definition, token by token, with torch's cross entropy; on a grid, with ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from balls import Ball, agrees, general
from hypothesis import given
from hypothesis import strategies as st
from oracle_problems import Problem, on_grid
from torch.nn.functional import cross_entropy

from contrastile.oracle.late import maxsim
from contrastile.oracle.pairs import Pairs


@given(st.integers(0, 2**32 - 1), st.tuples(*[st.integers(1, 4)] * 4), st.integers(0, 2), st.booleans(), st.booleans())
def test_a_score_is_the_sum_over_a_query_s_tokens_of_the_first_largest_product(
    seed: int, sizes: tuple[int, ...], more: int, symmetric: bool, coarse: bool
) -> None:
    (m, q, t, d), draw = sizes, np.random.default_rng(seed)
    n = m if symmetric else m + more
    Q, D = (on_grid(np.round(x) if coarse else x) for x in (draw.normal(size=(m, q, d)), draw.normal(size=(n, t, d))))
    counted = [draw.random(size) < 0.7 for size in ((m, q), (n, t))]
    counted[1][np.arange(n), draw.integers(0, t, n)] = True
    scale = float(on_grid(draw.uniform(-9, 9)))
    a, b, s = (torch.tensor(np.asarray(x), requires_grad=True) for x in (Q, D, scale))
    W = np.zeros((m, q, n, t))
    for i, u, j in np.ndindex(m, q, n):
        if counted[0][i, u]:
            v = max((v for v in range(t) if counted[1][j, v]), key=lambda v: Q[i, u] @ D[j, v])
            W[i, u, j, v] = 1.0
    S = torch.einsum("iajb,iad,jbd->ij", torch.tensor(W), a, b)
    x, here = s * S, torch.arange(m)
    value = (cross_entropy(x, here) + cross_entropy(x.T, here)) / 2 if symmetric else cross_entropy(x, here)
    found = maxsim(Q, D, scale, query_mask=counted[0], document_mask=counted[1], symmetric=symmetric)
    # scores on the grid are exact
    u, v = (1 / (2 * m),) * 2 if symmetric else (1 / m, 0.0)
    pairs = Pairs(np.arange(m))
    near = general(Problem(S.detach().numpy(), np.eye(n), scale, 0.0, pairs, np.full(m, u), np.full(n, v)))
    loss, of_scores, _, d_scale, _ = near.all
    of_tokens = Ball(
        *((W * x[:, None, :, None]).reshape(m * q, n * t) for x in (of_scores.mid, of_scores.rad)), depth=1
    )
    balls = [loss, of_tokens @ D.reshape(-1, d), of_tokens.T @ Q.reshape(-1, d), d_scale]
    theirs = [value.item(), *(g.numpy() for g in torch.autograd.grad(value, [a, b, s]))]
    for ours, other, ball in zip(found, theirs, balls, strict=False):
        assert agrees(np.reshape(ours, ball.shape), ball)
        assert agrees(np.reshape(other, ball.shape), ball)
    assert found.d_rows.shape == Q.shape
    assert found.d_columns.shape == D.shape


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_document_without_tokens_makes_the_loss_nan(symmetric: bool) -> None:
    counted = np.arange(3)[:, None] != np.ones((1, 2))
    texts = np.ones((3, 1, 2)), np.ones((3, 2, 2))
    assert np.isnan(maxsim(*texts, 2.0, document_mask=counted, symmetric=symmetric).loss)
