"""Writes the measured part of docs/scaling.md, and its figures, from the records in docs/results.

python benchmarks/ring_report.py            writes page and figures
python benchmarks/ring_report.py --check    exits 1 if the page is not what the records say
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from pages import ROOT, Page, card, noted, titled, versions, when  # noqa: E402
from ring_run import aims, figures, tables  # noqa: E402


def section(stem: str, data: dict[str, Any]) -> str:
    """Everything that one record shows."""
    e = data["environment"]
    sizes = "tiny sizes" if data["settings"]["smoke"] else f"{data['settings']['slot']:g} s samples"
    links = f"links {e['links']}" if e.get("links") else ""
    known = when(e), versions(e, ("torch", "triton", "nccl", "inf-cl")), links, card(e)
    about = noted(", ".join(filter(None, known)) + f"; {sizes}.", e)
    drawn = f"![Scaling, time, memory and hidden messages](results/{stem}.svg)" if _drawn(data) else ""
    comparison = "\n\n".join(filter(None, (tables.comparison(data), tables.peers(data))))
    parts = [
        ("Verified first", tables.verified(data)),
        ("What was aimed at", aims.aims(data)),
        ("The largest batch, in one call", tables.headline(data)),
        ("Weak scaling: as many pairs on every rank", tables.scaling(data, "weak")),
        ("Strong scaling: one batch", "\n\n".join(filter(None, (tables.scaling(data, "strong"), drawn)))),
        ("Memory of a rank against the number of ranks", tables.memory(data)),
        ("Ring or gather", tables.exchanges(data)),
        ("How much of the messages is hidden", tables.hidden(data)),
        ("One block beside one message", tables.overlap(data)),
        ("Beside the alternatives", comparison),
        ("Not measured, and why", tables.skipped(data)),
    ]
    title = titled(f"{e['ranks']} x {e['device']}", e)
    return "\n\n".join([title, about, *(f"#### {name}\n\n{text}" for name, text in parts if text)])


def _drawn(data: dict[str, Any]) -> bool:
    return bool(tables.measured(data, "scaling"))


PAGE = Page(
    script="benchmarks/ring_report.py",
    path=ROOT / "docs" / "scaling.md",
    pattern="ring_*.json",
    section=section,
    drawn=_drawn,
    draw=figures.draw,
    nothing="Nothing has been measured on several GPUs yet: `docs/results` holds no record.",
)

if __name__ == "__main__":
    sys.exit(PAGE.main())
