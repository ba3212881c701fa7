"""The triton backend under Triton's interpreter: the same kernels on the CPU, with tiles small enough to be many."""

from __future__ import annotations

import os

# Triton fixes at its import whether kernels are interpreted
os.environ["TRITON_INTERPRET"] = "1"

import importlib
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from contrastile.backends.arrays import mean_excess  # noqa: E402
from contrastile.backends.contract import Block, Options, Pairs, UnsupportedProblemError, Weights  # noqa: E402
from contrastile.backends.triton import backend, configs  # noqa: E402
from contrastile.backends.triton import tiles as words  # noqa: E402
from contrastile.backends.triton.launch import aligned  # noqa: E402
from contrastile.backends.triton.statistics import _Pass as Forward  # noqa: E402
from contrastile.verify import cases  # noqa: E402
from contrastile.verify.run import compare  # noqa: E402
from contrastile.verify.trial import Subject, Trial  # noqa: E402
from contrastile.verify.truth import truth  # noqa: E402

# the package's own name "gradients" is the function
gradients_module = importlib.import_module("contrastile.backends.triton.gradients")

# the interpreter's NumPy warns where a kernel means its infinities
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CASES = (
    "ragged",
    "hot",
    "all-negative",
    "staircase@up",
    "exact",
    "one-row",
    "one-column",
    "zero-rows",
    "ids-drop",
    "labels",
    "self-excluded",
    "blocks",
    "signed-zero-weights",
    "wide-scale",
    "sigmoid",
    "sigmoid-ids",
    "large-logits",
)


def trial(name: str, dtype: str) -> Trial:
    case = cases.build(name, dtype)
    return Trial(Subject("triton", backend, dtype), case, truth(case.problem))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_within_the_derived_bound(name: str, dtype: str) -> None:
    held = trial(name, dtype)
    worst = compare(held.outcome, held.oracle.outcome, held.bound)
    assert worst.ratio <= 1, str(worst)


@pytest.mark.parametrize("name", ["nan", "inf"])
def test_values_that_are_not_finite_come_out_as_the_oracle_says(name: str) -> None:
    held = trial(name, "float32")
    # the case is what its name says: else nothing would be held to anything here
    assert np.isnan(held.oracle.outcome.loss)
    worst = compare(held.outcome, held.oracle.outcome, held.bound)
    assert worst.ratio <= 1, str(worst)


@pytest.mark.parametrize("tile", [(1, 1), (7, 13), (40, 9)])
def test_any_tile_is_within_the_bound(tile: tuple[int, int]) -> None:
    held = trial("one-row", "float32") if tile == (1, 1) else trial("signed-zero-weights", "float32")
    worst = held.hold(held.problem, options=Options(tile))
    assert worst.ratio <= 1, str(worst)


def block(m: int = 37, n: int = 45, d: int = 24, scale: float = 5.0, dtype: Any = torch.float32) -> Block:
    random = np.random.default_rng(m * n + d)
    rows, columns = (torch.tensor(random.standard_normal((size, d))).to(dtype) for size in (m, n))
    return Block(rows, columns, torch.tensor(scale), None, Pairs(positives=torch.arange(m)))


def status(given: Block) -> int:
    """The path the device chose: 0 fast, 1 safe."""
    run = Forward(given, True, Options())
    run.run()
    return int(run.status[0])


def test_the_fast_path_is_taken_where_the_norms_prove_it_safe() -> None:
    given = block()
    unit = replace(
        given, rows=torch.nn.functional.normalize(given.rows), columns=torch.nn.functional.normalize(given.columns)
    )
    assert status(unit) == 0
    assert status(replace(unit, scale=torch.tensor(100.0))) == 0


def test_the_safe_path_is_taken_where_nothing_proves_the_fast_one() -> None:
    given = block()
    assert status(replace(given, scale=torch.tensor(1e6))) == 1
    broken = given.rows.clone()
    broken[3, 2] = float("nan")
    assert status(replace(given, rows=broken)) == 1


def test_sums_that_underflow_set_the_status_word_after_the_fact() -> None:
    """The bound allows the fast path, but one row's logits all lie where terms are flushed."""
    d = 16
    rows, columns = torch.zeros(20, d), torch.zeros(33, d)
    rows[:, 0], columns[:, 0] = 1.0, 1.0
    rows[4, 0] = -1.0
    given = Block(rows, columns, torch.tensor(100.0))
    assert status(given) == 1
    found = backend.lse(given, True, Options())
    # every dot product is exact here: x = 100 or -100, and L = x + log n
    error = abs(float(found.row_lse[4]) - (-100 + np.log(33)))
    assert error <= 100 * 2.0**-20


@pytest.mark.parametrize("scale", [5.0, 1e4])
def test_repeats_are_bit_equal_and_strides_do_not_matter(scale: float) -> None:
    given = block(scale=scale)
    first = backend.lse(given, True, Options())
    wide = torch.stack([given.rows, given.rows], 2)[:, :, 1]
    odd = torch.cat([given.columns, given.columns[:, :1]], 1)[:, : given.columns.shape[1]]
    for again in (given, replace(given, rows=wide), replace(given, columns=odd)):
        found = backend.lse(again, True, Options())
        for name in ("row_lse", "row_positive", "column_lse", "column_positive"):
            assert torch.equal(getattr(found, name), getattr(first, name)), name


def test_gradients_add_to_what_is_there_and_may_be_unwanted() -> None:
    given = block(dtype=torch.float16)
    m, n = len(given.rows), len(given.columns)
    found = backend.lse(given, True, Options())
    w = torch.full((m,), 0.5 / m), torch.full((n,), 0.5 / n)
    weights = Weights(found.row_lse, w[0], torch.ones(m), found.column_lse, w[1], torch.ones(n))
    both = torch.zeros(m, 24), torch.zeros(n, 24)
    backend.gradients(given, weights, *both, Options())
    alone = torch.zeros(n, 24)
    backend.gradients(given, weights, None, alone, Options())
    assert torch.equal(alone, both[1])
    start = torch.full((m, 24), 2.0**-6)
    backend.gradients(given, weights, start, None, Options())
    # one rounding of a sum near 2^-6
    assert float((start - 2.0**-6 - both[0]).abs().max()) <= 2.0**-28
    backend.gradients(given, weights, None, None, Options())


def test_positives_at_random_reach_their_columns() -> None:
    given = block()
    where = torch.tensor([7, 7, -3, 10**12, *range(33)])
    found = backend.lse(replace(given, pairs=Pairs(positives=where)), True, Options())
    expected = torch.zeros(len(given.columns), dtype=torch.float64)
    for i, j in enumerate(where.tolist()):
        if 0 <= j < len(expected):
            expected[j] += float(found.row_positive[i])
    size = float(expected.abs().max())
    assert float((found.column_positive.double() - expected).abs().max()) <= 4 * 2.0**-24 * size
    assert float(found.row_positive[2]) == float(found.row_positive[3]) == 0.0


def test_refusals_give_their_reason() -> None:
    assert "bfloat16" not in backend.dtypes
    with pytest.raises(UnsupportedProblemError, match="float64"):
        backend.check(block(dtype=torch.float64))
    with pytest.raises(UnsupportedProblemError, match="at least one column"):
        backend.check(replace(block(), rows=torch.ones(3, 0), columns=torch.ones(4, 0)))


def test_alignment_copies_only_what_needs_it() -> None:
    good = torch.ones(5, 8)
    assert aligned(good) is good
    for bad in (torch.ones(5, 7), torch.ones(8, 5).T, torch.ones(6, 8)[1:, 1:], torch.ones(1, 8).expand(5, 8)):
        copy = aligned(bad)
        assert copy is not bad
        assert torch.equal(copy, bad)
        assert copy.stride(0) % 4 == 0


def test_chunks_stay_within_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRASTILE_WORKSPACE_MIB", "256")
    config = configs.choose("gradient", "bfloat16", 90, 512)
    for m, n in ((4_194_304, 4_194_304), (65536, 1000), (1000, 65536), (1, 10**7), (10**7, 1)):
        height, width = configs.backward_chunk(m, n, 2, config, None)
        assert 1 <= height <= m
        assert 1 <= width <= n
        # a descriptor pads a row to 16 bytes
        assert 2 * height * (-(-width // 8) * 8) <= 256 * 2**20 or width < 8
        assert configs.backward_chunk(m, n, 2, config, (3, 5)) == (min(m, 3), min(n, 5))


def test_the_fused_array_operations_agree_with_the_plain_ones() -> None:
    random = np.random.default_rng(0)
    a, b = (torch.tensor(random.standard_normal((37, 21)), dtype=torch.float32) for _ in range(2))
    exact = float((a.double() * b.double()).sum())
    size = float((a.double() * b.double()).abs().sum())
    assert (
        abs(float(backend.arrays.inner(a.half(), b)) - float((a.half().double() * b.double()).sum())) <= size * 2.0**-18
    )
    assert abs(float(backend.arrays.inner(a, b)) - exact) <= size * 2.0**-18
    found = backend.arrays.scaled(a, torch.tensor(3.0), "float16", consume=False)
    assert torch.equal(found, (a * 3.0).half())


def test_the_mean_excess_is_the_plain_one() -> None:
    random = np.random.default_rng(1)
    lse_, positive, weight, target = (torch.tensor(random.standard_normal(53), dtype=torch.float32) for _ in range(4))
    # silenced whatever it holds; no target, so not projected; projected to 0
    weight[3], lse_[3] = 0.0, -float("inf")
    target[4], lse_[4], weight[4] = 0.0, -7.0, 1.0
    target[5], lse_[5], positive[5], weight[5] = 1.0, 2.0, 5.0, 1e6
    given = lse_, positive, weight, target
    plain = float(mean_excess(backend.arrays, *given))
    # 53 float64 terms, each below 2^6
    assert abs(float(backend.arrays.mean_excess(*given)) - plain) <= 53 * 53 * 2.0**6 * 2.0**-53
    lse_[9] = float("nan")
    assert np.isnan(float(backend.arrays.mean_excess(*given)))


def weights_of(given: Block, two_sided: bool = True) -> Weights:
    """Halved means, from the block's own log-sum-exps."""
    m, n = len(given.rows), len(given.columns)
    found = backend.lse(given, two_sided, Options())
    rows = found.row_lse, torch.full((m,), 0.5 / m), torch.ones(m)
    return Weights(*rows, found.column_lse, torch.full((n,), 0.5 / n), torch.ones(n)) if two_sided else Weights(*rows)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tile", [None, (16, 32), (13, 45), (50, 9)])
def test_what_is_finished_has_the_bits_of_sums_finished_later(tile: tuple[int, int] | None, dtype: str) -> None:
    given = block(dtype=getattr(torch, dtype))
    weights, options = weights_of(given), Options(tile)
    sums = torch.zeros(given.rows.shape), torch.zeros(given.columns.shape)
    backend.gradients(given, weights, *sums, options)
    assert backend.finished is not None
    found = {form: backend.finished(given, weights, None, form, options) for form in (None, "sums", "gradient")}
    rows, columns = (backend.arrays.scaled(x, given.scale, dtype, consume=False) for x in sums)
    assert found[None].columns is None
    assert torch.equal(found["sums"].columns, sums[1])
    assert torch.equal(found["gradient"].columns, columns)
    size = float((given.rows.double() * sums[0].double()).abs().sum())
    exact = float((given.rows.double() * sums[0].double()).sum())
    for each in found.values():
        assert torch.equal(each.rows, rows)
        assert abs(float(each.inner) - exact) <= 24 * 2.0**-24 * size


@pytest.mark.parametrize("two_sided", [True, False])
def test_upstream_multiplies_every_weight(two_sided: bool) -> None:
    given = block(dtype=torch.float16)
    weights, upstream = weights_of(given, two_sided), torch.tensor(-0.37)
    column = weights.column_weight
    by_hand = replace(
        weights,
        row_weight=weights.row_weight * upstream,
        column_weight=None if column is None else column * upstream,
    )
    assert backend.finished is not None
    found = backend.finished(given, weights, upstream, "gradient", Options())
    expected = backend.finished(given, by_hand, None, "gradient", Options())
    for name in ("rows", "columns", "inner"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("form", ["sums", "gradient"])
def test_what_is_finished_starts_from_nothing_that_memory_held(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = block(dtype=torch.float16)
    weights, options = weights_of(given), Options((16, 32))
    assert backend.finished is not None
    expected = backend.finished(given, weights, None, form, options)
    empty = torch.empty

    def poisoned(*shape: Any, **how: Any) -> Any:
        found = empty(*shape, **how)
        return found.fill_(float("nan")) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", poisoned)
    found = backend.finished(given, weights, None, form, options)
    for name in ("rows", "columns", "inner"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("shape", [(0, 45), (50, 0), (0, 0)])
def test_a_block_without_pairs_is_finished_with_zeros(shape: tuple[int, int]) -> None:
    given = block(m=shape[0], n=shape[1], dtype=torch.float16)
    ones = [torch.ones(size) for size in shape]
    assert backend.finished is not None
    for form, dtype in (("sums", torch.float32), ("gradient", torch.float16)):
        found = backend.finished(given, Weights(*[ones[0]] * 3, *[ones[1]] * 3), None, form, Options())
        assert (found.rows.shape, found.rows.dtype) == (given.rows.shape, torch.float16)
        assert (found.columns.shape, found.columns.dtype) == (given.columns.shape, dtype)
        assert not any(x.any() for x in (found.rows, found.columns, found.inner))


def test_finishing_holds_no_matrix_of_all_rows_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    given = block(m=200, n=45, dtype=torch.float16)
    weights = weights_of(given)
    asked: list[int] = []
    empty = torch.empty

    def counted(*shape: Any, **how: Any) -> Any:
        found = empty(*shape, **how)
        asked.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(torch, "empty", counted)
    assert backend.finished is not None
    backend.finished(given, weights, None, None, Options((16, 32)))
    # the rows' gradient itself is float16
    assert max(asked) < 4 * given.rows.numel()
    assert 2 * given.rows.numel() in asked


def test_the_columns_gradient_waits_for_the_workspace_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    given = block(dtype=torch.float16)
    weights, held = weights_of(given), list[Any]()
    space, multiplied = gradients_module.workspace, gradients_module.multiplied

    def workspace(*call: Any) -> Any:
        found = space(*call)
        held.append(weakref.ref(found))
        return found

    def last(*call: Any) -> None:
        assert held
        assert not any(x() is not None for x in held)
        held.clear()
        multiplied(*call)

    monkeypatch.setattr(gradients_module, "workspace", workspace)
    monkeypatch.setattr(gradients_module, "multiplied", last)
    assert backend.finished is not None
    backend.finished(given, weights, None, "gradient", Options((16, 32)))
    assert not held


@pytest.mark.parametrize("scale", [33.3, 57.1, 77.7, 99.9])
def test_a_certain_positive_is_its_rows_and_its_columns_log_sum_exp_to_the_last_bit(scale: float) -> None:
    """Logits turned to powers of two and back are the logits: a trained model's loss is their difference."""
    # dots of 1 and 0: the product with ALPHA is exact, and the other logits vanish from every sum
    image = torch.eye(40, 48)
    given = Block(image, image, torch.tensor(scale), None, Pairs(positives=torch.arange(40)))
    found = backend.lse(given, True, Options())
    assert torch.equal(found.row_lse, found.row_positive)
    assert torch.equal(found.column_lse, found.column_positive)


def test_the_plan_has_a_slot_for_every_number() -> None:
    slots = [words.ALPHA, words.REFERENCE, words.THRESHOLD, words.FAST, words.FACTOR, words.BIAS]
    assert sorted(int(x.value) for x in slots) == list(range(len(slots)))
    assert len(slots) <= words.PLAN_SIZE
