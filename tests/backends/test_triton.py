"""The triton backend under Triton's interpreter: the same kernels on the CPU, with tiles small enough to be many."""

# ruff: noqa: E402
from __future__ import annotations

from dataclasses import replace
from itertools import product
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
from contrastile.backends.triton import backend, backward_pass
from contrastile.backends.triton import tiles as words
from contrastile.backends.triton.forward_pass import _ForwardPass as Forward
from contrastile.verify.comparison import compare
from contrastile.verify.draws import sigmoid_problem, softmax_problem
from contrastile.verify.rounding import round_to
from contrastile.verify.trial import Subject, Trial

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


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0])
def test_sums_of_a_tile_neither_overflow_nor_lose_what_is_small(size: float) -> None:
    """Without features and bias every pair costs log 2, and a product of as many twos must not become infinite."""
    draw = np.random.default_rng(37 * 141)
    rows, columns = (round_to(size * draw.standard_normal((x, 24)) / 24**0.5, "float32") for x in (37, 141))
    given = softmax_problem(rows, columns, 7.0, positives=np.arange(37))
    # beside a positive nothing of what is small would show
    for bias, positives in product((0.0, -40.0, 40.0), (np.arange(37), np.full(37, -1))):
        stated = sigmoid_problem(replace(given, positives=positives), bias)
        held = Trial(Subject("triton", backend, "float32"), "sigmoid", stated)
        worst = compare(held.outcome, held.oracle.outcome, held.bound)
        assert worst.ratio <= 1, str(worst)
