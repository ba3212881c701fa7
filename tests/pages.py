"""Reading the documentation: blocks of code, sections, the names that code defines, and the text that it prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_DECIMAL = r"\d+\.\d+"


def read(page: str) -> str:
    """The text of a page, by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", text, re.M | re.S)


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    return dict(part.split("\n", 1) for part in text.split("\n## ")[1:])


def defined(text: str, **scope: Any) -> dict[str, Any]:
    """The names that the Python blocks of a text define, after running them."""
    for block in blocks(text):
        exec(block, scope)
    return scope


def printed(source: str, scope: dict[str, Any] | None = None) -> str:
    """The text that a program prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, "the page", "exec"), {"__name__": "__main__"} if scope is None else scope)
    return output.getvalue()


def masked(text: str) -> list[str]:
    """The lines of a text with # for each decimal number, because last digits differ between machines."""
    return [re.sub(_DECIMAL, "#", line) for line in text.splitlines()]


def decimals(text: str) -> list[float]:
    """The numbers that ``masked`` replaces."""
    return [float(x) for x in re.findall(_DECIMAL, text)]
