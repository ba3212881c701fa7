"""Writes the measured part of docs/explanation/bounds.md, and its figure, from docs/results/growth_cpu.json.

contrastile verify --property growth --json docs/results/growth_cpu.json    measures
python scripts/make_bounds_page.py                                          writes the page, growth_cpu.svg
"""

import json
from pathlib import Path
from typing import Any

from page_writing import spliced, table

from contrastile.verify import plots
from contrastile.verify.growth import AXES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "bounds.md"
DATA = ROOT / "docs" / "results" / "growth_cpu.json"
FIGURE = DATA.with_suffix(".svg")
BEGIN = "<!-- measured: written by scripts/make_bounds_page.py from docs/results/growth_cpu.json -->"
DRAWN = "torch"


def _measured() -> list[dict[str, Any]]:
    return [row for row in json.loads(DATA.read_text(encoding="utf-8"))["rows"] if row.get("points")]


def figure() -> str:
    """The figure as it should be: a row for each dtype of one backend."""
    rows = [(f"{row['backend']} {row['dtype']}", row["points"]) for row in _measured() if row["backend"] == DRAWN]
    return plots.figure(rows, list(AXES))


def measured() -> str:
    """What stands between the markers."""
    facts = json.loads(DATA.read_text(encoding="utf-8"))["environment"]
    picture = f"![Error of the gradients against d, b and scale, by dtype, with its bounds](../results/{FIGURE.name})"
    about = f"{facts['cpu']}, torch {facts['torch']}, numpy {facts['numpy']}. The largest ratio of any point:"
    beside = {"bound": "a-priori bound", "probable": "probabilistic bound", "plain": "plain computation's"}
    lines = []
    for row in sorted(_measured(), key=lambda row: row["backend"]):
        worst = (max(each["error"] / each[name] for each in row["points"]) for name in beside)
        lines.append([row["backend"], row["dtype"], *(f"{ratio:.2g}" for ratio in worst)])
    head = ["backend", "dtype", *(f"error / {what}" for what in beside.values())]
    return f"{picture}\n\n{about}\n\n{table(head, lines, left=(0, 1))}"


def page() -> str:
    """The page as it should be."""
    return spliced(PAGE.read_text(encoding="utf-8"), BEGIN, measured())


if __name__ == "__main__":
    FIGURE.write_text(figure(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
