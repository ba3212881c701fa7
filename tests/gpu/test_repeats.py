"""Steps on a GPU at sizes of real training: repeats give the same bits, and no loss is negative."""

from __future__ import annotations

from typing import Any

import pytest
from capturing import unit_features, value_and_gradients

import contrastile
from contrastile.backends.registry import available

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

BACKENDS = [name for name in ("triton", "cupy") if available()[name] is None] or ["torch"]
TIMES, WIDTH, SCALE = 20, 512, 100.0


def pairs(b: int, cosine: float) -> list[Any]:
    """Unit features whose pairs have this cosine, bfloat16, and a scale."""
    image, noise = unit_features(2, b, WIDTH, "float32")
    text = torch.nn.functional.normalize(cosine * image + (1 - cosine**2) ** 0.5 * noise, dim=1)
    return [image.bfloat16(), text.bfloat16(), torch.tensor(SCALE, device="cuda")]


@pytest.mark.parametrize("b", [65536, 8191])
@pytest.mark.parametrize("backend", BACKENDS)
def test_repeats_have_the_same_bits(backend: str, b: int) -> None:
    leaves = [x.requires_grad_() for x in pairs(b, 0.3)]
    expected = value_and_gradients(contrastile.clip_loss, leaves, backend=backend)
    for _ in range(TIMES - 1):
        assert all(map(torch.equal, value_and_gradients(contrastile.clip_loss, leaves, backend=backend), expected))


@pytest.mark.parametrize("cosine", [1.0, 0.99])
@pytest.mark.parametrize("b", [4096, 4099, 32768])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_of_similar_pairs_is_not_negative(backend: str, b: int, cosine: float) -> None:
    assert float(contrastile.clip_loss(*pairs(b, cosine), backend=backend)) >= 0
