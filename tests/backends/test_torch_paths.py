"""The torch backend's two methods for the same numbers, when it takes which, and what it promises."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch_blocks import block_of, pretend_device, symmetric, worst

import contrastile
from contrastile.backends.contract import Block
from contrastile.backends.torch import backend, gradients, products, statistics
from contrastile.verify.plain import compare_with_plain
from contrastile.verify.strategies import CASE, Recipe
from contrastile.verify.strategies import problem as drawn_problem
from contrastile.verify.trial import Subject
from contrastile.verify.truth import truth


def attempts_recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[bool]]:
    """Whether each shared attempt was good, per primitive."""
    taken: dict[str, list[bool]] = {"statistics": [], "gradients": []}
    for module in (statistics, gradients):
        attempt, name = module._shared, module.__name__.rpartition(".")[2]

        def recorded(*given: Any, attempt: Any = attempt, name: str = name) -> Any:
            found = attempt(*given)
            taken[name].append(found is not None)
            return found

        monkeypatch.setattr(module, "_shared", recorded)
    return taken


def far_apart(low: float, high: float) -> Block:
    """A block whose rows' log-sum-exps lie near ``low`` and ``high``, in nats."""
    block = block_of(2, 21, 29, 8, 1.0)
    rows, columns = block.rows / 4, block.columns / 4
    columns[:, 0] = 1.0
    rows[:, 0] = low
    rows[1::3, 0] = high
    return replace(block, rows=rows, columns=columns)


ORDINARY = (1.0, 14.3, 100.0, -100.0)
APART = ((-100.0, 60.0), (-60.0, 100.0), (0.0, 200.0), (-500.0, -300.0))


@pytest.mark.parametrize(
    ("block", "shared"),
    [*((block_of(1, 33, 47, 64, scale), True) for scale in ORDINARY), *((far_apart(*x), False) for x in APART)],
    ids=[*map(str, ORDINARY), *map(str, APART)],
)
def test_one_exponential_serves_both_sides_unless_sums_lie_too_far_apart(
    block: Block, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, exact = symmetric(block)
    taken = attempts_recorded(monkeypatch)
    found = worst(problem, exact, "float32")
    assert found.ratio < 1, str(found)
    # and what was kept serves
    assert taken == {"statistics": [shared], "gradients": [shared]}


@pytest.mark.parametrize(
    "recipe",
    [
        # some rows have logits near 10 and others one near 128; some columns have none above -60
        "m=32,n=32,d=136,kind=softmax,features=trained,scale=100.0,bias=-10.0,weights=signed,two_sided=False,"
        "pairs=drop,blocks=1,tile_rows=0,tile_columns=1,seed=32",
        "m=1,n=4,d=7,kind=softmax,features=normal,scale=100.0,bias=0.0,weights=mean,two_sided=True,"
        "pairs=diagonal,blocks=1,tile_rows=0,tile_columns=1,seed=228",
        # sums far below their reference
        "m=3,n=25,d=128,kind=softmax,features=signs,scale=8.731809616088867,bias=2.5,weights=signed,two_sided=True,"
        "pairs=none,blocks=2,tile_rows=0,tile_columns=18,seed=372590230",
        # certain of a wrong pair: forward and backward must round alike
        "m=9,n=1,d=128,kind=softmax,features=twins,scale=200.0,bias=-10.0,weights=mean,two_sided=False,"
        "pairs=none,blocks=1,tile_rows=0,tile_columns=16,seed=2380802769",
    ],
)
def test_a_reference_costs_no_digits_that_a_plain_computation_keeps(recipe: str) -> None:
    made = Recipe.parse(f"{CASE}:{recipe}")
    problem, subject = drawn_problem(made, "float32"), Subject("torch", backend, "float32")
    got = subject.run(problem, options=made.options)
    found = compare_with_plain(problem, truth(problem), got, subject.accuracy, "float32")
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


@pytest.mark.parametrize("largest", [3e-9, 1.0, 65504.0, 0.0])
def test_float16_is_lifted_by_an_exact_power_of_two(largest: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_device(monkeypatch)
    block = replace(block_of(14, 3, 4, 8), rows=torch.zeros(3, 8).half(), columns=torch.zeros(4, 8).half())
    of = products.Products(block, unit=1.0)
    of.bound_gradient(torch.tensor([0.0, -largest, largest / 2]))
    gain = float(of._float16_gain)
    assert math.frexp(gain)[0] == math.frexp(1.0)[0]
    # G is at most four weights large
    assert 4 * largest * gain < torch.finfo(torch.float16).max
    assert largest == 0.0 or largest * gain >= products._FLOAT16_HEADROOM / 2


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 11, 32, 33, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_against_themselves_have_symmetric_logits_whatever_blas_does(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.mm

    def uneven(a: torch.Tensor, b: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        found = plain(a, b, **out)
        # another order of the sum above the diagonal
        return found.mul_(1 + torch.finfo(dtype).eps * torch.ones_like(found).triu(1))

    monkeypatch.setattr(products.torch, "mm", uneven)
    products._symmetric.cache_clear()
    x = torch.randn(rows, 13, dtype=dtype, generator=torch.Generator().manual_seed(0))
    block = Block(x, x, torch.tensor(100.0, dtype=dtype), symmetric=True)
    out = torch.empty(rows, rows, dtype=dtype)
    found = products.Products(block, products.LOG2_E).logits(x, x, out, diagonal=True)
    monkeypatch.undo()
    products._symmetric.cache_clear()
    assert torch.equal(found, found.t())
    assert found.isfinite().all()


@pytest.mark.parametrize("factor", [2.0**-120, 2.0**40])
def test_weights_beyond_the_coefficients_range_are_still_right(factor: float) -> None:
    problem, _ = symmetric(block_of(4, 15, 22, 8))
    assert problem.column_weight is not None
    problem = replace(problem, row_weight=problem.row_weight * factor, column_weight=problem.column_weight * factor)
    found = worst(problem, truth(problem), "float32")
    assert found.ratio < 1, str(found)


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
