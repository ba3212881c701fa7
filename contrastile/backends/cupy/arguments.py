"""The structs that cross to the kernels, read from the headers that declare them: they are said once.

``struct("FoldArguments")`` is the ctypes structure of ``FoldArguments`` in ``cuda/arguments*.cuh``; what each field
means is said there. A test compiles that sizes and offsets agree with C++.
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
    """Every struct of the headers by its name.

    Raises:
        ValueError: a field is declared in a way that is not understood.
    """
    found: dict[str, type[ctypes.Structure]] = {}
    for header in HEADERS:
        text = re.sub(r"//[^\n]*", "", (SOURCES / header).read_text(encoding="utf-8"))
        for name, body in _STRUCT.findall(text):
            declared = [" ".join(line.split()) for line in body.split(";")]
            fields = [field for line in declared if line for field in _fields(line, found, f"{name} in {header}")]
            found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


def _fields(line: str, known: dict[str, type[ctypes.Structure]], where: str) -> list[tuple[str, Any]]:
    match = _FIELD.fullmatch(line)
    kind = None if match is None else ctypes.c_void_p if match["pointer"] else {**_PLAIN, **known}.get(match["type"])
    if match is None or kind is None:
        raise ValueError(f"a field must be a pointer, a number or a struct declared before, got {line!r} of {where}")
    return [(name, kind) for name in match["names"].split(", ")]


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
    """The structure of this name; called with fields by name, it leaves the others 0 and null."""
    return structs()[name]
