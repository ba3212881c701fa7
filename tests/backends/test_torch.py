"""The torch backend where ``contrastile verify`` does not take it: its other methods, and when it takes which."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import contrastile
import contrastile.backends.torch
from contrastile import plan
from contrastile.backends.contract import Block, Options, Pairs, SideWeights, Weights
from contrastile.backends.torch import backend, gradients, products, statistics
from contrastile.schedules import triangle
from contrastile.schedules.problem import Problem
from contrastile.verify.bounds import bounds
from contrastile.verify.cases import build
from contrastile.verify.comparison import Worst, compare
from contrastile.verify.draws import signs, softmax_problem
from contrastile.verify.execution import outcome
from contrastile.verify.plain import compare_with_plain
from contrastile.verify.trial import Subject
from contrastile.verify.truth import Truth, truth
from contrastile.verify.wrapped import around

pytestmark = pytest.mark.usefixtures("one_thread")
RAGGED = Options(tile=(7, 13))


def worst(problem: Problem, exact: Truth, dtype: str, options: Options = Options(), facts_of: str = "cpu") -> Worst:  # noqa: B008
    facts = backend.accuracy(dtype, facts_of)
    bound = bounds(problem, exact, facts, dtype, options=options)
    return compare(outcome(problem, backend, dtype, options=options), exact.outcome, bound)


def block_of(seed: int, m: int, n: int, d: int, scale: float = 10.0, **pairs: Any) -> Block:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.nn.functional.normalize(torch.randn(k, d, generator=generator), dim=1) for k in (m, n))
    return Block(rows, columns, torch.tensor(scale), None, Pairs(**pairs))


def pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a device: nothing is read on the host, and 16-bit products have a float32 result."""
    plain_mm = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, **how: Any) -> torch.Tensor:
        if out_dtype is None:
            return plain_mm(a, b, **how)
        assert a.dtype == b.dtype in (torch.float16, torch.bfloat16)
        return plain_mm(a.to(out_dtype), b.to(out_dtype), **how)

    monkeypatch.setattr(products, "on_host", lambda _: False)
    for module in (products, contrastile.backends.torch):
        monkeypatch.setattr(module, "has_mixed_product", lambda: True)
    monkeypatch.setattr(torch, "mm", mm)


DTYPES = ("float16", "bfloat16", "float32", "float64")
CASES = (
    *("ragged", "hot", "all-negative", "opposite", "staircase@up", "ids-drop", "labels", "self-excluded", "blocks"),
    *("signed-zero-weights", "sigmoid-ids", "certain", "large-logits", "nan", "inf"),
)


@cache
def known(name: str, dtype: str) -> tuple[Problem, Truth]:
    case = build(name, dtype)
    return case, truth(case)


@pytest.mark.parametrize(
    ("way", "dtype"), [*(("own references", x) for x in DTYPES[2:]), *(("as on a device", x) for x in DTYPES)]
)
@pytest.mark.parametrize("name", CASES)
def test_cases_are_within_their_bounds_by_the_other_methods(
    name: str, way: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, exact = known(name, dtype)
    if way == "as on a device":
        pretend_device(monkeypatch)
    else:
        for module, function in ((statistics, "_shared_sums"), (gradients, "_find_reference")):
            monkeypatch.setattr(module, function, lambda *_: None)
    found = worst(case, exact, dtype, RAGGED, facts_of="cuda" if way == "as on a device" else "cpu")
    assert found.ratio < 1, str(found)


@pytest.mark.parametrize("named", [True, False], ids=["by index", "by ids"])
def test_no_probability_exceeds_1_where_logits_are_rounded_in_another_way(named: bool) -> None:
    # a ring computes its own block whole forward and in two halves backward: a logit of 1e8 may then exceed its L
    m = 24
    ids = None if named else torch.arange(m)
    pairs = Pairs(torch.arange(m)) if named else Pairs(row_ids=ids, column_ids=ids, match="target")
    generator = torch.Generator().manual_seed(2)
    rows, columns = (3e3 * torch.nn.functional.normalize(torch.randn(m, 64, generator=generator)) for _ in range(2))
    block = Block(rows, columns, torch.tensor(100.0), None, pairs)
    found = backend.lse(block, True, Options())
    one, zero = torch.ones(m), torch.zeros(m)
    # the most that rounding may make of a logit's error
    assert found.columns is not None
    sides = [SideWeights(n - 100.0, p, one, zero) for n, p, _ in (found.rows, found.columns)]
    gradient = torch.zeros(m, 64)
    backend.gradients(block, Weights(*sides), gradient, None, Options())
    # each of the m pairs has at most the weights of its row and its column
    assert gradient.norm(dim=1).max() <= 2 * m * 3e3


def test_sums_far_below_their_reference_cost_no_digits_that_a_plain_computation_keeps() -> None:
    draw = np.random.default_rng(372590230)
    rows, columns = signs(draw, 3, 25, 128)
    # what else was drawn when this problem was found
    draw.integers(0, 8, 28), draw.random(3), draw.integers(0, 25, 3), draw.integers(0, 26)
    weights = [draw.standard_normal(size) * (draw.random(size) < 0.75) for size in (3, 25)]
    blocks = columns[:21], columns[21:]
    problem = softmax_problem(rows, blocks, 8.731809616088867, row_weight=weights[0], column_weight=weights[1])
    problem, subject = replace(problem, bias=np.asarray(2.5)), Subject("torch", backend, "float32")
    found = compare_with_plain(problem, truth(problem), subject.run(problem), subject.accuracy, "float32")
    assert found.ratio < 1, str(found)


def test_accuracy_follows_the_precision_of_products() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision, cpu, cuda in (
            ("highest", 0.0, 0.0),
            ("high", 2.0**-10, 2.0**-10),
            ("medium", 2.0**-8, 2.0**-10),
        ):
            torch.set_float32_matmul_precision(precision)
            assert backend.accuracy("float32", "cpu").input_rounding == cpu
            assert backend.accuracy("float32", "cuda").input_rounding == cuda
            assert backend.accuracy("float64", "cuda").input_rounding == 0.0
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="of torch 2.9 and later")
def test_accuracy_follows_the_newer_way_to_set_it() -> None:
    code = """
        import torch
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        from contrastile.backends.torch import backend
        from contrastile.verify.facts import limits
        from contrastile.verify.process import modes
        facts = [backend.accuracy("float32", place).input_rounding for place in ("cpu", "cuda")]
        print(*facts, limits("float32", "float32", "ieee")["input_rounding"], *modes()["torch's float32 precision"])
    """
    # what was set in the one way cannot be asked for in the other any more
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert [float(x) for x in done.stdout.split()] == [2.0**-8, 2.0**-10, 2.0**-8, 2.0**-8, 2.0**-10]


def test_a_scale_near_the_largest_leaves_finite_gradients() -> None:
    draw = torch.Generator().manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(16, 8, generator=draw), dim=1) for _ in range(2))
    found = []
    for dtype in (torch.float32, torch.float64):
        leaf = image.to(dtype, copy=True).requires_grad_()
        contrastile.clip_loss(leaf, text.to(dtype), 1e30, backend="torch").backward()
        found.append(leaf.grad.double())
    # every probability is 0 or 1 here: what is left is the rounding of the features' sums
    assert (found[0] - found[1]).abs().max() <= 64 * 2.0**-24 * found[1].abs().max()


LABELS = torch.arange(37) // 3
KEEPING: dict[str, tuple[Callable[..., Tensor], int]] = {
    "clip_loss": (contrastile.clip_loss, 1),
    "nt_xent": (contrastile.nt_xent, 7),
    "sup_con": (lambda x, y, scale, **how: contrastile.sup_con(x, LABELS, scale, **how), 3),
}


def pair(scale: float = 3.0) -> list[Tensor]:
    block = block_of(0, 37, 37, 24)
    return [block.rows.requires_grad_(), block.columns.requires_grad_(), torch.tensor(scale, requires_grad=True)]


@pytest.mark.parametrize("name", KEEPING)
def test_every_block_is_kept_and_gives_the_bits_of_one_that_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def counted(gradients: Any, block: Block, weights: Weights, *rest: Any) -> None:
        kept.append(weights.kept is not None)
        gradients(block, weights, *rest)

    watched = around(backend, counted, "gradients")
    monkeypatch.setattr(plan, "load", lambda name: watched)
    monkeypatch.setattr("contrastile.backends.torch.tiles.CPU_TILE", (16, 32))
    monkeypatch.setattr(triangle, "CPU_ROWS", 23)
    (loss, blocks), given = KEEPING[name], pair()
    # logits so small have 0 for their reference in either pass
    values = [loss(*given, **how) for how in ({}, {"keep": 0})]
    found = [torch.autograd.grad(x, given, allow_unused=True) for x in values]
    assert torch.equal(*values)
    assert all(x is y or torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert kept == [True] * blocks + [False] * blocks


@pytest.mark.parametrize("frozen", ["", "image", "text", "scale", "no_grad", "inference"])
def test_only_a_loss_whose_towers_both_learn_keeps_and_hooks_on_what_is_saved_meet_it(
    frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, saved = [], list[int]()
    watched = around(backend, lambda keeping, *given: asked.append("keeping") or keeping(*given), "keeping")
    # of a backend that finishes both gradients at once
    monkeypatch.setattr(plan, "load", lambda name: replace(watched, finished=lambda *given: None))
    leaves = dict(zip(("image", "text", "scale"), pair(), strict=True))
    if frozen in leaves:
        leaves[frozen].requires_grad_(False)
    mode: Any = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(frozen, torch.enable_grad)
    with mode(), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x.clone(), lambda x: x):
        contrastile.clip_loss(*leaves.values())
    keeps = frozen in ("", "scale")
    assert asked == ["keeping"] * keeps
    # all logits
    assert (max(saved, default=0) >= 4 * 37 * 37) == keeps


def test_what_is_kept_is_freed_by_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[StorageWeakRef] = []

    def noted(keeping: Any, *given: Any) -> Any:
        found = keeping(*given)
        left.append(StorageWeakRef(found.kept.untyped_storage()))
        return found

    monkeypatch.setattr(plan, "load", lambda name: around(backend, noted, "keeping"))
    value = contrastile.clip_loss(*(leaves := pair()))
    assert [each.expired() for each in left] == [False]
    torch.autograd.grad(value, leaves)
    # the loss is still there
    assert left[0].expired()
