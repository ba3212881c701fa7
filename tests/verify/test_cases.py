"""Every case is what its name says, the same each time, and exact in its dtype; its truth has its loss's gradients."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest

from contrastile.schedules.problem import Problem
from contrastile.verify.bounds import ORACLE, bounds
from contrastile.verify.cases import ABOUT, CASES, build, names
from contrastile.verify.rounding import UNIT, round_to
from contrastile.verify.truth import Truth, masks, truth

DTYPES = list(UNIT)


def arrays(problem: Problem) -> dict[str, np.ndarray]:
    found = {f.name: getattr(problem, f.name) for f in fields(Problem)}
    found |= {f"columns[{c}]": block for c, block in enumerate(found.pop("columns"))}
    return {name: np.asarray(x) for name, x in found.items() if x is not None and not isinstance(x, str)}


def of(name: str, dtype: str = "float32") -> tuple[Problem, Truth]:
    problem = build(name, dtype)
    return problem, truth(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_case_is_exact_in_its_dtype_and_the_same_each_time(name: str, dtype: str) -> None:
    case, again = build(name, dtype), build(name, dtype)
    assert ABOUT[name]
    for field, x in arrays(case).items():
        kept = dtype if field == "rows" or field.startswith("columns[") else "float32"
        if x.dtype == np.int64:
            continue
        assert x.dtype == np.float64
        if field.endswith("_target"):
            assert all(t == 0 or t == 1 / round(1 / t) for t in x)
            continue
        assert np.array_equal(round_to(x, kept), x, equal_nan=True)
        assert np.array_equal(x, arrays(again)[field], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("nan", "inf")])
def test_gradients_fit_the_dtype(name: str, dtype: str) -> None:
    """A gradient that overflows its dtype would be compared with inf."""
    _, exact = of(name, dtype)
    for gradient in (exact.outcome.rows, *exact.outcome.columns):
        assert np.isfinite(round_to(gradient, dtype)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_logits_are_where_the_names_say(dtype: str) -> None:
    assert of("all-negative", dtype)[1].x.max() < -75
    assert np.all(np.diff(of("staircase", dtype)[1].x, axis=1).mean(axis=0) < 0)
    assert np.all(np.diff(of("staircase@up", dtype)[1].x, axis=1).mean(axis=0) > 0)
    assert of("large-logits", dtype)[1].x.max() > math.log(np.finfo(np.float32).max)
    assert not of("wide-scale", dtype)[1].x.any()
    hot = of("hot", dtype)[1]
    # from lost to certain: the whole range of a model in training
    assert np.diag(hot.sides[0].p).min() < 0.1 < 0.999 < np.diag(hot.sides[0].p).max()


def test_masks_do_something() -> None:
    for name in ("ids-drop", "sigmoid-ids", "signed-zero-weights", "wordnet@100", "labels", "self-excluded"):
        _, exact = of(name)
        assert not exact.admitted.all()
    labels = of("labels")[1].positive.sum(axis=1)
    assert labels.min() == 0
    assert labels.max() > 1
    _, silent = of("signed-zero-weights")
    assert (~silent.admitted.any(axis=1)).sum() > 1


FINITE = [name for name in names() if not name.startswith("wordnet") and name not in ("nan", "inf")]


@pytest.mark.parametrize("name", FINITE)
def test_the_gradients_are_the_losss_differences(name: str) -> None:
    """Along a random direction h of all inputs at once: (f(+e) - f(-e)) / 2e = <gradient, h>, two orders in e.

    A direction is as long as what it moves.
    """
    problem = build(name, "float32")
    upstream = 1.75
    exact = truth(problem, upstream)
    draw = np.random.default_rng(3)
    size = min(1.0, np.abs(problem.rows).max(initial=0.0) or 1.0)
    rows = size * draw.standard_normal(problem.rows.shape)
    columns = tuple(size * draw.standard_normal(block.shape) for block in problem.columns)
    scale, bias = draw.standard_normal(2)
    bias = bias if problem.bias is not None else 0.0

    def along(step: float) -> float:
        moved = replace(
            problem,
            rows=problem.rows + step * rows,
            columns=tuple(block + step * h for block, h in zip(problem.columns, columns, strict=True)),
            scale=problem.scale + step * scale,
            bias=None if problem.bias is None else problem.bias + step * bias,
        )
        return upstream * float(truth(moved).outcome.loss)

    found = exact.outcome
    slope = (found.rows * rows).sum() + found.scale * scale + (0.0 if found.bias is None else found.bias * bias)
    slope += sum((g * h).sum() for g, h in zip(found.columns, columns, strict=True))
    step = 2.0**-12
    coarse, fine = ((along(e) - along(-e)) / (2 * e) for e in (step, step / 2))
    # Richardson: the coarse and the fine difference tell the truncation; rounding of two losses is divided by 2e
    noise = 2 * upstream * float(bounds(problem, exact, ORACLE, "float64").loss) / step
    assert abs(fine - slope) <= abs(coarse - fine) + noise


def test_an_excluded_pair_is_neither_positive_nor_admitted() -> None:
    """Whether an index or a label would have made it the positive."""
    one = np.ones((1, 1))
    zero = np.zeros(1, dtype=np.int64)
    bare = Problem(one, (one,), np.float64(1.0), np.ones(1), np.ones(1), excluded=zero)
    pointed = replace(bare, positives=zero)
    matched = replace(bare, row_ids=zero, column_ids=zero, match="target")
    for problem in (pointed, matched):
        assert [bool(mask.any()) for mask in masks(problem)] == [False, False]


def test_what_a_kind_of_loss_has() -> None:
    one_way, two_way, sigmoid = (truth(build(name, "float32")).outcome for name in ("labels", "hot", "sigmoid"))
    assert (one_way.statistics.shape, two_way.statistics.shape, sigmoid.statistics) == ((3, 29), (3, 82), None)
    assert [one_way.bias, two_way.bias] == [None] * 2
