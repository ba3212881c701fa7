"""The triton backend under Triton's interpreter: the same kernels on the CPU, with tiles small enough to be many."""

# ruff: noqa: E402
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from contrastile.backends.contract import (
    Block,
    Options,
    Pairs,
    SideWeights,
    UnsupportedProblemError,
    Weights,
)
from contrastile.backends.numpy import backend as numpy_backend
from contrastile.backends.triton import backend, backward_pass
from contrastile.backends.triton import tiles as words
from contrastile.backends.triton.forward_pass import _ForwardPass as Forward
from contrastile.schedules.problem import Problem
from contrastile.verify import cases
from contrastile.verify.comparison import compare
from contrastile.verify.rounding import round_to
from contrastile.verify.trial import Subject, Trial
from contrastile.verify.truth import truth

# the interpreter's NumPy warns where a kernel means its infinities
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def block(m: int = 37, n: int = 45, d: int = 24, scale: float = 5.0, dtype: Any = torch.float32) -> Block:
    random = np.random.default_rng(m * n + d)
    rows, columns = (torch.tensor(random.standard_normal((size, d))).to(dtype) for size in (m, n))
    return Block(rows, columns, torch.tensor(scale), None, Pairs(positives=torch.arange(m)))


def status(given: Block) -> int:
    """The path the device chose: 0 fast, 1 safe."""
    run = Forward(given, True, Options())
    run.run()
    return int(run.status[0])


def test_the_fast_path_is_taken_where_the_norms_prove_it_safe_and_only_there() -> None:
    given = block()
    unit = [torch.nn.functional.normalize(x) for x in (given.rows, given.columns)]
    half = replace(given, rows=unit[0].half(), columns=unit[1].half())
    assert status(half) == status(replace(half, scale=torch.tensor(100.0))) == 0
    # tiles of float32 features have references of their own
    assert status(replace(given, rows=unit[0], columns=unit[1])) == 1
    assert status(replace(half, scale=torch.tensor(1e6))) == 1
    half.rows[3, 2] = float("nan")
    assert status(half) == 1


@pytest.mark.parametrize(("scale", "fast"), [(20.0, 1), (100.0, 1), (300.0, 1), (1000.0, 0)])
def test_the_fast_backward_is_taken_where_all_rows_are_certain(scale: float, fast: int) -> None:
    image = torch.eye(40, 48).half()
    given = Block(image, image, torch.tensor(scale), None, Pairs(positives=torch.arange(40)))
    found = backward_pass._BackwardPass(given, weights_of(given), Options())
    assert float(found.plan[words.FAST.value]) == fast


def test_refusals_give_their_reason() -> None:
    assert "bfloat16" not in backend.dtypes
    with pytest.raises(UnsupportedProblemError, match="float64"):
        backend.check(block(dtype=torch.float64))
    with pytest.raises(UnsupportedProblemError, match="at least one column"):
        backend.check(replace(block(), rows=torch.ones(3, 0), columns=torch.ones(4, 0)))


def weights_of(given: Block) -> Weights:
    """Halved means, from the block's own log-sum-exps."""
    found = backend.lse(given, True, Options())
    sides = zip((found.rows, found.columns), map(len, (given.rows, given.columns)), strict=True)
    return Weights(*(SideWeights(*side[:2], torch.full((k,), 0.5 / k), torch.ones(k)) for side, k in sides))


def test_a_backend_that_lacks_a_precision_refuses_it() -> None:
    block = Block(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32), np.ones(()))
    with pytest.raises(UnsupportedProblemError, match="precision must be ieee here, got tf32"):
        numpy_backend.check(block, Options(precision="tf32"))
    half = Block(np.ones((2, 3), np.float16), np.ones((2, 3), np.float16), np.ones(()))
    numpy_backend.check(half, Options(precision="tf32"))


M, N = 37, 141


def problem(dtype: str, size: float = 1.0, **changes: Any) -> Problem:
    """SigLIP of 37 rows and 141 columns, of whose 3 x 5 tiles two hold a positive."""
    draw = np.random.default_rng(M * N)
    rows, columns = (round_to(size * draw.standard_normal((x, 24)) / 24**0.5, dtype) for x in (M, N))
    plain = cases.build("sigmoid", dtype)
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
    held = Trial(Subject("triton", backend, dtype), "sigmoid", given, lambda: truth(given))
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
