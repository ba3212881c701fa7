"""The bounds depend on every fact of a backend. Backends and mutants show that no bound is too small or too large.

A plain computation passes the second gate, and noisier ones do not.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contrastile.backends.contract import Accuracy, Options
from contrastile.backends.registry import load
from contrastile.bench.plain import maxsim
from contrastile.schedules.problem import Problem
from contrastile.verify.arithmetic import gamma
from contrastile.verify.bounds import bounds
from contrastile.verify.cases import build
from contrastile.verify.comparison import GRADIENT, compare, parts
from contrastile.verify.execution import outcome
from contrastile.verify.losses import Claims, Loss
from contrastile.verify.losses.arguments import Arguments, rounded
from contrastile.verify.losses.cases import BATCHES, LossCase
from contrastile.verify.losses.maxsim import MASKS
from contrastile.verify.losses.properties import LossTrial
from contrastile.verify.plain import NOISIER, compare_with_plain, plain_outcome
from contrastile.verify.rounding import round_to
from contrastile.verify.truth import Truth, truth

UPSTREAM = -0.75
FLOAT32 = Accuracy(unit=2.0**-24, accumulate_unit=2.0**-24)

FIELDS = ("loss", *GRADIENT)
EVERY = ("statistics", *FIELDS)

# NumPy's exponentials warn of overflow and NaN in defects and in NaN cases
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@cache
def case(name: str, dtype: str) -> tuple[Problem, Truth]:
    problem = build(name, dtype)
    return problem, truth(problem, UPSTREAM)


@pytest.mark.parametrize("name", ["ragged", "hot", "labels", "sigmoid-ids", "blocks"])
def test_features_rounded_to_tf32_are_within_the_bounds_only_if_the_facts_say_so(name: str) -> None:
    """The other facts apply to backends that run on a CPU, whose own checks test them."""
    plain, exact = case(name, "float32")
    torch = load("torch")
    # float16 has the significand of tf32, and enough range for these features
    rounded = [round_to(x, "float16") for x in (plain.rows, *plain.columns)]
    problem = replace(plain, rows=rounded[0], columns=tuple(rounded[1:]))
    result = outcome(problem, torch, "float32", upstream=UPSTREAM)
    facts = torch.accuracy("float32", "cpu")
    with_fact, without_fact = (
        compare(result, exact.outcome, bounds(plain, exact, accuracy, "float32", UPSTREAM)).ratio
        for accuracy in (replace(facts, input_rounding=2.0**-11), facts)
    )
    assert with_fact < 1 < without_fact


# cases that allow the option: a margin needs positives of rows and columns, and smoothing two different sets
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("hot", {"margin": 0.25}),
        ("labels", {"margin": 0.25}),
        ("square-ragged", {"smoothing": 0.3}),
        # per row a weight of its positives and one of its negatives
        ("sigmoid-labels", {"row_weight": np.full((22, 2), (0.01, 0.04))}),
    ],
)
def test_an_option_is_within_the_bounds_and_a_loss_without_it_is_not(name: str, option: dict[str, Any]) -> None:
    plain, torch = build(name, "float32"), load("torch")
    problem = replace(plain, **option)
    exact = truth(problem, UPSTREAM)
    bound = bounds(problem, exact, torch.accuracy("float32", "cpu"), "float32", UPSTREAM)
    with_it, without = (
        compare(outcome(x, torch, "float32", upstream=UPSTREAM), exact.outcome, bound, FIELDS).ratio
        for x in (problem, plain)
    )
    assert with_it < 1 < without


def test_bounds_depend_on_the_requested_tile() -> None:
    problem, exact = case("ragged", "float32")
    options = Options(tile=(2, 3))
    small, large = (bounds(problem, exact, FLOAT32, "float32", UPSTREAM, x) for x in (options, None))
    assert np.all(small.statistics[0] > large.statistics[0])


@pytest.mark.parametrize("name", ["ragged", "hot", "labels", "certain-shared"])
def test_a_loss_of_statistics_is_within_its_bounds_and_a_perturbed_one_is_not(name: str) -> None:
    """A result with an error of 2^-12 is within the bounds of a coarse arithmetic alone."""
    problem, rng, numpy = (
        replace(build(name, "float32"), kind="statistics"),
        np.random.default_rng(5),
        load("numpy"),
    )
    size = sum(len(x) for x in (problem.row_weight, problem.column_weight) if x is not None)
    upstream = rng.standard_normal((3, size))
    exact = truth(problem, upstream)
    fine, coarse = (bounds(problem, exact, facts, "float32", upstream) for facts in (FLOAT32, _larger(unit=2.0**-10)))
    near, far = (outcome(problem, numpy, "float32", upstream=upstream * x) for x in (1.0, 1 + 2.0**-12))
    ratios = [compare(x, exact.outcome, bound).ratio for x, bound in ((near, fine), (far, fine), (far, coarse))]
    assert [ratio < 1 for ratio in ratios] == [True, False, True]


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
def test_every_fact_widens_a_bound(name: str, facts: Accuracy) -> None:
    """A less accurate backend has no tighter bound, and at least one wider bound (of dQ, if the fact affects it)."""
    problem, exact = case(name, "float32")
    wide, narrow = (dict(parts(bounds(problem, exact, x, "float32", UPSTREAM), EVERY)) for x in (facts, FLOAT32))
    bounded_fields = [field for field, value in narrow.items() if value is not None]
    if not (name == "sigmoid" and (facts.shared_reference or facts.tile(9) == 1)):
        assert np.any(wide["rows"] > narrow["rows"])
    # a tile of one column shortens the sums, so that only its merges widen the bound
    if facts.tile(9) != 1:
        assert all(np.all(wide[field] >= narrow[field]) for field in bounded_fields)


def test_bounds_are_infinite_where_the_arithmetic_has_no_digits_left() -> None:
    assert gamma(1.0) == np.inf
    problem, exact = case("ragged", "float32")
    hopeless = bounds(problem, exact, _larger(depth=lambda k: 2**24), "float32")
    assert np.all(np.isinf(hopeless.statistics[0, : len(exact.q)]))
    assert np.isinf(hopeless.scale)


@pytest.mark.parametrize("name", ["certain", "certain-shared"])
def test_positives_inside_the_log_sum_exps_need_wider_bounds(name: str) -> None:
    """A plain computation subtracts positives from log-sum-exps that include them, which has wider bounds."""
    problem = build(name, "float32")
    exact = truth(problem)
    result = plain_outcome(problem, exact, FLOAT32, "float32")
    inside, separate = (
        compare(result, exact.outcome, bounds(problem, exact, FLOAT32, "float32", separate_positives=flag), FIELDS)
        for flag in (False, True)
    )
    assert inside.ratio < 1 < separate.ratio


@pytest.mark.parametrize("name", ["ragged", "zero-rows"])
def test_the_upstream_gradient_scales_the_gradients_bounds_and_not_the_values(name: str) -> None:
    problem, _ = case(name, "float32")
    single = bounds(problem, truth(problem), FLOAT32, "float32")
    fourfold = bounds(problem, truth(problem, 4.0), FLOAT32, "float32", 4.0)
    assert single.loss == fourfold.loss
    # the bounds are linear but for absolute underflow terms, which are far below one rounding here
    assert np.all(np.abs(fourfold.rows - 4 * single.rows) <= 2.0**-40 * fourfold.rows)


@pytest.mark.parametrize("field", ["loss", "rows", "scale"])
def test_noise_beyond_the_plain_computation_s_fails(field: str) -> None:
    problem = build("square-ragged", "float32")
    exact = truth(problem)
    noisy = getattr(exact.outcome, field) * (1 + 2.0**-12)
    worst = compare_with_plain(problem, exact, replace(exact.outcome, **{field: noisy}), FLOAT32, "float32")
    assert worst.ratio > 1
    assert worst.field.startswith(field)


def test_the_limit_is_twice_the_error_of_a_plain_computation_on_a_host_and_three_times_on_a_gpu() -> None:
    problem = build("square-ragged", "float32")
    exact = truth(problem)
    plain = plain_outcome(problem, exact, FLOAT32, "float32")
    noisy = replace(exact.outcome, rows=exact.outcome.rows + 2.5 * (plain.rows - exact.outcome.rows))
    ratios = [
        compare_with_plain(problem, exact, noisy, FLOAT32, "float32", NOISIER[device]).ratio
        for device in ("cpu", "cuda")
    ]
    assert ratios[1] > 0
    assert ratios[0] == pytest.approx(ratios[1] * 3 / 2)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@example(seed=3, sizes=(2, 2, 2, 2), more=0, coarse=True)
@given(st.integers(0, 2**32 - 1), st.tuples(*[st.integers(1, 5)] * 4), st.integers(-1, 2), st.booleans())
def test_a_plain_maxsim_is_within_its_bounds_on_drawn_texts(
    dtype: str, seed: int, sizes: tuple[int, ...], more: int, coarse: bool
) -> None:
    """One or both directions, and more documents than queries. Autograd differentiates the plain MaxSim."""
    rng = np.random.default_rng(seed)
    b, q, t, d = sizes
    features = rng.standard_normal((b, q, d)), rng.standard_normal((b + max(more, 0), t, d))
    if coarse:
        # many products of small integers are equal
        features = tuple(np.round(x) for x in features)
    masks = [np.maximum(rng.integers(0, 2, x.shape[:2]), np.arange(x.shape[1]) == 0) for x in features]
    keywords, options = dict(zip(MASKS, masks, strict=True)), {"symmetric": True} if more < 0 else {}
    arguments = Arguments(features, rng.uniform(-30, 30), keywords=keywords, options=options)
    claims = Claims(objective="maxsim", masks=True, dtypes=(dtype,))
    case = LossCase(replace(BATCHES["masked"], name="drawn"), dtype, rounded(arguments, dtype), claims)
    trial = LossTrial(Loss.of(maxsim, claims), case)
    assert trial.compare(trial.result, trial.fields).ratio < 1
