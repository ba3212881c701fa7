"""The torch backend against the dense oracle, within the derived bounds, by each of its methods."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch_blocks import RAGGED, block_of, pretend_device, same_bits, statistics_and_gradients, worst

from contrastile.backends.contract import STATISTICS, Block, Options, Pairs, Weights
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


@pytest.fixture
def own_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never take a shared reference."""
    monkeypatch.setattr(statistics, "_shared", lambda *_: None)
    monkeypatch.setattr(gradients, "_shared", lambda *_: None)


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
def test_every_case_is_within_its_bound(name: str, dtype: str) -> None:
    case, exact = known(name, dtype)
    for options in (Options(), RAGGED):
        found = worst(case.problem, exact, dtype, options)
        assert found.ratio < 1, str(found)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("own_references")
def test_every_case_is_within_its_bound_with_own_references(name: str, dtype: str) -> None:
    case, exact = known(name, dtype)
    found = worst(case.problem, exact, dtype, RAGGED)
    assert found.ratio < 1, str(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("as_on_a_device")
def test_every_case_is_within_its_bound_as_on_a_device(name: str, dtype: str) -> None:
    case, exact = known(name, dtype)
    found = worst(case.problem, exact, dtype, RAGGED, facts_of="cuda")
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


def test_runs_agree_bit_for_bit() -> None:
    ids = torch.arange(200) % 11
    block = block_of(6, 200, 170, 24, positives=torch.arange(200) % 5, row_ids=ids, column_ids=ids[:170])
    assert same_bits(statistics_and_gradients(block), statistics_and_gradients(block))
    weight = torch.linspace(-1, 1, 200)
    assert same_bits(*(list(backend.sigmoid(block, weight, None, None, RAGGED)) for _ in range(2)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_stride_is_right(dtype: str) -> None:
    generator = torch.Generator().manual_seed(7)
    wide = torch.randn(22, 34, generator=generator).to(getattr(torch, dtype))
    tall = torch.randn(17, 25, generator=generator).to(getattr(torch, dtype))
    repeated = torch.randn(17, generator=generator).to(getattr(torch, dtype))
    for rows in (wide[:, ::2], wide[::3, 1::2], repeated.expand(9, 17)):
        exact, columns = rows.contiguous(), tall.t()
        strided = Block(rows, columns, torch.tensor(0.5), None, Pairs(positives=torch.arange(len(rows))))
        dense = replace(strided, rows=exact, columns=columns.contiguous())
        depth = max(25, 22, 17) + 17 + 64
        unit = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps / 2
        largest = float((rows.double().abs() @ columns.double().abs().t()).max()) + 25
        for a, b in zip(statistics_and_gradients(strided), statistics_and_gradients(dense), strict=True):
            # both are within depth roundings of magnitudes below ``largest``, which gradients see through expm1
            size = float(torch.where(b.isfinite(), b.abs(), 0.0).max())
            bound = 2 * math.expm1(depth * unit * largest) * largest * (1 + size)
            assert torch.where(a == b, 0.0, (a - b).abs()).max() <= bound


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


def test_a_gradient_that_is_not_wanted_changes_no_other() -> None:
    block = block_of(10, 40, 50, 24, positives=torch.arange(40))
    found = backend.lse(block, False, RAGGED)
    assert [getattr(found, name) for name in STATISTICS[3:]] == [None] * 3
    weights = Weights(found.row_negative_lse, found.row_positive_lse, torch.linspace(-1, 1, 40), torch.ones(40))
    both, alone = ([torch.zeros(40, 24), torch.zeros(50, 24)] for _ in range(2))
    backend.gradients(block, weights, *both, RAGGED)
    backend.gradients(block, weights, alone[0], None, RAGGED)
    backend.gradients(block, weights, None, alone[1], RAGGED)
    backend.gradients(block, weights, None, None, RAGGED)
    assert same_bits(both, alone)
    weight = torch.linspace(-1, 1, 40)
    values = [list(backend.sigmoid(block, weight, *which, RAGGED)) for which in ((None, None), both)]
    assert same_bits(*values)


def test_gradients_are_added_to_what_is_there() -> None:
    block = block_of(11, 20, 30, 8, positives=torch.arange(20))
    found = backend.lse(block, False, RAGGED)
    weights = Weights(found.row_negative_lse, found.row_positive_lse, torch.ones(20), torch.ones(20))
    once, twice = ([torch.zeros(20, 8), torch.zeros(30, 8)] for _ in range(2))
    backend.gradients(block, weights, *once, Options())
    for _ in range(2):
        backend.gradients(block, weights, *twice, Options())
    for a, b in zip(once, twice, strict=True):
        # the second call starts from another number: n roundings of sums below twice the first
        assert ((b - 2 * a).abs() <= 4 * 30 * torch.finfo(torch.float32).eps * (1 + a.abs().max())).all()


def test_all_ids_equal_leaves_the_positives_alone() -> None:
    ids = torch.zeros(20, dtype=torch.int64)
    block = block_of(12, 20, 20, 8, positives=torch.arange(20), row_ids=ids, column_ids=ids)
    for options in (Options(), RAGGED):
        found = backend.lse(block, True, options)
        # one term each: the positive's own logit, to the last bit, and nothing else
        for negative, positive, total in ([getattr(found, x) for x in STATISTICS[i : i + 3]] for i in (0, 3)):
            assert (negative == -math.inf).all()
            assert torch.equal(positive, total)
        assert torch.equal(found.row_positive_lse, found.column_positive_lse)


def test_an_excluded_column_is_neither_a_label_match_nor_a_named_positive() -> None:
    itself, ids = torch.arange(6), torch.zeros(6, dtype=torch.int64)
    block = block_of(13, 6, 6, 8, excluded=itself, row_ids=ids, column_ids=ids, match="target")
    x = 10.0 * block.rows.double() @ block.columns.double().t()
    others = x.sum(1) - x.diagonal()
    found = backend.lse(block, True, Options(tile=(4, 5)))
    bound = 16 * torch.finfo(torch.float32).eps * x.abs().sum(1)
    assert ((found.row_positive_sum - others).abs() <= bound).all()
    named = block_of(13, 6, 6, 8, excluded=itself, positives=itself)
    alone = backend.lse(named, True, Options(tile=(4, 5)))
    assert (alone.row_positive_sum == 0).all()
    assert (alone.row_positive_lse == found.row_negative_lse).all()
    # what equal ids make positives are negatives here: the same terms, against other references
    assert ((alone.row_negative_lse - found.row_positive_lse).abs() <= bound).all()


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
    lower = [x - 100.0 for x in (found.row_negative_lse, found.column_negative_lse)]
    sides = (lower[0], found.row_positive_lse, one, zero), (lower[1], found.column_positive_lse, one, zero)
    gradient = torch.zeros(m, 64)
    backend.gradients(block, Weights(*sides[0], *sides[1]), gradient, None, Options())
    # each of the m pairs has at most the weights of its row and its column
    assert gradient.norm(dim=1).max() <= 2 * m * 3e3
