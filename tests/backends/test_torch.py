"""The torch backend where ``contrastile verify`` does not take it: its other ways, its tiles, the caller's modes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch_blocks import RAGGED, block_of, pretend_device, same_bits, statistics_and_gradients, worst

from contrastile.backends.contract import Block, Options, Pairs, SideWeights, Weights
from contrastile.backends.torch import backend, gradients, statistics, tiles
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


@pytest.mark.parametrize("name", ["smoke", "ragged", "ids-drop", "labels", "nan"])
def test_the_tile_it_chooses_for_itself_is_as_good(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "CPU_TILE", (16, 32))
    case, exact = known(name, "float32")
    assert worst(case.problem, exact, "float32").ratio < 1


def test_chosen_tiles_cover_evenly_and_never_exceed_the_most() -> None:
    for count in (0, 1, 15, 509, 512, 513, 2049, 8191, 8192, 8193):
        rows, columns = tiles.tile_shape(count, count, Options(), cpu=True)
        for size, most in ((rows, tiles.CPU_TILE[0]), (columns, tiles.CPU_TILE[1])):
            assert 1 <= size <= most
            pieces = -(-count // size)
            assert pieces == max(-(-count // most), min(count, 1))
    assert tiles.tile_shape(33, 47, Options(tile=(1000, 13)), cpu=True) == (33, 13)


def test_autocast_and_grad_mode_change_nothing() -> None:
    block = block_of(8, 40, 50, 24, positives=torch.arange(40))
    expected = statistics_and_gradients(block)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(statistics_and_gradients(block), expected)
    recording = replace(block, rows=block.rows.clone().requires_grad_(), scale=block.scale.clone().requires_grad_())
    found = statistics_and_gradients(recording)
    assert not any(x.requires_grad for x in found)
    assert same_bits(found, expected)


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
