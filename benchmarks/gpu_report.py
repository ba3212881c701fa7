"""Writes the measured part of docs/performance.md, and its figures, from the records in docs/results.

python benchmarks/gpu_report.py            writes page and figures
python benchmarks/gpu_report.py --check    exits 1 if the page is not what the records say
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_run import figures, tables  # noqa: E402
from pages import END, ROOT, Page, card, noted, titled, versions, when  # noqa: E402


def section(stem: str, data: dict[str, Any]) -> str:
    """Everything that one record shows."""
    e = data["environment"]
    sizes = (
        f"{tables.number(data['settings']['slot'], 1)} s samples"
        if data["settings"]["smoke"] is False
        else "tiny sizes"
    )
    names = ("torch", "triton", "cupy-cuda13x", "inf-cl", "cut-cross-entropy", "liger-kernel", "quack-kernels")
    about = noted(", ".join(filter(None, (when(e), versions(e, names), card(e)))) + f"; {sizes}.", e)
    parts = [
        ("Verified first", tables.verified(data)),
        ("What was aimed at", tables.aims(data)),
        (
            "Beside every alternative",
            "\n\n".join(filter(None, (tables.comparison(data), tables.peers(data), _figure(stem, data)))),
        ),
        ("Memory, itemised", tables.memory(data)),
        ("Errors, relative to float64 on the same rounded features", tables.errors(data)),
        ("Checks", tables.checks(data)),
        ("Big batches, one call on one GPU", tables.big(data)),
        ("Other widths, scales and directions", tables.further(data)),
        ("Not measured, and why", tables.skipped(data)),
    ]
    return "\n\n".join([titled(e["device"], e), about, *(f"#### {title}\n\n{text}" for title, text in parts if text)])


def _figure(stem: str, data: dict[str, Any]) -> str:
    if not tables.measured(data, group="peers"):
        return ""
    return f"![Time and memory against the batch](results/{stem}.svg)"


PAGE = Page(
    script="benchmarks/gpu_report.py",
    path=ROOT / "docs" / "performance.md",
    pattern="gpu_*.json",
    section=section,
    drawn=lambda data: bool(tables.measured(data, group="peers")),
    draw=figures.draw,
    nothing="Nothing has been measured on a GPU yet: `docs/results` holds no record. `benchmarks/gpu.py` writes one.",
)
BEGIN, NOTHING, generated, spliced, main = PAGE.begin, PAGE.nothing, PAGE.generated, PAGE.spliced, PAGE.main

__all__ = ["BEGIN", "END", "NOTHING", "PAGE", "generated", "main", "section", "spliced"]

if __name__ == "__main__":
    sys.exit(main())
