"""Changes to a page before MkDocs reads it: the pages are Markdown as a code host shows it."""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with the directives of its docstrings, which are comments, and with its equations as MathML."""
    markdown = re.sub(r"<!-- (::: .*?) -->", r"\1", markdown, flags=re.DOTALL)
    return re.sub(r"^```math\n(.*?)^```", _equation, markdown, flags=re.DOTALL | re.MULTILINE)


def _equation(block: re.Match[str]) -> str:
    # convert the lines of an "aligned" one by one, because the converter does not know it
    lines = (line.removesuffix(r"\\").replace("&", "") for line in block[1].splitlines()[1:-1])
    return f'<div class="equation">{"".join(convert(line, display="block") for line in lines)}</div>'
