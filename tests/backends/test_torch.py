"""The paths of the torch backend that ``contrastile verify`` does not take on a CPU, and what the backend keeps."""

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


def make_block(seed: int, m: int, n: int, d: int, scale: float = 10.0, **pairs: Any) -> Block:
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.nn.functional.normalize(torch.randn(size, d, generator=generator), dim=1) for size in (m, n))
    return Block(rows, columns, torch.tensor(scale), None, Pairs(**pairs))


def pretend_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a GPU: the host reads no value, and products of 16-bit matrices are float32."""
    plain_mm = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: Any = None, **options: Any) -> torch.Tensor:
        if out_dtype is None:
            return plain_mm(a, b, **options)
        assert a.dtype == b.dtype in (torch.float16, torch.bfloat16)
        return plain_mm(a.to(out_dtype), b.to(out_dtype), **options)

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
def case_and_truth(name: str, dtype: str) -> tuple[Problem, Truth]:
    case = build(name, dtype)
    return case, truth(case)


@pytest.mark.parametrize(
    ("path", "dtype"), [*(("own references", x) for x in DTYPES[2:]), *(("as on a device", x) for x in DTYPES)]
)
@pytest.mark.parametrize("name", CASES)
def test_cases_are_within_their_bounds_on_the_other_paths(
    name: str, path: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, exact = case_and_truth(name, dtype)
    if path == "as on a device":
        pretend_device(monkeypatch)
    else:
        for module, function in ((statistics, "_shared_sums"), (gradients, "_find_reference")):
            monkeypatch.setattr(module, function, lambda *_: None)
    error = worst(case, exact, dtype, RAGGED, facts_of="cuda" if path == "as on a device" else "cpu")
    assert error.ratio < 1, str(error)


@pytest.mark.parametrize("by_index", [True, False], ids=["by index", "by ids"])
def test_no_probability_exceeds_1_where_the_backward_pass_rounds_logits_differently(by_index: bool) -> None:
    # a ring computes its own block at once forward and in two halves backward: a logit of 1e8 may then exceed its L
    m = 24
    ids = None if by_index else torch.arange(m)
    pairs = Pairs(torch.arange(m)) if by_index else Pairs(row_ids=ids, column_ids=ids, match="target")
    generator = torch.Generator().manual_seed(2)
    rows, columns = (3e3 * torch.nn.functional.normalize(torch.randn(m, 64, generator=generator)) for _ in range(2))
    block = Block(rows, columns, torch.tensor(100.0), None, pairs)
    statistics = backend.lse(block, True, Options())
    ones, zeros = torch.ones(m), torch.zeros(m)
    # 100 is the largest error of a logit by rounding
    assert statistics.columns is not None
    sides = [SideWeights(n - 100.0, p, ones, zeros) for n, p, _ in (statistics.rows, statistics.columns)]
    gradient = torch.zeros(m, 64)
    backend.gradients(block, Weights(*sides), gradient, None, Options())
    # each of the m pairs has at most the weights of its row and its column
    assert gradient.norm(dim=1).max() <= 2 * m * 3e3


def test_sums_far_below_their_reference_cost_no_digits_that_a_plain_computation_keeps() -> None:
    rng = np.random.default_rng(372590230)
    rows, columns = signs(rng, 3, 25, 128)
    # these draws keep the state of the generator that found this problem
    rng.integers(0, 8, 28), rng.random(3), rng.integers(0, 25, 3), rng.integers(0, 26)
    weights = [rng.standard_normal(size) * (rng.random(size) < 0.75) for size in (3, 25)]
    blocks = columns[:21], columns[21:]
    problem = softmax_problem(rows, blocks, 8.731809616088867, row_weight=weights[0], column_weight=weights[1])
    problem, subject = replace(problem, bias=np.asarray(2.5)), Subject("torch", backend, "float32")
    comparison = compare_with_plain(problem, truth(problem), subject.run(problem), subject.accuracy, "float32")
    assert comparison.ratio < 1, str(comparison)


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
def test_accuracy_follows_the_newer_settings_of_precision() -> None:
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
    # a process that used the newer settings cannot read the older ones any more
    completed = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert [float(x) for x in completed.stdout.split()] == [2.0**-8, 2.0**-10, 2.0**-8, 2.0**-8, 2.0**-10]


def test_a_scale_near_the_largest_leaves_finite_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(16, 8, generator=generator), dim=1) for _ in range(2))
    leaf_gradients = []
    for dtype in (torch.float32, torch.float64):
        leaf = image.to(dtype, copy=True).requires_grad_()
        contrastile.clip_loss(leaf, text.to(dtype), 1e30, backend="torch").backward()
        leaf_gradients.append(leaf.grad.double())
    # every probability is 0 or 1 here, so that only the sums of features are rounded
    assert (leaf_gradients[0] - leaf_gradients[1]).abs().max() <= 64 * 2.0**-24 * leaf_gradients[1].abs().max()


LABELS = torch.arange(37) // 3
KEEPING: dict[str, tuple[Callable[..., Tensor], int]] = {
    "clip_loss": (contrastile.clip_loss, 1),
    "nt_xent": (contrastile.nt_xent, 7),
    "sup_con": (lambda x, y, scale, **how: contrastile.sup_con(x, LABELS, scale, **how), 3),
}


def pair(scale: float = 3.0) -> list[Tensor]:
    block = make_block(0, 37, 37, 24)
    return [block.rows.requires_grad_(), block.columns.requires_grad_(), torch.tensor(scale, requires_grad=True)]


@pytest.mark.parametrize("name", KEEPING)
def test_kept_blocks_give_the_bits_of_blocks_that_are_not_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_kept = []

    def counting(gradients: Any, block: Block, weights: Weights, *rest: Any) -> None:
        is_kept.append(weights.kept is not None)
        gradients(block, weights, *rest)

    counting_backend = around(backend, counting, "gradients")
    monkeypatch.setattr(plan, "load", lambda name: counting_backend)
    monkeypatch.setattr("contrastile.backends.torch.tiles.CPU_TILE", (16, 32))
    monkeypatch.setattr(triangle, "CPU_ROWS", 23)
    (loss, blocks), leaves = KEEPING[name], pair()
    # for logits this small the reference is 0 in both passes
    values = [loss(*leaves, **options) for options in ({}, {"keep": 0})]
    all_gradients = [torch.autograd.grad(x, leaves, allow_unused=True) for x in values]
    assert torch.equal(*values)
    assert all(x is y or torch.equal(x, y) for x, y in zip(*all_gradients, strict=True))
    assert is_kept == [True] * blocks + [False] * blocks


@pytest.mark.parametrize("frozen", ["", "image", "text", "scale", "no_grad", "inference"])
def test_only_a_loss_whose_towers_both_learn_keeps_logits_and_saved_tensors_hooks_receive_them(
    frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, saved = [], list[int]()
    recording = around(backend, lambda keeping, *args: calls.append("keeping") or keeping(*args), "keeping")
    # the backend seems to finish both gradients in one call
    monkeypatch.setattr(plan, "load", lambda name: replace(recording, finished=lambda *arguments: None))
    leaves = dict(zip(("image", "text", "scale"), pair(), strict=True))
    if frozen in leaves:
        leaves[frozen].requires_grad_(False)
    mode: Any = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(frozen, torch.enable_grad)
    with mode(), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x.clone(), lambda x: x):
        contrastile.clip_loss(*leaves.values())
    keeps_logits = frozen in ("", "scale")
    assert calls == ["keeping"] * keeps_logits
    # the kept logits are one float32 matrix
    assert (max(saved, default=0) >= 4 * 37 * 37) == keeps_logits


def test_the_backward_pass_frees_the_kept_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    storages: list[StorageWeakRef] = []

    def recording(keeping: Any, *arguments: Any) -> Any:
        result = keeping(*arguments)
        storages.append(StorageWeakRef(result.kept.untyped_storage()))
        return result

    monkeypatch.setattr(plan, "load", lambda name: around(backend, recording, "keeping"))
    value = contrastile.clip_loss(*(leaves := pair()))
    assert [storage.expired() for storage in storages] == [False]
    torch.autograd.grad(value, leaves)
    # the loss itself is still alive
    assert storages[0].expired()
