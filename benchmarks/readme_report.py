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
from pages import ROOT, Page  # noqa: E402


def section(stem: str, data: dict[str, Any]) -> str:
    """One record's comparison with the alternatives; nothing of a record that has none."""
    beside = tables.peers(data, shares=False)
    if not beside:
        return ""
    device = data["environment"]["device"]
    return f"One {device}, bfloat16, d = {WIDTH}, the loss with all its gradients, medians of one run:\n\n{beside}"


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
