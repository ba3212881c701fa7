"""What the scripts that write pages share: tables, and the part of a page between its markers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

END = "<!-- end of measured -->"


def spliced(page: str, begin: str, body: str, end: str = END) -> str:
    """The page with the part between two markers replaced.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, opened, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"the page must hold {begin!r} and behind it {end!r}")
    return f"{before}{begin}\n\n{body}\n\n{end}{after}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A Markdown table: these columns to the left, the others, which are numbers, to the right."""
    rule = ["---" if i in left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rows))


def escaped(text: str) -> str:
    """A text as it stands, in a cell of a table."""
    for mark in "\\`*_[]<>|":
        text = text.replace(mark, "\\" + mark)
    return text
