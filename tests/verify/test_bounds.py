"""The bounds know every fact of a backend; that they are neither too small nor too large, backends and mutants show.

The second gate: a plain computation passes it, and noisier ones do not.
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

# NumPy's exponentials warn where a defect or a NaN case makes them
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@cache
def case(name: str, dtype: str) -> tuple[Problem, Truth]:
    found = build(name, dtype)
    return found, truth(found, UPSTREAM)


@pytest.mark.parametrize("name", ["ragged", "hot", "labels", "sigmoid-ids", "blocks"])
def test_features_rounded_to_tf32_are_within_the_bounds_that_know_of_it_and_no_others(name: str) -> None:
    """Other facts than this are those of a backend that runs on a CPU, which its checks hold to them."""
    found, exact = case(name, "float32")
    torch = load("torch")
    # float16 has the significand of tf32, and enough range for these features
    rounded = [round_to(x, "float16") for x in (found.rows, *found.columns)]
    problem = replace(found, rows=rounded[0], columns=tuple(rounded[1:]))
    got = outcome(problem, torch, "float32", upstream=UPSTREAM)
    facts = torch.accuracy("float32", "cpu")
    told, untold = (
        compare(got, exact.outcome, bounds(found, exact, each, "float32", UPSTREAM)).ratio
        for each in (replace(facts, input_rounding=2.0**-11), facts)
    )
    assert told < 1 < untold


# of losses that have them: a margin is of rows and columns that have a positive, smoothing not of a set against itself
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("hot", {"margin": 0.25}),
        ("labels", {"margin": 0.25}),
        ("square-ragged", {"smoothing": 0.3}),
        # of a row, of its positives and of its negatives
        ("sigmoid-labels", {"row_weight": np.full((22, 2), (0.01, 0.04))}),
    ],
)
def test_an_option_is_within_the_bounds_and_a_loss_without_it_is_not(name: str, option: dict[str, Any]) -> None:
    plain, torch = build(name, "float32"), load("torch")
    problem = replace(plain, **option)
    exact = truth(problem, UPSTREAM)
    bound = bounds(problem, exact, torch.accuracy("float32", "cpu"), "float32", UPSTREAM)
    with_it, without = (
        compare(outcome(each, torch, "float32", upstream=UPSTREAM), exact.outcome, bound, FIELDS).ratio
        for each in (problem, plain)
    )
    assert with_it < 1 < without


def test_bounds_know_the_tile_that_was_asked_for() -> None:
    found, exact = case("ragged", "float32")
    options = Options(tile=(2, 3))
    small, large = (bounds(found, exact, FLOAT32, "float32", UPSTREAM, each) for each in (options, None))
    assert np.all(small.statistics[0] > large.statistics[0])


@pytest.mark.parametrize("name", ["ragged", "hot", "labels", "certain-shared"])
def test_a_loss_of_the_statistics_is_within_its_bounds_and_one_of_other_bars_is_not(name: str) -> None:
    """What is 2^-12 off is within the bounds of an arithmetic of so few digits alone."""
    problem, draw, numpy = (
        replace(build(name, "float32"), kind="statistics"),
        np.random.default_rng(5),
        load("numpy"),
    )
    size = sum(len(x) for x in (problem.row_weight, problem.column_weight) if x is not None)
    drawn = draw.standard_normal((3, size))
    exact = truth(problem, drawn)
    fine, coarse = (bounds(problem, exact, each, "float32", drawn) for each in (FLOAT32, _larger(unit=2.0**-10)))
    near, far = (outcome(problem, numpy, "float32", upstream=drawn * x) for x in (1.0, 1 + 2.0**-12))
    found = [compare(got, exact.outcome, bound).ratio < 1 for got, bound in ((near, fine), (far, fine), (far, coarse))]
    assert found == [True, False, True]


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
    wide, narrow = (dict(parts(bounds(found, exact, each, "float32", UPSTREAM), EVERY)) for each in (facts, FLOAT32))
    given = [field for field, value in narrow.items() if value is not None]
    if not (name == "sigmoid" and (facts.shared_reference or facts.tile(9) == 1)):
        assert np.any(wide["rows"] > narrow["rows"])
    # one short tile is a shorter sum: only the merges widen its bound
    if facts.tile(9) != 1:
        assert all(np.all(wide[field] >= narrow[field]) for field in given)


def test_no_bound_where_the_arithmetic_has_no_digits_left() -> None:
    assert gamma(1.0) == np.inf
    found, exact = case("ragged", "float32")
    hopeless = bounds(found, exact, _larger(depth=lambda k: 2**24), "float32")
    assert np.all(np.isinf(hopeless.statistics[0, : len(exact.q)]))
    assert np.isinf(hopeless.scale)


@pytest.mark.parametrize("name", ["certain", "certain-shared"])
def test_positives_inside_the_log_sum_exps_need_wider_bounds(name: str) -> None:
    """A plain computation subtracts its positives, and is exact only within the bounds of one that does."""
    problem = build(name, "float32")
    exact = truth(problem)
    got = plain_outcome(problem, exact, FLOAT32, "float32")
    inside, separate = (
        compare(got, exact.outcome, bounds(problem, exact, FLOAT32, "float32", separate_positives=each), FIELDS)
        for each in (False, True)
    )
    assert inside.ratio < 1 < separate.ratio


@pytest.mark.parametrize("name", ["ragged", "zero-rows"])
def test_the_upstream_gradient_scales_the_gradients_bounds_and_not_the_values(name: str) -> None:
    found, _ = case(name, "float32")
    once = bounds(found, truth(found), FLOAT32, "float32")
    four = bounds(found, truth(found, 4.0), FLOAT32, "float32", 4.0)
    assert once.loss == four.loss
    # all but the absolute underflow terms are linear, and those are far below one rounding here
    assert np.all(np.abs(four.rows - 4 * once.rows) <= 2.0**-40 * four.rows)


@pytest.mark.parametrize("field", ["loss", "rows", "scale"])
def test_noise_beyond_the_plain_computation_s_fails(field: str) -> None:
    problem = build("square-ragged", "float32")
    exact = truth(problem)
    noisy = getattr(exact.outcome, field) * (1 + 2.0**-12)
    found = compare_with_plain(problem, exact, replace(exact.outcome, **{field: noisy}), FLOAT32, "float32")
    assert found.ratio > 1
    assert found.field.startswith(field)


def test_twice_the_plain_computation_s_error_is_the_limit_on_a_host_and_three_times_on_a_gpu() -> None:
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
    """Of both directions, and of more documents than queries: the oracle's MaxSim is autograd's."""
    draw = np.random.default_rng(seed)
    b, q, t, d = sizes
    features = draw.standard_normal((b, q, d)), draw.standard_normal((b + max(more, 0), t, d))
    if coarse:
        # many products of small integers are equal
        features = tuple(np.round(x) for x in features)
    masks = [np.maximum(draw.integers(0, 2, x.shape[:2]), np.arange(x.shape[1]) == 0) for x in features]
    keywords, options = dict(zip(MASKS, masks, strict=True)), {"symmetric": True} if more < 0 else {}
    arguments = Arguments(features, draw.uniform(-30, 30), keywords=keywords, options=options)
    claims = Claims(objective="maxsim", masks=True, dtypes=(dtype,))
    case = LossCase(replace(BATCHES["masked"], name="drawn"), dtype, rounded(arguments, dtype), claims)
    trial = LossTrial(Loss.of(maxsim, claims), case)
    assert trial.compare(trial.result, trial.fields).ratio < 1
