"""Writes the tables of docs/explanation/exact.md from the records of errors beside plain PyTorch's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from page_writing import spliced, table

ROOT = Path(__file__).parent.parent
PAGE, DATA = ROOT / "docs" / "explanation" / "exact.md", ROOT / "docs" / "results" / "certain_nvidia_h200.json"
BEGIN = "<!-- measured: written by scripts/make_exact_page.py -->"
DRAWN = "<!-- measured: drawn, written by scripts/make_exact_page.py -->"

SHOWN = {
    "clip, saturated, seed 0, scale 100": "CLIP, certain pairs, scale 100",
    "clip, saturated, seed 1, scale 100": "the same, another seed",
    "clip, saturated, scale 300": "the same, scale 300",
    "info_nce, ids dropped, scale 100": "InfoNCE with ids, scale 100",
    "nt_xent, scale 100": "NT-Xent, scale 100",
    "sup_con, classes of 2, scale 100": "SupCon, classes of 2",
    "sup_con, classes of 8, scale 100": "SupCon, classes of 8",
    "clip, norm 30, scale 100": "CLIP, norm 30",
    "clip, norm 3000, scale 100": "CLIP, norm 3,000",
}
BACKENDS = ("plain", "torch", "triton", "cupy")


def errors(rows: list[dict[str, Any]], dtype: str, batch: int) -> str:
    """Errors of the gradient of the first features and, behind it, of the loss, in each backend's own precision."""
    lines = []
    for problem, name in SHOWN.items():
        found = {
            row["backend"]: row
            for row in rows
            if (row["problem"], row["dtype"], row["b"]) == (problem, dtype, batch)
            and row["precision"] == ("split" if (row["backend"], dtype) == ("triton", "float32") else "ieee")
        }
        lines.append([name, *(f"{found[x]['first']:.0e} ({found[x]['loss']:.0e})" for x in BACKENDS)])
    return table(["features", *BACKENDS], lines)


def rows_of(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a record by the names of their columns."""
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def measured() -> str:
    """What stands between the markers."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    rows = rows_of(data)
    device = data["environment"]["device"]
    parts = [
        f"One {device}, d = 64: relative error of the gradient and, in brackets, of the loss.\n",
        "float32, b = 256:\n",
        errors(rows, "float32", 256),
        "\nbfloat16, b = 4,096:\n",
        errors(rows, "bfloat16", 4096),
    ]
    return "\n".join(parts)


def drawn() -> str:
    """Of problems at random: how many results were noisier than the plain computation's, and the other way round."""
    lines = []
    for stem, where in (("cpu", "a CPU"), ("nvidia_h200", "an H200")):
        data = json.loads((ROOT / "docs" / "results" / f"drawn_{stem}.json").read_text(encoding="utf-8"))
        for backend in dict.fromkeys(row["backend"] for row in data["counts"]):
            for part in ("loss", "features", "scale"):
                rows = [row for row in data["counts"] if (row["backend"], row["of"]) == (backend, part)]
                totals = [f"{sum(row[key] for row in rows):,}" for key in ("results", "beyond", "plain_beyond")]
                lines.append([f"`{backend}` on {where}", part if part == "loss" else f"gradient of {part}", *totals])
    return table(["backend", "of", "results", "ours noisier", "plain noisier"], lines, left=(0, 1))


def page() -> str:
    """The page as it should be."""
    return spliced(spliced(PAGE.read_text(encoding="utf-8"), BEGIN, measured()), DRAWN, drawn())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
