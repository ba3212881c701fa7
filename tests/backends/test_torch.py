"""The torch backend where ``contrastile verify`` does not take it: its other ways, its tiles, the caller's modes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch_blocks import RAGGED, block_of, pretend_device, statistics_and_gradients, worst

from contrastile.backends.contract import Block, Options, Pairs, SideWeights, Weights
from contrastile.backends.torch import backend, gradients, statistics
from contrastile.verify.cases import Case, build, names
from contrastile.verify.truth import Truth, truth

DTYPES = ("float16", "bfloat16", "float32", "float64")
SMALL = [name for name in names() if not name.startswith("wordnet")]


@cache
def known(name: str, dtype: str) -> tuple[Case, Truth]:
    case = build(name, dtype)
    return case, truth(case.problem)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Problems this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("way", "dtype"), [*(("own references", x) for x in DTYPES[2:]), *(("as on a device", x) for x in DTYPES)]
)
@pytest.mark.parametrize("name", SMALL)
def test_every_case_is_within_its_bound(name: str, way: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, exact = known(name, dtype)
    if way == "as on a device":
        pretend_device(monkeypatch)
    else:
        for module in (statistics, gradients):
            monkeypatch.setattr(module, "_shared", lambda *_: None)
    found = worst(case.problem, exact, dtype, RAGGED, facts_of="cuda" if way == "as on a device" else "cpu")
    assert found.ratio < 1, str(found)


@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (0, 0)])
def test_a_block_without_rows_or_columns_is_the_identity(m: int, n: int) -> None:
    block = block_of(9, m, n, 4, positives=torch.full((m,), -1))
    *vectors, row, column = statistics_and_gradients(block)
    for side, size in ((vectors[:3], m), (vectors[3:], n)):
        assert [x.tolist() for x in side] == [[-math.inf] * size, [-math.inf] * size, [0.0] * size]
    assert not row.any()
    assert not column.any()
    loss, total = backend.sigmoid(block, torch.ones(m), row, column, Options())
    assert loss.tolist() == total.tolist() == [0.0] * m


@pytest.mark.parametrize("named", [True, False], ids=["by index", "by ids"])
def test_no_probability_exceeds_1_where_logits_are_rounded_in_another_way(named: bool) -> None:
    # a ring computes its own block whole forward and in two halves backward: a logit of 1e8 may then exceed its L
    m = 24
    ids = None if named else torch.arange(m)
    pairs = Pairs(torch.arange(m)) if named else Pairs(row_ids=ids, column_ids=ids, match="target")
    generator = torch.Generator().manual_seed(2)
    rows, columns = (3e3 * torch.nn.functional.normalize(torch.randn(m, 64, generator=generator)) for _ in range(2))
    block = Block(rows, columns, torch.tensor(100.0), None, pairs)
    found = backend.lse(block, True, Options())
    one, zero = torch.ones(m), torch.zeros(m)
    # the most that rounding may make of a logit's error
    assert found.columns is not None
    sides = [SideWeights(n - 100.0, p, one, zero) for n, p, _ in (found.rows, found.columns)]
    gradient = torch.zeros(m, 64)
    backend.gradients(block, Weights(*sides), gradient, None, Options())
    # each of the m pairs has at most the weights of its row and its column
    assert gradient.norm(dim=1).max() <= 2 * m * 3e3
