"""What a page shows: its blocks of code, what a section defines, what a program prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def read(page: str) -> str:
    """The text of a page, by its path in the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}[^\n]*\n(.*?)^```", text, re.M | re.S)


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    return dict(part.split("\n", 1) for part in text.split("\n## ")[1:])


def defined(text: str, **scope: Any) -> dict[str, Any]:
    """What the Python blocks of a text define."""
    for block in blocks(text):
        exec(block, scope)
    return scope


def printed(source: str, scope: dict[str, Any] | None = None) -> str:
    """What a program prints."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(source, "the page", "exec"), {"__name__": "__main__"} if scope is None else scope)
    return said.getvalue()


def masked(text: str) -> list[str]:
    """The lines of a text, with # for each number: the last digits differ between machines."""
    return [re.sub(r"\d+\.\d+", "#", line) for line in text.splitlines()]
