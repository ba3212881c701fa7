"""The recipes of docs/how-to/integrations.md, as they are written."""

from __future__ import annotations

from typing import Any

from pages import defined, read, sections

SECTIONS = sections(read("docs/how-to/integrations.md"))


def recipe(section: str) -> dict[str, Any]:
    """The names that the Python blocks of a section define."""
    return defined(SECTIONS[section])
