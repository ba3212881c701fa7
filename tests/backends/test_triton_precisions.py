"""Float32 features on tensor cores: the parts of a number, the bounds each precision keeps, and what rounds how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from contrastile.backends.contract import Block, Options, Pairs, UnsupportedProblemError  # noqa: E402
from contrastile.backends.numpy import backend as numpy_backend  # noqa: E402
from contrastile.backends.triton import backend, parts  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def held(x: Any, how: int, count: int) -> Any:
    """What ``divide`` makes of a (length, depth) matrix: (count, length, depth)."""
    length, depth = x.shape
    out = torch.full((length, count * 32), float("nan"))
    grid = (-(-length // 4), 2)
    parts.divide[grid](x, out, length, depth, 32, x.stride(0), out.stride(0), HOW=how, PARTS=count, LINES=4, BD=16)
    whole = out.reshape(length, count, 32)
    assert not whole[:, :, depth:].any()
    return whole[:, :, :depth].transpose(0, 1)


def numbers() -> Any:
    """Random float32 of many sizes, and the ends of the range in which parts are exact."""
    random = np.random.default_rng(3)
    x = random.standard_normal((13, 21)) * np.exp2(random.integers(-60, 60, (13, 21)))
    x[0, :6] = [0.0, 1.0, -1.0, 1 + 2.0**-23, 2.0**-100 * (1 + 2.0**-23), -(2.0**120) * (2 - 2.0**-23)]
    return torch.tensor(x, dtype=torch.float32)


def test_three_parts_are_exact_in_bfloat16_and_add_up() -> None:
    x = numbers()
    found = held(x, parts.SPLIT.value, 3)
    assert torch.equal(found.double().sum(0), x.double())
    assert torch.equal(found.bfloat16().float(), found)
    assert (found[1].abs() <= found[0].abs() * 2.0**-8).all()
    assert (found[2].abs() <= found[0].abs() * 2.0**-16).all()


def test_tf32_is_rounded_to_nearest_and_not_cut_off() -> None:
    x = numbers()
    (found,) = held(x, parts.TF32.value, 1)
    assert not (found.view(torch.int32) & 0x1FFF).any()
    assert ((found.double() - x.double()).abs() <= x.double().abs() * 2.0**-11).all()
    # cut off, every number would come out at most as large
    assert (found.abs() > x.abs()).any()


@pytest.mark.parametrize(("how", "count"), [(parts.TF32.value, 1), (parts.SPLIT.value, 3)])
def test_what_is_not_finite_is_in_the_first_part_alone(how: int, count: int) -> None:
    x = torch.tensor([[float("inf"), -float("inf"), float("nan")]])
    # the NaN that GPUs make: adding half a unit to it carries into the sign
    x[0, 2] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    found = held(x, how, count)
    assert torch.equal(found[0, 0, :2], x[0, :2])
    assert torch.isnan(found[0, 0, 2])
    assert not found[1:].any()


@pytest.mark.parametrize(("precision", "expected"), [("ieee", 0.0), ("split", 0.0), ("tf32", 2.0**-12)])
def test_only_tf32_rounds_the_features(precision: str, expected: float) -> None:
    # one pair: its logit is the dot, (1 + 2^-12) 1 in float32 and 1 in tf32
    x, one = torch.zeros(1, 8), torch.zeros(1, 8)
    x[0, 0], one[0, 0] = 1 + 2.0**-12, 1.0
    block = Block(x, one, torch.tensor(1.0), None, Pairs(positives=torch.zeros(1, dtype=torch.int64)))
    found = backend.lse(block, True, Options(precision=precision))
    assert found.columns is not None
    for value in (found.rows.positive_lse, found.columns.positive_sum):
        assert float(x[0, 0]) - float(value) == expected
    # and nothing else is in the row
    assert float(found.rows.negative_lse) == -float("inf")


def test_a_backend_that_lacks_a_precision_refuses_it() -> None:
    block = Block(np.ones((2, 3), np.float32), np.ones((2, 3), np.float32), np.ones(()))
    with pytest.raises(UnsupportedProblemError, match="precision must be ieee here, got tf32"):
        numpy_backend.check(block, Options(precision="tf32"))
    half = Block(np.ones((2, 3), np.float16), np.ones((2, 3), np.float16), np.ones(()))
    numpy_backend.check(half, Options(precision="tf32"))
