"""The second gate: a plain computation passes it, and noisier ones do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contrastile.backends.contract import Accuracy
from contrastile.verify.cases import build, names
from contrastile.verify.plain import NOISIER, compare_with_plain, plain_outcome
from contrastile.verify.truth import truth

FLOAT32 = Accuracy(unit=2.0**-24, accumulate_unit=2.0**-24)
FINITE = [name for name in names() if not name.startswith(("wordnet", "nan", "inf"))]

# NumPy's exponentials warn where a plain computation overflows
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("name", FINITE)
def test_the_plain_computation_is_no_noisier_than_itself(name: str) -> None:
    problem = build(name, "float32")
    exact = truth(problem)
    got = plain_outcome(problem, exact, FLOAT32, "float32")
    # two roundings of the ratio itself
    assert compare_with_plain(problem, exact, got, FLOAT32, "float32").ratio * NOISIER["cpu"] <= 1 + 2.0**-51


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
