"""The figure of a record: time and memory against the batch, or efficiency and memory against the number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.tables import MIB, labelled, limit, measured, median, rate

Data = dict[str, Any]


def drawn(data: Data) -> bool:
    """Whether a record has a figure."""
    return bool(measured(data, "peers")) or bool(_families(data))


def draw(data: Data, path: Path) -> None:
    """Write the figure of one record as SVG; the same data give the same file.

    Args:
        data: the record.
        path: ends in .svg.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": "contrastile", "font.size": 9}):
        figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
        (_over_ranks if _families(data) else _over_batches)(axes[0], axes[1], data)
        e = data["environment"]
        title = e["device"] if e.get("ranks", 1) == 1 else f"{e['ranks']} x {e['device']}"
        figure.suptitle(f"{title}, forward and backward")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _over_batches(time: Any, memory: Any, data: Data) -> None:
    rows = measured(data, "peers", what="both")
    sizes = sorted({row["b"] for row in rows})
    for label in dict.fromkeys(map(labelled, rows)):
        own = sorted((row for row in rows if labelled(row) == label), key=lambda row: row["b"])
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 2.4 if "contrastile" in label else 1.1}
        time.plot([row["b"] for row in own], [median(row) for row in own], label=label, **style)
        known = [row for row in own if row.get("peak_bytes")]
        memory.plot([row["b"] for row in known], [row["peak_bytes"] / MIB for row in known], label=label, **style)
    time.plot(sizes, [limit(rows, b) for b in sizes], "k--", linewidth=1, label="limit: 8 b² d / ceiling")
    _finish(time, "batch b", "forward and backward, ms", sizes)
    _finish(memory, "batch b", "peak extra memory, MiB", sizes)
    for axes in (time, memory):
        axes.set(yscale="log")
    time.legend(fontsize="small")


def _families(data: Data) -> list[tuple[str, list[dict[str, Any]]]]:
    """Rows of one batch, or of as many pairs on every rank, from one rank on."""
    rows = [row for row in measured(data, "steps", what="both", graph=False) if row["exchange"] != "auto"]
    found = []
    for each, key, words in ((True, "rows", "a rank"), (False, "b", "in all")):
        wanted = dict.fromkeys((row[key], row["d"]) for row in rows if row["each"] == each and row["n"] == 1)
        for size, d in sorted(wanted):
            for how in ("ring", "gather"):
                here = [r for r in rows if (r[key], r["d"]) == (size, d) and r["exchange"] in (how, "local")]
                if len({row["n"] for row in here}) > 1:
                    found.append((f"{how}, {size:,} {words}, d = {d}", sorted(here, key=lambda row: int(row["n"]))))
    return found


def _over_ranks(efficiency: Any, memory: Any, data: Data) -> None:
    sizes = sorted({row["n"] for _, rows in _families(data) for row in rows})
    for i, (label, rows) in enumerate(_families(data)):
        style = {"marker": "o", "markersize": 4, "linestyle": "-" if "a rank" in label else "--", "color": f"C{i % 10}"}
        n = [row["n"] for row in rows]
        efficiency.plot(n, [100 * rate(row) / rate(rows[0]) for row in rows], label=label, **style)
        known = [row for row in rows if row.get("peak_bytes")]
        memory.plot([row["n"] for row in known], [row["peak_bytes"] / MIB for row in known], label=label, **style)
    _finish(efficiency, "ranks", "efficiency, % of the rate of a rank alone", sizes)
    _finish(memory, "ranks", "peak extra memory of a rank, MiB", sizes)
    efficiency.set(ylim=(0, 110))
    memory.set(yscale="log")
    efficiency.legend(fontsize="x-small")


def _finish(axes: Any, label: str, what: str, sizes: list[int]) -> None:
    axes.set(xscale="log", xlabel=label, ylabel=what)
    axes.set_xticks(sizes, [f"{x:,}" for x in sizes], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
