"""Time and memory against the batch, log-log, with the line that the ceiling draws."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from gpu_run.plan import Point
from gpu_run.tables import measured, median


def draw(data: dict[str, Any], path: Path) -> None:
    """Write the comparison of one record as SVG; the same data give the same file.

    Args:
        data: the record.
        path: ends in .svg.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = measured(data, group="peers")
    with matplotlib.rc_context({"svg.hashsalt": "contrastile", "font.size": 9}):
        figure, (time, memory) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
        for name in dict.fromkeys(row["implementation"] for row in rows):
            own = sorted((row for row in rows if row["implementation"] == name), key=lambda row: row["b"])
            style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 2.4 if "contrastile" in name else 1.1}
            time.plot([row["b"] for row in own], [median(row) for row in own], label=name, **style)
            known = [row for row in own if "peak_bytes" in row]
            memory.plot([row["b"] for row in known], [row["peak_bytes"] / 2**20 for row in known], label=name, **style)
        sizes = sorted({row["b"] for row in rows})
        tops = [statistics.median(x for row in rows if row["b"] == b for x in row["ceiling_tflops"]) for b in sizes]
        limit = [Point(b, rows[0]["d"]).flops / top * 1e-9 for b, top in zip(sizes, tops, strict=True)]
        time.plot(sizes, limit, "k--", linewidth=1, label="limit: 8 b² d / ceiling")
        for axes, label in ((time, "forward and backward, ms"), (memory, "peak extra memory, MiB")):
            axes.set(xscale="log", yscale="log", xlabel="batch b", ylabel=label)
            axes.set_xticks(sizes, [f"{b:,}" for b in sizes], minor=False)
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        time.legend(fontsize="small")
        figure.suptitle(f"{data['environment']['device']}, d = {rows[0]['d']}, {rows[0]['dtype']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
