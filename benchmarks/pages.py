"""Pages whose measured part is written from records, and held to them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
END = "<!-- end of measured -->"
Data = dict[str, Any]


@dataclass(frozen=True)
class Page:
    """A page of docs/ with a measured part.

    Attributes:
        script: what writes it, from the checkout's root.
        path: of the page.
        pattern: of its records' names.
        section: what one record shows, given its stem and its data.
        drawn: whether a record has a figure.
        draw: writes it.
        nothing: what is said while there is no record.
    """

    script: str
    path: Path
    pattern: str
    section: Callable[[str, Data], str]
    drawn: Callable[[Data], bool]
    draw: Callable[[Data, Path], None]
    nothing: str

    @property
    def begin(self) -> str:
        """What stands before the measured part."""
        return f"<!-- measured: written by {self.script} from docs/results -->"

    def records(self, folder: Path) -> dict[str, Data]:
        """Every record of a folder by its stem, in the order of names."""
        return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(self.pattern))}

    def generated(self, folder: Path) -> str:
        """The measured part."""
        found = (self.section(stem, data) for stem, data in self.records(folder).items())
        return "\n\n".join(filter(None, found)) or self.nothing

    def spliced(self, page: str, text: str) -> str:
        """The page with the part between its markers replaced.

        Raises:
            ValueError: the page lacks a marker.
        """
        return spliced(page, self.begin, END, text)

    def main(self, arguments: list[str] | None = None) -> int:
        """Write the page and the figures; with --check, compare.

        Returns:
            0; with --check 1 when the page is not what the records say.
        """
        parser = argparse.ArgumentParser(description=f"Writes the measured part of {self.path.name} from the records.")
        parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
        parser.add_argument("--page", type=Path, default=self.path, metavar="FILE")
        parser.add_argument("--check", action="store_true", help="exit 1 if the page is not what the records say")
        given = parser.parse_args(arguments)
        old = given.page.read_text(encoding="utf-8")
        new = self.spliced(old, self.generated(given.results))
        if given.check:
            return differs(given.page, old, new, self.script)
        for stem, data in self.records(given.results).items():
            if self.drawn(data):
                self.draw(data, given.results / f"{stem}.svg")
        given.page.write_text(new, encoding="utf-8")
        return 0


def spliced(page: str, begin: str, end: str, text: str) -> str:
    """The page with the part between two markers replaced.

    Raises:
        ValueError: the page lacks a marker.
    """
    if begin not in page or end not in page:
        raise ValueError(f"the page must hold {begin!r} and {end!r}")
    return f"{page.partition(begin)[0]}{begin}\n\n{text}\n\n{end}{page.partition(end)[2]}"


def differs(page: Path, old: str, new: str, command: str) -> int:
    """1, and a word on stderr, where a page is not what it would be written as; else 0."""
    if new != old:
        print(f"{page} is not what the records say; run: python {command}", file=sys.stderr)
    return int(new != old)


def versions(environment: Data, names: tuple[str, ...]) -> str:
    """Versions of what is there of these."""
    return ", ".join(f"{name} {environment[name]}" for name in names if environment.get(name))


def card(environment: Data) -> str:
    """Driver and power limit, as far as they are known."""
    known = (("driver", "driver_version"), ("power limit", "power.limit"))
    return ", ".join(f"{what} {environment[name]}" for what, name in known if environment.get(name))


def noted(about: str, environment: Data) -> str:
    """What is said of a run, with the note that its record may hold."""
    return " ".join(filter(None, (about, environment.get("note"))))


def titled(name: str, environment: Data) -> str:
    """The heading of a record; the commit tells several of one device apart."""
    commit = environment["commit"]
    return f"### {name}, {commit[:12]}" if commit else f"### {name}"


def when(environment: Data) -> str:
    """Date and commit."""
    return f"{environment['date'][:10]}, commit `{(environment['commit'] or 'unknown')[:12]}`"
