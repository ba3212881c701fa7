"""The value of a constant of a cubin, read from its ELF sections without loading it."""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

# of ELF64: where the section headers are, and of a section header and a symbol all fields
_HEADER = struct.Struct("<40xQ10xHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2


@cache
def shared_bytes(path: Path, name: str) -> int:
    """Dynamic shared memory that a kernel asks for: the ``__device__ const int`` of this name in its cubin."""
    return integer(path.read_bytes(), name)


def integer(cubin: bytes, name: str) -> int:
    """The initial value of a 32-bit variable.

    Raises:
        KeyError: the cubin has no such variable.
    """
    start, size, count = _HEADER.unpack_from(cubin)
    sections = [_SECTION.unpack_from(cubin, start + size * i) for i in range(count)]
    for _, kind, _, _, offset, length, names, *_ in sections:
        if kind != _SYMBOL_TABLE:
            continue
        text = sections[names][4]
        for at in range(offset, offset + length, _SYMBOL.size):
            place, _, _, home, value, _ = _SYMBOL.unpack_from(cubin, at)
            if cubin.startswith(name.encode() + b"\0", text + place):
                return int.from_bytes(cubin[sections[home][4] + value :][:4], "little", signed=True)
    raise KeyError(name)
