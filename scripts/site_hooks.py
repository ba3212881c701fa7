"""What MkDocs does to a page before it reads it."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its docstrings: a directive of mkdocstrings is a comment where a code host shows the Markdown."""
    return re.sub(r"<!-- (::: .*?) -->", r"\1", markdown, flags=re.DOTALL)
