"""Triton's sigmoid kernel under the interpreter: tiles with and without a pair that is no plain negative."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from contrastile.backends.triton import backend  # noqa: E402
from contrastile.schedules.problem import Problem  # noqa: E402
from contrastile.verify import cases  # noqa: E402
from contrastile.verify.comparison import compare  # noqa: E402
from contrastile.verify.rounding import round_to  # noqa: E402
from contrastile.verify.trial import Subject, Trial  # noqa: E402
from contrastile.verify.truth import truth  # noqa: E402

# the interpreter's NumPy warns where a kernel means its infinities
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

M, N = 37, 141
HIGH = 1 << 32


def problem(dtype: str, size: float = 1.0, **changes: Any) -> Problem:
    """SigLIP of 37 rows and 141 columns, of whose 3 x 5 tiles two hold a positive."""
    draw = np.random.default_rng(M * N)
    rows, columns = (round_to(size * draw.standard_normal((x, 24)) / 24**0.5, dtype) for x in (M, N))
    plain = cases.build("sigmoid", dtype).problem
    given = replace(
        plain,
        rows=rows,
        columns=(columns,),
        scale=round_to(7.0, "float32"),
        bias=round_to(-1.5, "float32"),
        row_weight=round_to(draw.uniform(0.5, 2.0, M), "float32"),
        row_target=np.zeros(M),
        positives=np.arange(M),
    )
    return replace(given, **changes)


def ids(rows: dict[int, int], columns: dict[int, int]) -> dict[str, Any]:
    """Ids all of whose pairs differ but those named here."""
    row_ids, column_ids = np.arange(M) + 1000, np.arange(N) + 5000
    row_ids[list(rows)], column_ids[list(columns)] = list(rows.values()), list(columns.values())
    return {"row_ids": row_ids, "column_ids": column_ids}


def weights(zeros: list[int]) -> dict[str, Any]:
    weight = np.ones(M)
    weight[zeros] = 0.0
    return {"row_weight": weight}


def holds(given: Problem, dtype: str) -> None:
    case = replace(cases.build("sigmoid", dtype), problem=given)
    held = Trial(Subject("triton", backend, dtype), case, lambda: truth(given))
    worst = compare(held.outcome, held.oracle.outcome, held.bound)
    assert worst.ratio <= 1, str(worst)


CHANGES: dict[str, dict[str, Any]] = {
    "diagonal": {},
    "scattered": {"positives": np.arange(M) * 17 % N},
    "none": {"positives": np.full(M, -1)},
    "outside": {"positives": np.arange(M) + (1 << 40)},
    "excluded": {"excluded": np.where(np.arange(M) % 9 == 4, 120, -1)},
    "weights": weights([3, 20]),
    "one pair alike": ids({35: -7}, {64: -7}),
    "positives alike": {"row_ids": np.arange(M), "column_ids": np.arange(N)},
    "alike in the low bits": ids({2: HIGH + 9}, {100: 9}),
    "alike when folded": ids({2: HIGH + 2}, {100: 2 * HIGH + 1}),
    "positives by ids": {"positives": None, "match": "target", **ids({30: 5, 2: 4}, {70: 5, 71: 4})},
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CHANGES)
def test_every_pair_that_is_no_plain_negative_is_found(name: str, dtype: str) -> None:
    holds(problem(dtype, **CHANGES[name]), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0])
def test_sums_of_a_tile_neither_overflow_nor_lose_what_is_small(size: float) -> None:
    """Without features and bias every pair costs log 2, and a product of as many twos must not become infinite."""
    for bias in (0.0, -40.0, 40.0):
        given = problem("float32", size, bias=round_to(bias, "float32"))
        holds(given, "float32")
        # beside a positive nothing of what is small would show
        holds(replace(given, positives=np.full(M, -1)), "float32")
