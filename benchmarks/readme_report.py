"""Writes the measured part of the README from the records in docs/results.

python benchmarks/readme_report.py            writes the README
python benchmarks/readme_report.py --check    exits 1 if it is not what the records say
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_run import tables  # noqa: E402
from gpu_run.plan import WIDTH  # noqa: E402
from gpu_run.record import file_name  # noqa: E402
from pages import ROOT, Page  # noqa: E402


def section(stem: str, data: dict[str, Any]) -> str:
    """Of a device's own record the comparison with the alternatives; of each what memory to spare buys."""
    device = data["environment"]["device"]
    beside = tables.peers(data, shares=False) if file_name(device) == f"{stem}.json" else ""
    more = tables.kept(data)
    parts = (
        (f"One {device}, bfloat16, d = {WIDTH}, the loss with all its gradients, medians of one run:", beside),
        (
            f"One {device} with memory to spare, in a run of its own, `keep=2048`: exponentials kept from "
            "forward spare the backward pass a product. Time, share of cuBLAS' rate for four products, "
            "peak extra memory:",
            more,
        ),
    )
    return "\n\n".join(f"{title}\n\n{text}" for title, text in parts if text)


PAGE = Page(
    script="benchmarks/readme_report.py",
    path=ROOT / "README.md",
    pattern="gpu_*.json",
    section=section,
    drawn=lambda data: False,
    draw=lambda data, path: None,
    nothing="Nothing has been measured on a GPU yet.",
)

if __name__ == "__main__":
    sys.exit(PAGE.main())
