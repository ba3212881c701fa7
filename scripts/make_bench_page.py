"""Writes the measured part of docs/benchmarks/cpu.md from docs/results/cpu_*.json (``contrastile bench --json``)."""

import json
from pathlib import Path
from typing import Any

from page_writing import spliced, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "cpu.md"
BEGIN = "<!-- measured: written by scripts/make_bench_page.py from docs/results/cpu_*.json -->"
HEAD = (
    "variant",
    "b",
    "d",
    "",
    "time, s",
    "of matmul",
    "x plain",
    "x aligned",
    "peak extra MiB",
    "memory x plain",
    "rounds",
)


def measured() -> str:
    """What stands between the markers."""
    runs = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "docs" / "results").glob("cpu_*.json"))
    ]
    rows = [row for run in runs for row in run["rows"] if row["status"] == "measured"]
    rows.sort(key=lambda row: (row["nominal_batch"], row["variant"], row["implementation"] == "plain"))
    facts = runs[0]["environment"]
    about = (
        f"{facts['cpu']}, {facts['threads']} threads ({facts['cpu_capability']}), torch {facts['torch']}; "
        "float32, symmetric loss, forward and backward, scale 100."
    )
    return f"{about}\n\n{table(HEAD, map(_cells, rows), left=(0, HEAD.index('')))}"


def _cells(row: dict[str, Any]) -> list[str]:
    seconds = row["seconds"]
    return [
        row["variant"],
        f"{row['batch']:,}",
        str(row["width"]),
        row["implementation"],
        f"{seconds['median']:.3g} ({seconds['lower']:.3g} to {seconds['upper']:.3g})",
        f"{row['share_of_matmul']:.0%}",
        _ratio(row["time_over_plain"]),
        _ratio(row["time_over_aligned"]),
        f"{row['peak_extra_bytes'] / 2**20:,.0f}",
        _ratio(row["memory_over_plain"]),
        str(len(seconds["samples"])),
    ]


def _ratio(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}"


def page() -> str:
    """The page as it should be."""
    return spliced(PAGE.read_text(encoding="utf-8"), BEGIN, measured())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
