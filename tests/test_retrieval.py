"""Ranks, nearest columns and hard negatives against the whole matrix, over ranks too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from contrastile import retrieval
from contrastile.comm.inprocess import InProcessGroup

M, N, WIDTH, TILE = 23, 41, 5, 7


def drawn(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows and columns of small integers, whose products are exact and often equal; positives, and ids of both."""
    random = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    features = integers(-2, 3, M, WIDTH).to(dtype), integers(-2, 3, N, WIDTH).to(dtype)
    return *features, integers(0, N, M), integers(0, 9, M), integers(0, 9, N)


def stated_ranks(x: Tensor, positives: Tensor, out: Tensor) -> list[int]:
    return [
        sum(1 for j in range(N) if j != p and not out[i, j] and not x[i, j] < x[i, p])
        for i, p in enumerate(positives.tolist())
    ]


def test_what_has_collapsed_or_is_nan_ranks_last() -> None:
    same = torch.ones(M, WIDTH) / 3
    for rows in (same, same * torch.nan):
        assert retrieval.ranks(rows, same, tile=TILE).tolist() == [M - 1] * M


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_of_a_group_see_all_columns(size: int, dtype: torch.dtype) -> None:
    rows, columns, positives, row_ids, column_ids = drawn(dtype, seed=2)
    of_rows, of_columns = ([0, 4, 15, M][: size + 1], [0, 11, 30, N][: size + 1])
    of_rows[-1], of_columns[-1] = M, N

    def program(communicator: Any) -> Any:
        r = communicator.rank
        i, j = slice(of_rows[r], of_rows[r + 1]), slice(of_columns[r], of_columns[r + 1])
        named: Any = {"row_ids": row_ids[i], "column_ids": column_ids[j], "group": communicator, "tile": TILE}
        paired = retrieval.ranks(rows[i], columns[j], group=communicator)
        ranks = retrieval.ranks(rows[i], columns[j], positives=positives[i], **named)
        mined = retrieval.mine_hard_negatives(rows[i], columns[j], 4, positives=positives[i], **named)
        return paired, ranks, mined, *retrieval.top_k(rows[i], columns[j], 12, tile=TILE, group=communicator)

    parts = [torch.cat(each) for each in zip(*InProcessGroup(size).run(program), strict=True)]
    named: Any = {"positives": positives, "row_ids": row_ids, "column_ids": column_ids}
    own = torch.cat([torch.arange(b - a) + c for a, b, c in zip(of_rows, of_rows[1:], of_columns, strict=False)])
    x, alike = rows.double() @ columns.double().T, row_ids[:, None] == column_ids
    stated = [torch.tensor(stated_ranks(x, *each)) for each in ((own, alike & False), (positives, alike))]
    assert retrieval.recall(parts[1], 3) == (parts[1] < 3).sum().item() / M
    assert retrieval.mean_reciprocal_rank(parts[1]) == (1 / (1 + parts[1].double())).mean().item()
    negatives = retrieval.mine_hard_negatives(rows, columns, 4, **named)
    nearest = (rows @ columns.T).sort(dim=1, descending=True, stable=True)
    top = nearest.values[:, :12], nearest.indices[:, :12]
    for found, expected in zip(parts, (*stated, negatives, *top), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN, under Triton's interpreter
def test_a_fused_search_finds_what_tiles_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(retrieval, "HIGH", 16)
    random, device = torch.Generator().manual_seed(0), "cuda" if torch.cuda.is_available() else "cpu"
    m, n, width = 17, 700, 17

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random).to(device)

    rows, columns = integers(-2, 3, m, width).half(), integers(-2, 3, n, width).half()
    # more ties than there is room for
    rows[3], columns[::5] = 0, columns[2].clone()
    spoiled = rows.clone()
    spoiled[7] = torch.nan
    assert retrieval._fused(rows, columns, 5) is not None
    assert retrieval._fused(spoiled, columns, 5) is None
    positives, ids = integers(0, n, m), {"row_ids": integers(0, 9, m), "column_ids": integers(0, 9, n)}
    limits: Any = {"range_min": 2, "min_score": -3.0, "max_score": 9.0, "relative_margin": 0.25}
    for named, more, x in (({}, {}, rows), ({"positives": positives}, limits, spoiled), (ids, limits, rows)):
        ranks = (retrieval.ranks(x, columns, **named, tile=tile) for tile in (None, 99))
        assert torch.equal(*ranks)
        mined = (retrieval.mine_hard_negatives(rows, columns, 3, **named, **more, tile=tile) for tile in (None, 99))
        assert torch.equal(*mined)
    for k in (1, 5):
        for pair in zip(*(retrieval.top_k(rows, columns, k, tile=tile) for tile in (None, 99)), strict=True):
            assert torch.equal(*pair)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of faiss's own
def test_the_nearest_columns_are_those_of_faiss_s_exact_index() -> None:
    faiss, k, random = pytest.importorskip("faiss"), 9, torch.Generator().manual_seed(0)
    # integers, whose products are exact: the order of equal ones alone may differ
    rows, columns = (torch.randint(-99, 100, (n, 16), generator=random).float() for n in (70, 3000))
    index = faiss.IndexFlatIP(16)
    index.add(columns.numpy())
    theirs, where = map(torch.from_numpy, index.search(rows.numpy(), k + 1))
    apart = (theirs[:, :-1] != theirs[:, 1:]) & (theirs[:, :-1] != theirs.roll(1, 1)[:, :-1])
    assert apart.double().mean() > 0.9
    for tile in (None, 7):
        values, numbers = retrieval.top_k(rows, columns, k, tile=tile)
        assert torch.equal(values, theirs[:, :k])
        assert torch.equal(numbers[apart], where[:, :k][apart])


def test_no_rows() -> None:
    columns = torch.ones(4, 3)
    assert retrieval.ranks(columns[:0], columns).shape == (0,)
    assert [x.shape for x in retrieval.top_k(columns[:0], columns, 2)] == [(0, 2), (0, 2)]
    assert retrieval.mine_hard_negatives(columns[:0], columns, 2).shape == (0, 2)
