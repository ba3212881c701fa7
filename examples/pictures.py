"""Pictures to learn from: a coloured shape on a noisy ground, and its caption.

``KINDS`` has every size, colour, shape and place. Two pictures of one kind differ in
their noise and by a shift.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

SIZES = {"small": 3.0, "large": 5.0}
COLOURS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "white": (1, 1, 1),
}
SHAPES = ("circle", "square", "diamond", "ring", "cross")
PLACES = {
    "left": (0, -6),
    "right": (0, 6),
    "top": (-6, 0),
    "bottom": (6, 0),
    "centre": (0, 0),
}
KINDS = list(itertools.product(SIZES, COLOURS, SHAPES, PLACES))
WORDS = sorted({word for kind in KINDS for word in kind})
SIDE = 24


def caption(kind: int) -> str:
    """The caption of a kind, such as "a small red circle at the left"."""
    size, colour, shape, place = KINDS[kind]
    return f"a {size} {colour} {shape} at the {place}"


def bags(captions: list[str]) -> Tensor:
    """Which words each caption has: (n, words)."""
    split = [text.split() for text in captions]
    return torch.tensor([[float(word in text) for word in WORDS] for text in split])


def draw(kinds: Tensor) -> Tensor:
    """A picture of each kind, by torch's random numbers: (n,) -> (n, 3, 24, 24)."""
    attributes = [KINDS[kind] for kind in kinds.tolist()]
    radius = torch.tensor([SIZES[size] for size, *_ in attributes])[:, None, None]
    colour = torch.tensor([COLOURS[colour] for _, colour, *_ in attributes]).float()
    middle = torch.tensor([PLACES[place] for *_, place in attributes])
    middle = middle + torch.randint(-2, 3, (len(attributes), 2))
    axis = torch.arange(SIDE) - (SIDE - 1) / 2
    y = axis[None, :, None] - middle[:, :1, None]
    x = axis[None, None, :] - middle[:, 1:, None]
    distance, diamond = (x * x + y * y).sqrt(), x.abs() + y.abs()
    square = torch.maximum(x.abs(), y.abs())
    forms = {
        "circle": distance <= radius,
        "square": square <= radius,
        "diamond": diamond <= radius + 1,
        "ring": (distance <= radius) & (distance > radius - 2),
        "cross": (torch.minimum(x.abs(), y.abs()) < 1) & (square <= radius),
    }
    shapes = enumerate(shape for _, _, shape, _ in attributes)
    inside = torch.stack([forms[shape][i] for i, shape in shapes])
    colours = inside[:, None] * colour[:, :, None, None]
    return colours + 0.3 * torch.randn(len(attributes), 3, SIDE, SIDE)


def tower(width: int) -> torch.nn.Module:
    """A small convolutional network: pictures -> (n, width)."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 5, stride=2, padding=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, stride=2, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * (SIDE // 4) ** 2, width),
    )
