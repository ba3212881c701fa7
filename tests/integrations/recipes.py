"""The recipes of docs/how-to/integrations.md, as written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "integrations.md"


def recipe(section: str) -> dict[str, Any]:
    """What the Python blocks of a section define."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    assert text, f"docs/how-to/integrations.md has no section {section}"
    scope: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        exec(block, scope)
    return scope


class Batches:
    """Batches that a trainer takes as they are."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)
