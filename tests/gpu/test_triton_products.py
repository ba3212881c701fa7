"""Sums of thousands of terms of one sign: what truncates as it adds is a hundred times noisier than float32 there."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from contrastile.backends.triton.configs import tile_config  # noqa: E402
from contrastile.backends.triton.launch import architecture  # noqa: E402
from contrastile.backends.triton.products import accumulate  # noqa: E402


def parted(x: Any) -> list[Any]:
    """Three bfloat16 parts, whose sum is x."""
    found = []
    for _ in range(3):
        found.append(x.bfloat16())
        x = x - found[-1].float()
    return found


def error(x: Any, exact: Any) -> float:
    return float((x.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("terms", [600, 8192, 32768])
def test_products_of_parts_are_as_exact_as_those_of_float32(
    terms: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    torch.manual_seed(0)
    g, features = torch.rand(200, terms, device="cuda"), torch.rand(terms, 72, device="cuda")
    exact, plain = g.double() @ features.double(), g @ features
    out = torch.full_like(plain, float("nan"))
    given = parted(g.T.contiguous() if transposed else g)
    config = tile_config("product", "split", architecture(g), 72)
    accumulate(out, given, parted(features), config, transposed=transposed, fresh=True)
    assert error(out, exact) <= 3 * max(error(plain, exact), 2.0**-24)
