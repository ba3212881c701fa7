"""Writes the measured part of docs/benchmarks/conformance.md and its heat map from docs/results/conformance.json."""

import json
from html import escape
from pathlib import Path
from typing import Any

from page_writing import spliced, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "conformance.md"
DATA = ROOT / "docs" / "results" / "conformance.json"
FIGURE = DATA.with_suffix(".svg")
BEGIN = "<!-- measured: written by scripts/make_conformance_page.py from docs/results/conformance.json -->"
POWERS = {0: "b⁰", 1: "b", 2: "b²", 3: "b³"}

CELL, ROW, LABEL, HEAD, MARGIN = 58, 24, 440, 132, 12
STYLE = """
 svg { --ink: #1f2328; --faint: #6e7781; --paper: #ffffff; --none: #eef0f2;
  --p3: #d3e6f5; --p2: #b5d4ec; --p1: #8fbcdf; --f1: #fbd3a4; --f2: #f5a95c; --f3: #e2703a }
 @media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --faint: #9aa4ae; --paper: #16191d; --none: #24292f;
  --p3: #17324a; --p2: #1d4566; --p1: #265c88; --f1: #6b4413; --f2: #94520f; --f3: #b03a16 } }
 text { font: 12px system-ui, sans-serif; fill: var(--ink) } .faint { fill: var(--faint) }
 .paper { fill: var(--paper) } .none { fill: var(--none) }
 .p3 { fill: var(--p3) } .p2 { fill: var(--p2) } .p1 { fill: var(--p1) }
 .f1 { fill: var(--f1) } .f2 { fill: var(--f2) } .f3 { fill: var(--f3) }
"""
LEGEND = (
    *(("p3", "below 1 % of the bound"), ("p2", "below 10 %"), ("p1", "below 1")),
    *(("f1", "above the bound"), ("f2", "above 100 times"), ("f3", "above 10,000 times, or not finite")),
    ("none", "not claimed, or not run"),
)

Record = dict[str, Any]


def record() -> Record:
    """What was measured."""
    found: Record = json.loads(DATA.read_text(encoding="utf-8"))
    return found


def columns(data: Record) -> list[str]:
    """The table's columns."""
    return list(next(peer["cells"] for peer in data["peers"] if peer["cells"]))


def kind(cell: Record) -> str:
    """The class of a cell's colour."""
    if "power" in cell:
        return {0: "p3", 1: "p3", 2: "f1"}.get(cell["power"], "f3")
    if cell["status"] not in ("pass", "fail"):
        return "none"
    ratio = float(cell["ratio"])
    if cell["status"] == "pass":
        return "p3" if ratio < 0.01 else "p2" if ratio < 0.1 else "p1"
    return "f1" if ratio < 100 else "f2" if ratio < 10000 else "f3"


def text(cell: Record) -> str:
    """What stands in a cell."""
    if "power" in cell:
        return POWERS.get(cell["power"], f"b^{cell['power']}")
    if cell["status"] not in ("pass", "fail"):
        return "–"
    ratio = float(cell["ratio"])
    return (
        "0" if ratio == 0 else "∞" if ratio == float("inf") else f"{ratio:.1g}".replace("e+0", "e").replace("e-0", "e-")
    )


def figure() -> str:
    """The heat map as SVG; it has the colours of the reader's light or dark scheme."""
    data = record()
    names, peers = columns(data), data["peers"]
    width, height = LABEL + CELL * len(names) + 2 * MARGIN + 60, HEAD + ROW * len(peers) + 2 * MARGIN + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<title>Published losses, largest error over its bound for each property</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
    ]
    for x, name in enumerate(names):
        at = MARGIN + LABEL + CELL * x + CELL / 2
        parts.append(f'<text transform="translate({at:g} {MARGIN + HEAD - 8}) rotate(-40)">{escape(name)}</text>')
    for y, peer in enumerate(peers):
        top = MARGIN + HEAD + ROW * y
        parts.append(f'<text x="{MARGIN}" y="{top + 16}">{escape(_label(data, peer))}</text>')
        if not peer["cells"]:
            box = f'x="{MARGIN + LABEL}" y="{top}" width="{CELL * len(names) - 2}" height="{ROW - 2}"'
            parts.append(f'<rect class="none" {box}/>')
            parts.append(f'<text class="faint" x="{MARGIN + LABEL + 8}" y="{top + 16}">{escape(peer["reason"])}</text>')
        for x, name in enumerate(names if peer["cells"] else ()):
            cell, left = peer["cells"][name], MARGIN + LABEL + CELL * x
            box = f'x="{left}" y="{top}" width="{CELL - 2}" height="{ROW - 2}"'
            parts.append(f'<rect class="{kind(cell)}" {box}><title>{escape(_told(cell))}</title></rect>')
            parts.append(f'<text x="{left + CELL / 2 - 1:g}" y="{top + 16}" text-anchor="middle">{text(cell)}</text>')
    left, top = MARGIN, height - MARGIN - 14
    for name, words in LEGEND:
        parts.append(f'<rect class="{name}" x="{left}" y="{top}" width="14" height="14"/>')
        parts.append(f'<text x="{left + 19}" y="{top + 11}">{words}</text>')
        left += 38 + round(6.4 * len(words))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _label(data: Record, peer: Record) -> str:
    return f"{_versioned(data, peer['package'])}: {peer['about'].replace('`', '')}"


def _versioned(data: Record, package: str) -> str:
    known = data["environment"] | data["environment"]["packages"]
    return f"{package} {(known[package] or '').partition('+')[0]}"


def _told(cell: Record) -> str:
    if "power" in cell:
        return f"peak memory x {cell['times']} from {cell['from']} to {cell['to']} pairs"
    if cell["status"] not in ("pass", "fail"):
        return f"not tested: {cell['reason']}"
    where = f"{cell['property']}, case {cell['case']}"
    return f"{cell['checks']} checks, {cell['failed']} above the bound; the largest: {where} {cell['reason']}".strip()


def above(data: Record) -> str:
    """A table of the cells above their bound, with what was found and the command that shows it."""
    head = ["package", "loss", "property", "checks above", "error / bound", "worst case, and what was found"]
    lines = []
    for peer in data["peers"]:
        for name, cell in peer["cells"].items():
            if cell["status"] != "fail":
                continue
            ratio = "not finite" if cell["ratio"] == "inf" else f"{cell['ratio']:.3g}"
            # the reason's other marks are meant
            what = f"{command(peer, cell)}: {cell['reason'].replace('|', chr(92) + '|')}"
            share = f"{cell['failed']} of {cell['checks']}"
            lines.append([_versioned(data, peer["package"]), peer["about"], name, share, ratio, what])
    return table(head, lines, left=(0, 1, 2, 5))


def command(peer: Record, cell: Record) -> str:
    """The words that follow ``contrastile verify --loss peers.adapters:``, as code."""
    return f"`{peer['name']} --property {cell['property']} --case {cell['case']}`"


def fact_list(data: Record) -> str:
    """A table of the facts, each with the command that shows it."""
    head = ["package", "property", "what its reproducer shows", "ranks", "found", "right", "reproducer"]
    lines = []
    for name in dict.fromkeys(row["fact"] for row in data["facts"]):
        rows = [row for row in data["facts"] if row["fact"] == name]
        first = rows[0]
        ranks, found = (", ".join(dict.fromkeys(str(row[key]) for row in rows)) for key in ("ranks", "found"))
        shown = [first["case"], first["says"], ranks, f"{first['what']} = {found}", first["right"], f"`{name}`"]
        lines.append([f"{first['package']} {first['version']}", *shown])
    return table(head, lines, left=(0, 1, 2, 4, 5, 6))


def measured(data: Record) -> str:
    """What stands between the markers."""
    e = data["environment"]
    interpreted = ", ".join(
        dict.fromkeys(_versioned(data, x["package"]) for x in data["peers"] if "inter" in x["where"])
    )
    versions = f"torch {e['torch']}, triton {e['packages']['triton']}, NumPy {e['numpy']}, Python {e['python']}"
    about = (
        f"{e['date'][:10]}; {versions}; on a CPU, and in Triton's interpreter: {interpreted}. "
        "[The record](../results/conformance.json) has every cell."
    )
    picture = f"../{FIGURE.parent.name}/{FIGURE.name}"
    parts = [
        about,
        f"[![Largest error over its bound]({picture})]({picture})",
        "### Above the bound",
        "What follows `contrastile verify --loss peers.adapters:`, in the folder `benchmarks`, shows the cell again; "
        "`TRITON_INTERPRET=1` stands before it for what runs in the interpreter. "
        "A bound is an element's own: an error of 1e-24 counts where the exact gradient is as small.",
        above(data),
        "### Facts",
        "What follows `python benchmarks/peers/reproduce.py` shows the fact again.",
        fact_list(data),
    ]
    return "\n\n".join(parts)


def page() -> str:
    """The page as it should be."""
    return spliced(PAGE.read_text(encoding="utf-8"), BEGIN, measured(record()))


if __name__ == "__main__":
    FIGURE.write_text(figure(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
