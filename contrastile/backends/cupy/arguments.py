"""The structs that the kernels take, read from the headers that declare them, so that each is declared once.

``struct("FoldArguments")`` is the ctypes structure of ``FoldArguments`` in ``cuda/arguments*.cuh``, which documents the
fields. A test compiles code that compares sizes and offsets with C++.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

from contrastile.backends.cupy.build import SOURCES

HEADERS = ("plan.cuh", "arguments.cuh", "arguments_small.cuh")
_PLAIN = {
    "int": ctypes.c_int,
    "long long": ctypes.c_longlong,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_STRUCT = re.compile(r"struct (\w+) \{([^}]*)\};")
_FIELD = re.compile(r"(?:const )?(?P<type>[A-Za-z_][\w ]*?)(?P<pointer>\*?) (?P<names>\w+(?:, \w+)*)")


@cache
def structs() -> dict[str, type[ctypes.Structure]]:
    """Every struct of the headers, by its name.

    Raises:
        ValueError: the declaration of a field cannot be parsed.
    """
    known: dict[str, type[ctypes.Structure]] = {}
    for header in HEADERS:
        text = re.sub(r"//[^\n]*", "", (SOURCES / header).read_text(encoding="utf-8"))
        for name, body in _STRUCT.findall(text):
            lines = [" ".join(line.split()) for line in body.split(";")]
            fields = [field for line in lines if line for field in _fields(line, known, f"{name} in {header}")]
            known[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return known


def _fields(line: str, known: dict[str, type[ctypes.Structure]], origin: str) -> list[tuple[str, Any]]:
    match = _FIELD.fullmatch(line)
    ctype = None if match is None else ctypes.c_void_p if match["pointer"] else {**_PLAIN, **known}.get(match["type"])
    if match is None or ctype is None:
        raise ValueError(f"a field must be a pointer, a number or a struct declared before, got {line!r} of {origin}")
    return [(name, ctype) for name in match["names"].split(", ")]


@cache
def constant(name: str) -> int:
    """The value of a ``constexpr int`` of the headers.

    Raises:
        KeyError: there is none of this name.
    """
    for header in HEADERS:
        text = (SOURCES / header).read_text(encoding="utf-8")
        match = re.search(rf"^constexpr int {name} = (\d+);", text, re.M)
        if match is not None:
            return int(match[1])
    raise KeyError(name)


@cache
def struct(name: str) -> Any:
    """The structure of this name. Fields that its constructor does not receive are 0 or null."""
    return structs()[name]
