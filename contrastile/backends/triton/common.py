"""What the three primitives share on the host: which vectors a kernel reads, and the survey of a block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from contrastile.backends.contract import WEIGHTS, Pairs, Weights
from contrastile.backends.triton.configs import INTERPRETED
from contrastile.backends.triton.tiles import DROP, NO_IDS, TARGET

# rows a program of a small kernel takes, tiny under the interpreter so that small problems have several programs
LINES = 4 if INTERPRETED else 8
LANES = 16 if INTERPRETED else 128
DEPTH = 4 if INTERPRETED else 32
BLOCK = 8 if INTERPRETED else 1024


@dataclass(frozen=True, slots=True)
class Masks:
    """The vectors that say which pairs count, contiguous, and what a kernel makes of them.

    Attributes:
        positives: (m,) or None; None with match = "target", where ids name the positives.
        excluded: (m,) or None.
        row_ids: (m,) or None.
        column_ids: (n,) or None.
        ids: tiles.NO_IDS, DROP or TARGET.
    """

    positives: Any
    excluded: Any
    row_ids: Any
    column_ids: Any
    ids: int

    @staticmethod
    def of(pairs: Pairs) -> Masks:
        """The masks of a block's pairs."""
        given = pairs.row_ids is not None and pairs.column_ids is not None
        target = pairs.match == "target"
        meaning = (TARGET if target else DROP).value if given else NO_IDS.value
        positives = None if target else pairs.positives
        vectors = [None if x is None else x.contiguous() for x in (positives, pairs.excluded)]
        ids = [None if x is None else x.contiguous() for x in (pairs.row_ids, pairs.column_ids)]
        return Masks(vectors[0], vectors[1], ids[0], ids[1], meaning)

    def flags(self) -> dict[str, Any]:
        """The compile-time arguments that choose a kernel's masks."""
        return {"EXCLUDED": self.excluded is not None, "IDS": self.ids}

    @property
    def masked(self) -> bool:
        """Whether pairs other than padding may not count."""
        return self.excluded is not None or self.ids != int(NO_IDS.value)

    @property
    def ids_only(self) -> bool:
        """Whether the positives are pairs of equal ids."""
        return self.ids == int(TARGET.value)


def weight_vectors(weights: Weights) -> list[Any]:
    """The vectors of the weights, contiguous, rows first; None where there is no column side."""
    given = [getattr(weights, name) for name in WEIGHTS]
    return [None if x is None else x.contiguous() for x in given]


def step(width: int) -> int:
    """Features that a small kernel takes at once."""
    return min(1 << (width - 1).bit_length(), 16 if INTERPRETED else 512)


def ceil_div(a: int, b: int) -> int:
    """Rounded up. Triton's own ``cdiv`` can be called from kernels too, and takes microseconds for it."""
    return -(-a // b)


def empty(like: Any, *shape: int, dtype: Any = torch.float32) -> Any:
    """An unwritten tensor beside ``like``."""
    return torch.empty(shape, dtype=dtype, device=like.device)


def chunks(m: int, n: int, height: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """First row, first column, rows and columns of each chunk, in their one order."""
    for row in range(0, m, height):
        for column in range(0, n, width):
            yield row, column, min(height, m - row), min(width, n - column)
