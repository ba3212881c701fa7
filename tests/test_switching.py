"""docs/how-to/switching.md: the loss that replaces another library's has its value and its gradients.

Both sides are computed in float64, so they may differ by their roundings and no more. With X the largest possible
logit, a logit is off by at most ``gamma(d + 3) X``, a sum over n columns of exponentials of it by ``gamma(n + 4)``
besides, relatively, and a mean over m rows by ``gamma(m)``: every entry of G by ``gamma(d + n + m + 16) (2 + 4 X)`` of
its largest value, 1, and a gradient by that for each of n columns of the longest feature times the scale.
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
    """Unit features that want gradients."""
    draw = torch.Generator().manual_seed(31)
    shapes = [m if isinstance(m, tuple) else (m,) for m in rows]
    drawn = (torch.randn(*shape, D, dtype=torch.float64, generator=draw) for shape in shapes)
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
def test_ours_is_theirs(section: str) -> None:
    scope, given = functions(section), ARGUMENTS[section]()
    leaves = [x for x in given if x.requires_grad]
    n, largest = sum(x.numel() // D for x in leaves if x.ndim), SCALE + abs(BIAS)
    allowed = n * gamma(UNIT["float64"] * (D + M + n + 16)) * (2 + 4 * largest) * (1 + SCALE)
    theirs, ours = (scope[name](*given) for name in ("theirs", "ours"))
    assert abs(theirs.item() - ours.item()) <= allowed
    expected, found = (torch.autograd.grad(loss, leaves) for loss in (theirs, ours))
    for leaf, x, y in zip(leaves, expected, found, strict=True):
        # a temperature's gradient is the scale's, times the scale squared
        assert (x - y).abs().max().item() <= allowed * (1 if leaf.ndim else 1 + SCALE**2), section


def test_the_module_that_replaces_open_clip_s() -> None:
    image, text = features(M, M)
    found = functions("open_clip")["loss"](image, text, number(SCALE))
    assert torch.equal(found, contrastile.clip_loss(image, text, number(SCALE)))


def test_every_section_with_both_sides_is_held_to_it() -> None:
    assert [name for name in SECTIONS if "ours" in functions(name)] == list(ARGUMENTS)
