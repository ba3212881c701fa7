"""The triton backend's kernels on the CPU, under Triton's interpreter."""

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
from contrastile.backends.triton import tiles as triton_tiles
from contrastile.backends.triton.forward_pass import _ForwardPass as Forward
from contrastile.verify.comparison import compare
from contrastile.verify.draws import sigmoid_problem, softmax_problem
from contrastile.verify.rounding import round_to
from contrastile.verify.trial import Subject, Trial

# the interpreter's NumPy warns where a kernel computes infinities on purpose
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def block(m: int = 37, n: int = 45, d: int = 24, scale: float = 5.0, dtype: Any = torch.float32) -> Block:
    random = np.random.default_rng(m * n + d)
    rows, columns = (torch.tensor(random.standard_normal((size, d))).to(dtype) for size in (m, n))
    return Block(rows, columns, torch.tensor(scale), None, Pairs(positives=torch.arange(m)))


def status(block: Block) -> int:
    """The path that the device chose: 0 fast, 1 safe."""
    forward = Forward(block, True, Options())
    forward.run()
    return int(forward.status[0])


def test_the_fast_path_is_taken_only_where_the_norms_prove_it_safe() -> None:
    plain = block()
    unit_features = [torch.nn.functional.normalize(x) for x in (plain.rows, plain.columns)]
    half = replace(plain, rows=unit_features[0].half(), columns=unit_features[1].half())
    assert status(half) == status(replace(half, scale=torch.tensor(100.0))) == 0
    # tiles of float32 features have their own references, so they take the safe path
    assert status(replace(plain, rows=unit_features[0], columns=unit_features[1])) == 1
    assert status(replace(half, scale=torch.tensor(1e6))) == 1
    half.rows[3, 2] = float("nan")
    assert status(half) == 1


@pytest.mark.parametrize(("scale", "fast"), [(20.0, 1), (100.0, 1), (300.0, 1), (1000.0, 0)])
def test_the_fast_backward_is_taken_where_all_rows_are_certain(scale: float, fast: int) -> None:
    image = torch.eye(40, 48).half()
    tile_block = Block(image, image, torch.tensor(scale), None, Pairs(positives=torch.arange(40)))
    backward = backward_pass._BackwardPass(tile_block, weights_of(tile_block), Options())
    assert float(backward.plan[triton_tiles.FAST.value]) == fast


def test_a_refused_block_raises_the_reason() -> None:
    assert "bfloat16" not in backend.dtypes
    with pytest.raises(UnsupportedProblemError, match="float64"):
        backend.check(block(dtype=torch.float64))
    with pytest.raises(UnsupportedProblemError, match="at least one column"):
        backend.check(replace(block(), rows=torch.ones(3, 0), columns=torch.ones(4, 0)))


def weights_of(block: Block) -> Weights:
    """Weights of the mean over rows and columns, halved, with the log-sum-exps of the block."""
    statistics = backend.lse(block, True, Options())
    sides = zip((statistics.rows, statistics.columns), map(len, (block.rows, block.columns)), strict=True)
    return Weights(*(SideWeights(*side[:2], torch.full((k,), 0.5 / k), torch.ones(k)) for side, k in sides))


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0])
def test_sums_of_a_tile_neither_overflow_nor_lose_small_terms(size: float) -> None:
    """Without features and bias every pair costs log 2, and a product of as many twos must not become infinite."""
    rng = np.random.default_rng(37 * 141)
    rows, columns = (round_to(size * rng.standard_normal((count, 24)) / 24**0.5, "float32") for count in (37, 141))
    problem = softmax_problem(rows, columns, 7.0, positives=np.arange(37))
    # a positive would hide the small terms, so half of the problems have none
    for bias, positives in product((0.0, -40.0, 40.0), (np.arange(37), np.full(37, -1))):
        sigmoid_case = sigmoid_problem(replace(problem, positives=positives), bias)
        trial = Trial(Subject("triton", backend, "float32"), "sigmoid", sigmoid_case)
        worst = compare(trial.outcome, trial.oracle.outcome, trial.bound)
        assert worst.ratio <= 1, str(worst)
