"""Positive and admitted pairs against the definition in words, pair by pair."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from oracle_problems import RAGGED, Problem, problems
from second_opinions import pair_kinds

from contrastile.oracle.pairs import Pairs, column_target_weights, target_weights


@settings(max_examples=80)
@given(p=problems())
def test_masks_follow_the_definition(p: Problem) -> None:
    m, n = p.x.shape
    by_words = pair_kinds(p.pairs, m, n)
    np.testing.assert_array_equal(p.pairs.positive(m, n), by_words[..., 0])
    np.testing.assert_array_equal(p.pairs.admitted(m, n), by_words[..., 1])
    assert not (p.P & ~p.A).any()


def test_an_index_outside_the_columns_names_none() -> None:
    far = np.iinfo(np.int64)
    pairs = Pairs(positives=np.array([-1, 3, far.max, far.min]), excluded=np.array([-1, 3, far.max, far.min]))
    assert not pairs.positive(4, 3).any()
    assert pairs.admitted(4, 3).all()


def test_targets_sum_to_one_or_to_zero() -> None:
    P = RAGGED.pairs._replace(match="target").positive(7, 11)
    for y, axis in ((target_weights(P), 1), (column_target_weights(P), 0)):
        counts = P.sum(axis=axis)
        assert (counts == 0).any() or (counts > 1).any()
        np.testing.assert_array_equal(y > 0, P)
        np.testing.assert_array_equal(np.round(y.sum(axis=axis)), counts > 0)
        np.testing.assert_array_equal(y.max(axis=axis), np.where(counts, 1 / np.maximum(counts, 1), 0))
