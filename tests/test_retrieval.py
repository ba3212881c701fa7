"""Searches that ``contrastile verify`` does not compare: the fused kernels, and FAISS."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from contrastile import retrieval


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN, under Triton's interpreter
def test_a_fused_search_gives_the_results_of_a_tiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(retrieval, "FUSED_ROWS", 16)
    monkeypatch.setattr(retrieval, "FUSED_MIN_ROWS", 0)
    generator, device = torch.Generator().manual_seed(0), "cuda" if torch.cuda.is_available() else "cpu"
    m, n, width = 17, 700, 17

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(device)

    rows, columns = integers(-2, 3, m, width).half(), integers(-2, 3, n, width).half()
    # more ties than the fused search has room for
    rows[3], columns[::5] = 0, columns[2].clone()
    spoiled = rows.clone()
    spoiled[7] = torch.nan
    assert retrieval._fused_search(rows, columns, 5) is not None
    assert retrieval._fused_search(spoiled, columns, 5) is None
    positives, ids = integers(0, n, m), {"row_ids": integers(0, 9, m), "column_ids": integers(0, 9, n)}
    limits: Any = {"range_min": 2, "min_score": -3.0, "max_score": 9.0, "relative_margin": 0.25}
    for pairs, options, x in (({}, {}, rows), ({"positives": positives}, limits, spoiled), (ids, limits, rows)):
        ranks = (retrieval.ranks(x, columns, **pairs, tile=tile) for tile in (None, 99))
        assert torch.equal(*ranks)
        mined = (retrieval.mine_hard_negatives(rows, columns, 3, **pairs, **options, tile=tile) for tile in (None, 99))
        assert torch.equal(*mined)
    for k in (1, 5):
        for pair in zip(*(retrieval.top_k(rows, columns, k, tile=tile) for tile in (None, 99)), strict=True):
            assert torch.equal(*pair)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # faiss's own
def test_the_nearest_columns_are_those_of_faiss_s_exact_index() -> None:
    faiss, k, generator = pytest.importorskip("faiss"), 9, torch.Generator().manual_seed(0)
    # products of integers are exact, so that only the order of equal values may differ
    rows, columns = (torch.randint(-99, 100, (n, 16), generator=generator).float() for n in (70, 3000))
    index = faiss.IndexFlatIP(16)
    index.add(columns.numpy())
    expected, expected_indices = map(torch.from_numpy, index.search(rows.numpy(), k + 1))
    is_distinct = (expected[:, :-1] != expected[:, 1:]) & (expected[:, :-1] != expected.roll(1, 1)[:, :-1])
    assert is_distinct.double().mean() > 0.9
    for tile in (None, 7):
        values, indices = retrieval.top_k(rows, columns, k, tile=tile)
        assert torch.equal(values, expected[:, :k])
        assert torch.equal(indices[is_distinct], expected_indices[:, :k][is_distinct])
