"""The bounds hold for a correct tiled kernel in every dtype, and every planted defect breaks them somewhere."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest
from emulated import DEFECTS, Kernel

from contrastile.backends.contract import Accuracy, Options
from contrastile.verify.arithmetic import gamma
from contrastile.verify.bounds import ORACLE, bounds
from contrastile.verify.cases import Case, build, names
from contrastile.verify.comparison import GRADIENT, compare, parts
from contrastile.verify.execution import outcome
from contrastile.verify.plain import plain_outcome
from contrastile.verify.rounding import round_to
from contrastile.verify.truth import Outcome, truth

UPSTREAM = -0.75
SMALL = [name for name in names() if not name.startswith("wordnet")]
FLOAT32 = Accuracy(unit=2.0**-24, accumulate_unit=2.0**-24)

FIELDS = ("loss", *GRADIENT)

DEFAULT = Options()

KERNELS = {
    "float32": ("float32", Kernel()),
    "tf32": ("float32", Kernel(tf32=True)),
    "float16": ("float16", Kernel(gradient="float16")),
    "bfloat16": ("bfloat16", Kernel(gradient="bfloat16")),
    "shared reference": ("float32", Kernel(shared=True)),
    "uneven tiles": ("float32", Kernel(tile=(5, 11))),
}

# NumPy's exponentials warn where a defect or a NaN case makes them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@cache
def case(name: str, dtype: str) -> tuple[Case, Outcome]:
    found = build(name, dtype)
    return found, truth(found.problem, UPSTREAM)


def ratio(name: str, dtype: str, kernel: Kernel, options: Options = DEFAULT) -> float:
    """Largest error / bound of the kernel on a case."""
    found, exact = case(name, dtype)
    held = "float32" if dtype == "bfloat16" else dtype
    got = outcome(found.problem, kernel.backend(), held, options=options, upstream=UPSTREAM)
    if dtype == "bfloat16":
        columns = tuple(round_to(block, dtype) for block in got.columns)
        got = replace(got, rows=round_to(got.rows, dtype), columns=columns)
    limit = bounds(found.problem, exact, kernel.accuracy(), dtype, UPSTREAM, options)
    return compare(got, exact.outcome, limit).ratio


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("kind", KERNELS)
def test_a_correct_kernel_is_within_its_bounds(kind: str, name: str) -> None:
    assert ratio(name, *KERNELS[kind]) < 1


@pytest.mark.parametrize("name", ["wordnet@14.3", "wordnet@100"])
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_correct_kernel_is_within_its_bounds_on_real_embeddings(kind: str, name: str) -> None:
    dtype, kernel = KERNELS[kind]
    assert ratio(name, dtype, replace(kernel, tile=(128, 128))) < 1


def test_bounds_know_the_tile_that_was_asked_for() -> None:
    options = Options(tile=(2, 3))
    assert all(ratio(name, "float32", Kernel(), options) < 1 for name in ("ragged", "staircase@up", "sigmoid-ids"))
    found, exact = case("ragged", "float32")
    small, large = (bounds(found.problem, exact, FLOAT32, "float32", UPSTREAM, each) for each in (options, None))
    assert np.all(small.row_negative_lse > large.row_negative_lse)


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_breaks_a_bound_in_some_case(defect: str) -> None:
    assert any(not ratio(name, "float32", Kernel(defect)) < 1 for name in SMALL)


@pytest.mark.parametrize("name", SMALL)
def test_float64_is_within_the_oracles_own_bounds(name: str) -> None:
    """A float64 backend is as inexact as the oracle: the bound counts both."""
    found, exact = case(name, "float64")
    again = replace(found.problem, rows=found.problem.rows[:, ::-1], columns=_mirrored(found))
    other = truth(again, UPSTREAM).outcome
    other = replace(other, rows=other.rows[:, ::-1], columns=tuple(block[:, ::-1] for block in other.columns))
    assert compare(other, exact.outcome, bounds(found.problem, exact, ORACLE, "float64", UPSTREAM)).ratio < 1


def _mirrored(found: Case) -> tuple[np.ndarray, ...]:
    return tuple(block[:, ::-1] for block in found.problem.columns)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", SMALL)
def test_bounds_have_the_shapes_of_the_truth_and_no_nan(name: str, dtype: str) -> None:
    found, exact = case(name, dtype)
    facts = ORACLE if dtype == "float64" else FLOAT32
    limit = dict(parts(bounds(found.problem, exact, facts, dtype, UPSTREAM)))
    for field, value in parts(exact.outcome):
        assert (limit[field] is None) == (value is None)
        if value is not None:
            assert limit[field].shape == value.shape
            assert np.all(limit[field] >= 0)
            assert np.all(limit[field][~np.isfinite(value)] == 0)


def _larger(**facts: float) -> Accuracy:
    return replace(FLOAT32, **facts)


@pytest.mark.parametrize(
    "facts",
    [
        _larger(unit=2.0**-23),
        _larger(accumulate_unit=2.0**-22),
        _larger(input_rounding=2.0**-11),
        _larger(gradient_rounding=2.0**-8),
        _larger(gradient_underflow=2.0**-25),
        _larger(exp_ulps=8.0),
        _larger(shared_reference=True),
        _larger(depth=lambda k: 2 * k),
        _larger(tile=lambda k: 1),
    ],
    ids=lambda facts: next(f.name for f in fields(Accuracy) if getattr(facts, f.name) != getattr(FLOAT32, f.name)),
)
@pytest.mark.parametrize("name", ["ragged", "sigmoid"])
def test_every_fact_counts(name: str, facts: Accuracy) -> None:
    """A less accurate backend never gets a tighter bound, and somewhere a wider one (in dQ, where the fact reaches)."""
    found, exact = case(name, "float32")
    wide, narrow = (dict(parts(bounds(found.problem, exact, each, "float32"))) for each in (facts, FLOAT32))
    given = [field for field, value in narrow.items() if value is not None]
    if not (name == "sigmoid" and (facts.shared_reference or facts.tile(9) == 1)):
        assert np.any(wide["rows"] > narrow["rows"])
    # one short tile is a shorter sum: only the merges widen its bound
    if facts.tile(9) != 1:
        assert all(np.all(wide[field] >= narrow[field]) for field in given)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_state_finer_than_the_features_pays_for_its_cast(dtype: str) -> None:
    """A float64 kernel on narrower features gives the truth rounded once, and the bound is little more than that."""
    found, exact = case("ragged", dtype)
    limit = bounds(found.problem, exact, ORACLE, dtype, UPSTREAM)
    once = [np.abs(round_to(x, dtype) - x) for x in (exact.outcome.rows, *exact.outcome.columns)]
    assert all(np.all(a <= b) for a, b in zip(once, (limit.rows, *limit.columns), strict=True))
    assert np.any(2 * once[0] > limit.rows)


def test_no_bound_where_the_arithmetic_has_no_digits_left() -> None:
    assert gamma(1.0) == np.inf
    found, exact = case("ragged", "float32")
    hopeless = bounds(found.problem, exact, _larger(depth=lambda k: 2**24), "float32")
    assert np.all(np.isinf(hopeless.row_negative_lse))
    assert np.isinf(hopeless.scale)


def test_the_bound_of_an_exact_case_is_a_few_roundings() -> None:
    """With no logits (scale 0) every log-sum-exp is log n: its bound is what storing and summing n ones may cost."""
    found, exact = case("wide-scale", "float32")
    limit = bounds(found.problem, exact, FLOAT32, "float32")
    n = len(exact.k)
    roundings = n + 2 * (2 * FLOAT32.exp_ulps + 2) + 4 * np.log(n) + FLOAT32.exp_ulps * (np.log(n) + 1)
    assert np.all(limit.row_negative_lse <= gamma(roundings * FLOAT32.unit) * 2)


@pytest.mark.parametrize("name", ["certain", "certain-shared"])
def test_positives_inside_the_log_sum_exps_need_wider_bounds(name: str) -> None:
    """A plain computation subtracts its positives, and is exact only within the bounds of one that does."""
    problem = build(name, "float32").problem
    exact = truth(problem)
    got = plain_outcome(problem, exact, FLOAT32, "float32")
    inside, separate = (
        compare(got, exact.outcome, bounds(problem, exact, FLOAT32, "float32", separate_positives=each), FIELDS)
        for each in (False, True)
    )
    assert inside.ratio < 1 < separate.ratio


def test_the_upstream_gradient_scales_the_gradients_bounds_and_not_the_values() -> None:
    found, _ = case("ragged", "float32")
    once = bounds(found.problem, truth(found.problem), FLOAT32, "float32")
    four = bounds(found.problem, truth(found.problem, 4.0), FLOAT32, "float32", 4.0)
    assert once.loss == four.loss
    # all but the absolute underflow terms are linear, and those are far below one rounding here
    assert np.all(np.abs(four.rows - 4 * once.rows) <= 2.0**-40 * four.rows)
