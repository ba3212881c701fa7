"""Tile shapes, fixed for each kernel, architecture and dtype.

They are chosen by measurement (``docs/benchmarks/gpu.md``) and not tuned at the first call: the same shapes give the
same bits everywhere, and a first call compiles a handful of kernels instead of dozens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from triton import knobs

from contrastile.backends.passes import Chunk

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the kernels run under Triton's interpreter (TRITON_INTERPRET=1, on the CPU); fixed when they are defined."""

PAD = 16 if INTERPRETED else 64
"""Parts of features are padded to multiples of this: every kernel's step divides it."""


@dataclass(frozen=True)
class Config:
    """How one tile kernel is built.

    Attributes:
        bm: rows of a tile.
        bn: columns of a tile.
        bk: features taken in one step.
        warps: warps of a program.
        stages: steps of the pipeline held in shared memory.
        resident: programs that share a multiprocessor: one's epilogue runs behind another's products.
        group: tile rows in a band (see ``tiles.place``).
        parts: column parts in which a tile of G is finished and stored: 1 or 2, more only for the sigmoid kernel.
        strip: columns that the sigmoid kernel takes at a time: those of one thread, else threads exchange them.
        precision: ``input_precision`` of the products; matters only for float32.
        registers: most registers of a thread, where more would keep ``resident`` programs from fitting.
    """

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    resident: int = 1
    group: int = 4
    parts: int = 1
    strip: int = 8
    precision: str = "ieee"
    registers: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.bm, self.bn

    @cached_property
    def named(self) -> dict[str, Any]:
        """The compile-time arguments for the tile, and the compile options of a launch."""
        arguments: dict[str, Any] = {"BM": self.bm, "BN": self.bn, "BK": self.bk, "GROUP": self.group}
        arguments |= {"PRECISION": self.precision, "num_warps": self.warps, "num_stages": self.stages}
        return arguments if self.registers is None else arguments | {"maxnreg": self.registers}

    def ragged(self, chunk: Chunk) -> bool:
        """Whether a tile reaches past the edge of the chunk."""
        return chunk.height % self.bm != 0 or chunk.width % self.bn != 0


# kernel -> dtype -> least architecture -> configuration; "half": features or parts of 16 bits, and dtypes without entry
_TABLE: dict[str, dict[str, dict[int, Config]]] = {
    "lse": {
        "half": {80: Config(128, 128, 32, 4, 3, 2), 90: Config(128, 128, 64, 4, 3, 2, group=8)},
        "tf32": {80: Config(128, 128, 16, 8, 3, 1), 90: Config(128, 128, 32, 4, 3, 2)},
    },
    # ranks and nearest columns: an epilogue of few instructions needs no second program to hide behind
    "search": {"half": {80: Config(128, 64, 32, 4, 3, 2), 90: Config(128, 256, 64, 8, 3, 1, group=8)}},
    # with ids: 64-bit comparisons take registers
    "masked": {
        "half": {80: Config(128, 64, 32, 4, 3, 2), 90: Config(128, 64, 64, 4, 3, 2)},
        "tf32": {80: Config(64, 64, 32, 4, 3, 2)},
    },
    # with a guide's marks, which take half of the buffer through which a tile of G is stored
    "guided": {
        "half": {80: Config(128, 64, 32, 4, 3, 2), 90: Config(128, 128, 64, 4, 3, 2, group=8, parts=4)},
        "tf32": {80: Config(64, 64, 32, 4, 3, 2), 90: Config(128, 128, 32, 4, 3, 2, parts=4)},
    },
    # with positives by ids, whose sums and counts are stored too
    "matched": {
        "half": {80: Config(64, 64, 32, 4, 3, 2), 90: Config(128, 64, 64, 4, 3, 2)},
        "tf32": {80: Config(64, 64, 32, 4, 3, 2)},
    },
    # with excluded pairs too: with 4 warps on Hopper the registers spill
    "matched, excluding": {
        "half": {80: Config(64, 64, 32, 4, 3, 2), 90: Config(128, 64, 64, 8, 3, 2)},
        "tf32": {80: Config(64, 64, 32, 4, 3, 2)},
    },
    "gradient": {
        "half": {80: Config(128, 128, 32, 4, 3, 2), 90: Config(128, 128, 64, 4, 3, 2, group=8, parts=2)},
        "tf32": {80: Config(128, 128, 16, 8, 3, 1), 90: Config(128, 128, 32, 4, 3, 2, parts=2)},
    },
    # where positives lie on the diagonal, bands of 4 would leave nearly all of their tiles to four programs of 264
    "sigmoid": {
        "half": {
            80: Config(128, 128, 32, 8, 3, 1, parts=4, strip=16),
            90: Config(128, 128, 64, 4, 3, 2, group=8, parts=2),
        },
        "tf32": {
            80: Config(128, 128, 16, 8, 3, 1, parts=4, strip=16),
            90: Config(128, 128, 32, 4, 3, 2, group=8, parts=2),
            # without parts, because Triton 3.7's compiler fails on a tile that is finished and stored in parts
            100: Config(128, 128, 32, 8, 3, 1),
        },
        "split": {
            80: Config(128, 128, 32, 8, 3, 1, parts=4, strip=16),
            90: Config(128, 128, 64, 4, 3, 2, group=8, parts=2),
            100: Config(128, 128, 64, 8, 3, 1),
        },
    },
    "product": {
        "half": {80: Config(128, 128, 32, 4, 3, 1), 90: Config(128, 128, 64, 4, 3, 1)},
        "tf32": {80: Config(64, 64, 32, 4, 2, 3)},
        # the kernel holds two sums
        "split": {80: Config(64, 128, 32, 4, 3, 2), 90: Config(128, 128, 128, 8, 3, 1)},
    },
}
# small and unequal, so that small problems have many tiles and ragged last ones
_INTERPRETED = Config(16, 32, 16, 1, 1, group=2, parts=2)


@cache
def tile_config(kernel: str, dtype: str, architecture: int, width: int, precision: str = "ieee") -> Config:
    """The configuration of a kernel.

    Args:
        kernel: a name of the table.
        dtype: name of the features' dtype, or ``dtype`` of their ``operands.Scheme``.
        architecture: compute capability times 10, e.g. 90; 0 under the interpreter.
        width: features of a row. With few features, the forward pass is faster with bands twice as high.
        precision: ``input_precision`` of the kernel's products.
    """
    if architecture == 0:
        return replace(_INTERPRETED, precision=precision)
    configs = _TABLE[kernel].get(dtype) or _TABLE[kernel]["half"]
    config = configs[max(least for least in configs if least <= max(architecture, 80))]
    has_high_bands = kernel == "lse" and width <= 512
    return replace(config, precision=precision, group=2 * config.group if has_high_bands else config.group)
