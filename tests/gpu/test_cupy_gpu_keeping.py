"""Kept exponentials on a GPU of compute capability 9.0: the oracle's gradients, of all rows kept and of some."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from capturing import bits, captured, comes_down_to, unit_features

import contrastile
from contrastile.backends.contract import Options
from contrastile.backends.registry import load
from contrastile.schedules import local, schedule
from contrastile.schedules.problem import Problem
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import GRADIENT, compare, identical
from contrastile.verify.execution import materialise, outcome
from contrastile.verify.rounding import round_to
from contrastile.verify.truth import Outcome, truth

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

M, N, D = 773, 901, 200
STRIDE, PLAN_BYTES = 904, 56
WHOLLY, PARTLY, NOTHING = 16, 1, 0
"""MiB that may be kept."""

ROWS = {WHOLLY: M, PARTLY: 512}
KINDS = ("diagonal", "signed", "repeated", "none", "trained", "hot", "silent rows", "silent columns", "huge weights")


def unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def problem(kind: str) -> Problem:
    """Features exact in bfloat16, all else in float32."""
    random = np.random.default_rng(KINDS.index(kind))
    rows, columns = (unit(random.standard_normal((size, D))) for size in (M, N))
    row_weight, column_weight = np.full(M, 0.5 / M), np.full(N, 0.5 / N)
    positives, scale = np.arange(M), 14.3
    if kind == "signed":
        positives = np.where(random.random(M) < 0.8, random.integers(0, N, M), -1)
        row_weight, column_weight = (random.standard_normal(size) for size in (M, N))
        row_weight[::5], column_weight[::4] = 0.0, 0.0
    if kind == "repeated":
        positives = random.integers(0, 7, M) * 128
    if kind == "none":
        positives = np.full(M, N)
    if kind == "trained":
        rows, scale = unit(columns[:M] + 0.05 * rows), 100.0
    if kind == "hot":
        # sums against one reference for all would underflow: the forward pass leaves the fast path
        scale = 400.0
    if kind == "silent rows":
        row_weight[:] = 0.0
    if kind == "silent columns":
        column_weight[:] = 0.0
    if kind == "huge weights":
        row_weight[3], column_weight[5] = 2.0**60, 2.0**-60
    count = np.bincount(positives[(positives >= 0) & (positives < N)], minlength=N)
    return Problem(
        round_to(rows, "bfloat16"),
        (round_to(columns, "bfloat16"),),
        round_to(scale, "float32"),
        round_to(row_weight, "float32"),
        ((positives >= 0) & (positives < N)).astype(np.float64),
        column_weight=round_to(column_weight, "float32"),
        column_target=round_to(1.0 / np.maximum(count, 1) * (count > 0), "float32"),
        positives=positives,
    )


def ratio(got: Outcome, given: Problem, keep: int, upstream: float = 1.0) -> float:
    oracle = truth(given, upstream)
    bound = bounds(given, oracle, load("cupy").accuracy("bfloat16", "cuda", Options(keep=keep)), "bfloat16", upstream)
    return compare(got, oracle.outcome, bound).ratio


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [WHOLLY, PARTLY])
def test_value_and_gradients_are_the_oracle_s(keep: int, kind: str) -> None:
    backend, given, options = load("cupy"), problem(kind), Options(keep=keep)
    ((_, block),) = materialise(given, backend, "bfloat16", "cuda").blocks()
    assert backend.keeping is not None
    kept = backend.keeping(block, True, options).kept
    assert kept is not None
    assert kept.size == 2 * STRIDE * ROWS[keep] + PLAN_BYTES
    got = outcome(given, backend, "bfloat16", "cuda", options)
    assert ratio(got, given, keep) < 1
    assert identical(outcome(given, backend, "bfloat16", "cuda", options), got).ratio == 0


@pytest.mark.parametrize("kind", ["diagonal", "signed", "hot"])
@pytest.mark.parametrize("keep", [WHOLLY, PARTLY])
def test_one_forward_pass_serves_any_upstream_gradients_in_any_order(keep: int, kind: str) -> None:
    backend, given, options = load("cupy"), problem(kind), Options(keep=keep)
    native, arrays = materialise(given, backend, "bfloat16", "cuda"), backend.arrays
    wanted = local.Wanted(True, (True,))
    _, state = schedule.loss(native, backend, options, wanted)
    assert local.Forward.of(state).kept[0] is not None
    # NaN has no factors: G takes the place of what was kept, and nobody may take it for that afterwards
    for upstream in (1.0, 1.0, 0.0, -2.5, float("nan"), 1.0, 4.0):
        factor = arrays.asarray(upstream, "float32", native.scale)
        found = schedule.gradients(native, state, factor, wanted, backend, options)
        if np.isnan(upstream):
            continue
        values = [np.array(arrays.to_numpy(x), np.float64) for x in (found.rows, found.columns[0], found.scale)]
        oracle = truth(given, upstream)
        got = replace(oracle.outcome, rows=values[0], columns=(values[1],), scale=values[2])
        bound = bounds(given, oracle, backend.accuracy("bfloat16", "cuda", options), "bfloat16", upstream)
        assert compare(got, oracle.outcome, bound, GRADIENT).ratio < 1, upstream


def towers(seed: int = 0) -> list[Any]:
    found = [x.requires_grad_() for x in unit_features(2, M, D, seed=seed)]
    return [*found, torch.tensor(14.3, device="cuda", requires_grad=True)]


@pytest.mark.parametrize("keep", [WHOLLY, PARTLY])
def test_twice_through_one_graph_and_without_autograd_it_is_the_same(keep: int) -> None:
    leaves = towers()
    value = contrastile.clip_loss(*leaves, backend="cupy", keep=keep)
    first = bits(torch.autograd.grad(value, leaves, retain_graph=True))
    assert bits(torch.autograd.grad(value, leaves)) == first
    by_hand = contrastile.value_and_grad(contrastile.clip_loss, backend="cupy", keep=keep)(
        *(x.detach() for x in leaves)
    )
    assert bits(by_hand[1]) == first
    assert bits([by_hand[0]]) == bits([value])
    without = contrastile.clip_loss(*leaves, backend="cupy", keep=NOTHING)
    # what is kept changes no value
    assert bits([without]) == bits([value])


def test_what_was_kept_is_torch_s_memory_and_goes_with_the_graph() -> None:
    leaves = towers()

    def call(keep: int) -> Any:
        return contrastile.clip_loss(*leaves, backend="cupy", keep=keep)

    for keep in (WHOLLY, NOTHING):
        torch.autograd.grad(call(keep), leaves)
    gc.collect()  # what other tests left must not be freed while this one counts
    pool = cupy.get_default_memory_pool().total_bytes()
    taken = {}
    for keep in (WHOLLY, NOTHING):
        before = torch.cuda.memory_allocated()
        value = call(keep)
        taken[keep] = torch.cuda.memory_allocated() - before
        torch.autograd.grad(value, leaves)
        del value
        assert comes_down_to(before)
    assert taken[WHOLLY] - taken[NOTHING] >= 2 * 776 * M
    assert cupy.get_default_memory_pool().total_bytes() == pool
    with torch.no_grad():
        before = torch.cuda.memory_allocated()
        value = call(WHOLLY)
        assert torch.cuda.memory_allocated() - before < 2 * 776 * M
        del value


@pytest.mark.parametrize("keep", [WHOLLY, PARTLY])
def test_a_step_that_keeps_can_be_captured_and_replayed(keep: int) -> None:
    leaves = towers()

    def call() -> list[Any]:
        value = contrastile.clip_loss(*leaves, backend="cupy", keep=keep)
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    graph, found = captured(call)
    with torch.no_grad():
        for leaf, other in zip(leaves, towers(seed=1), strict=True):
            leaf.copy_(other)
    graph.replay()
    assert bits(found) == bits(call())
