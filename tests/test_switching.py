"""docs/how-to/switching.md: each loss equals the other library's loss that it replaces, and so do its gradients.

Both sides run in float64 and may differ by roundings alone. Let X be the largest possible logit. The error of a logit
is at most ``gamma(d + 3) X``. A sum over n columns of its exponentials adds a relative error of ``gamma(n + 4)``, and a
mean over m rows one of ``gamma(m)``. An entry of G is at most 1, so its error is at most ``gamma(d + n + m + 16) (2 + 4
X)``. A gradient sums n such entries, each times the scale and the longest feature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pages import defined, read, sections

import contrastile
from contrastile.verify.arithmetic import gamma
from contrastile.verify.rounding import UNIT

SECTIONS = sections(read("docs/how-to/switching.md"))
M, D, K, QUEUE, SCALE, BIAS = 13, 7, 3, 29, 9.5, -4.25
COUNTS = torch.arange(M) % K


def functions(section: str) -> dict[str, Any]:
    return defined(SECTIONS[section], torch=torch, F=torch.nn.functional, contrastile=contrastile)


def features(*rows: int | tuple[int, int]) -> list[torch.Tensor]:
    """Unit features that require gradients."""
    generator = torch.Generator().manual_seed(31)
    shapes = [m if isinstance(m, tuple) else (m,) for m in rows]
    drawn = (torch.randn(*shape, D, dtype=torch.float64, generator=generator) for shape in shapes)
    return [torch.nn.functional.normalize(x, dim=-1).requires_grad_() for x in drawn]


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


ARGUMENTS: dict[str, Callable[[], list[Any]]] = {
    "CLIP": lambda: [*features(M, M), number(SCALE)],
    "sentence-transformers": lambda: [*features(M, M, 2 * M + 1), number(SCALE)],
    "GradCache, Tevatron, FlagEmbedding, DPR": lambda: [*features(M, K * M), number(SCALE)],
    "Hard negatives of their own query": lambda: [*features(M, (M, K)), COUNTS, number(1 / SCALE)],
    "ms-swift": lambda: [*features(M, M, (M, K)), COUNTS, number(1 / SCALE)],
    "Qwen3-Embedding": lambda: [*features(M, M, (M, K)), number(SCALE)],
    "MoCo": lambda: [*features(M, M, QUEUE), number(SCALE)],
    "MoCo v3": lambda: [*features(M, M), *(x.detach() for x in features(M, M, M)[1:]), number(1 / SCALE)],
    "SimCLR": lambda: [*features(M, M), number(1 / SCALE)],
    "SupCon": lambda: [*features(M), torch.tensor([5, 1, 1, 0, 5, 2, 5, 1, 3, 4, 4, 0, 6]), number(1 / SCALE)],
    # ten pairs: no more rows than M
    "NTXentLoss with labels": lambda: [
        *features(M),
        torch.tensor([5, 1, 1, 0, 5, 2, 5, 3, 3, 4, 6, 7, 8]),
        number(1 / SCALE),
    ],
    "SigLIP": lambda: [*features(M, M), number(SCALE), number(BIAS)],
}


@pytest.mark.parametrize("section", list(ARGUMENTS))
def test_the_loss_equals_the_loss_that_it_replaces(section: str) -> None:
    scope, arguments = functions(section), ARGUMENTS[section]()
    leaves = [x for x in arguments if x.requires_grad]
    n, largest = sum(x.numel() // D for x in leaves if x.ndim), SCALE + abs(BIAS)
    tolerance = n * gamma(UNIT["float64"] * (D + M + n + 16)) * (2 + 4 * largest) * (1 + SCALE)
    theirs, ours = (scope[name](*arguments) for name in ("theirs", "ours"))
    assert abs(theirs.item() - ours.item()) <= tolerance
    expected_gradients, gradients = (torch.autograd.grad(loss, leaves) for loss in (theirs, ours))
    for leaf, x, y in zip(leaves, expected_gradients, gradients, strict=True):
        # the gradient of a temperature is that of the scale, times the scale squared
        assert (x - y).abs().max().item() <= tolerance * (1 if leaf.ndim else 1 + SCALE**2), section


def test_the_module_equals_the_module_of_open_clip_that_it_replaces() -> None:
    image, text = features(M, M)
    loss = functions("open_clip")["loss"](image, text, number(SCALE))
    assert torch.equal(loss, contrastile.clip_loss(image, text, number(SCALE)))


def test_every_section_that_shows_both_losses_is_tested() -> None:
    assert [name for name in SECTIONS if "ours" in functions(name)] == list(ARGUMENTS)
