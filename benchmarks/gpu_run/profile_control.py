# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# pyright: reportArgumentType=false
"""A control of initcheck: an array written whole, through a tensor map (TMA), and then read with plain loads.

Nothing of it is left unwritten: what initcheck reports here it reports because it does not see such writes. Prints
PASS where every element has the value that was written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SIDE, TILE = 256, 64


@triton.jit
def write_by_map(out, TILE: tl.constexpr):
    """Writes one tile of ones."""
    out.store([tl.program_id(0) * TILE, tl.program_id(1) * TILE], tl.full((TILE, TILE), 1.0, tl.bfloat16))


@triton.jit
def read_plainly(x, out, SIZE: tl.constexpr):
    """Copies a row."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at))


def main() -> None:
    """Write, read, compare."""
    x, out = (torch.empty(SIDE, SIDE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    write_by_map[(SIDE // TILE, SIDE // TILE)](TensorDescriptor.from_tensor(x, [TILE, TILE]), TILE=TILE)
    read_plainly[(SIDE,)](x, out, SIZE=SIDE)
    torch.cuda.synchronize()
    right = bool((out == 1).all())
    print("PASS: every element was written" if right else "FAIL: an element was not written")


if __name__ == "__main__":
    main()
