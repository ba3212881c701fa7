"""Writes the options in docs/reference/command-line.md: what each command of ``contrastile`` says of its own arguments.

python scripts/make_command_page.py            writes the page
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from page_writing import escaped, spliced, table

from contrastile.cli import COMMANDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "command-line.md"
BEGIN = "<!-- options of {name}: written by scripts/make_command_page.py -->"
END = "<!-- end of options -->"


def options(name: str) -> str:
    """A table of a command's options."""
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    lines = []
    for action in parser._actions[1:]:
        shown = " ".join([", ".join(action.option_strings), _value(action)]).strip()
        # the formatter fills in %(default)s, and argparse has no public way to ask it to
        said = argparse.HelpFormatter("")._expand_help(action) if action.help else ""
        if action.choices and len(choices := list(map(str, action.choices))) < 9:
            said += f"; one of {', '.join(choices)}"
        lines.append([f"`{shown}`", escaped(said)])
    return table(["option", "meaning"], lines, left=(0, 1))


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    name = action.metavar or action.dest.upper()
    return f"{name if isinstance(name, str) else name[0]}{'...' if action.nargs in ('+', '*') else ''}"


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    for name in COMMANDS:
        text = spliced(text, BEGIN.format(name=name), options(name), END)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
