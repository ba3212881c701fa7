"""Efficiency, time and memory against the number of ranks, and the share of the messages that is hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ring_run.plan import GATHER, LOCAL, RING
from ring_run.tables import MIB, alone, efficiency, families, hiding, median

_COLOURS = {RING: "tab:blue", GATHER: "tab:orange"}
_MARKS = "osv^D*"


def draw(data: dict[str, Any], path: Path) -> None:
    """Write the four panels of one record as SVG; the same data give the same file.

    Args:
        data: the record.
        path: ends in .svg.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": "contrastile", "font.size": 9}):
        figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
        _efficiency(axes[0, 0], data)
        _time(axes[0, 1], data)
        _memory(axes[1, 0], data)
        _hidden(axes[1, 1], data)
        figure.suptitle(f"{data['environment']['device']}, {data['environment']['ranks']} ranks, forward and backward")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _lines(rows: list[dict[str, Any]], how: str) -> list[dict[str, Any]]:
    """A rank alone, then the ranks that share by this schedule."""
    return sorted((row for row in rows if row["exchange"] in (how, LOCAL)), key=lambda row: row["n"])


def _each(data: dict[str, Any], kind: str) -> Any:
    for mark, (pairs, d, rows) in zip(_MARKS, families(data, kind), strict=False):
        for how in (RING, GATHER):
            own = _lines(rows, how)
            if len(own) > 1:
                style = {"color": _COLOURS[how], "marker": mark, "markersize": 4}
                yield pairs, d, how, own, alone(rows), style


def _ranks(axes: Any, data: dict[str, Any]) -> None:
    sizes = sorted({row["n"] for row in data["times"] if "n" in row})
    axes.set(xscale="log", xlabel="ranks")
    axes.set_xticks(sizes, [str(n) for n in sizes], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _efficiency(axes: Any, data: dict[str, Any]) -> None:
    for kind, line, words in (("weak", "-", "a rank"), ("strong", "--", "altogether")):
        for pairs, d, how, own, one, style in _each(data, kind):
            if one is not None:
                label = f"{how}, {pairs:,} {words}, d = {d}"
                axes.plot([r["n"] for r in own], [100 * efficiency(r, one) for r in own], line, label=label, **style)
    axes.axhline(100, color="k", linewidth=0.8)
    axes.set(ylabel="efficiency, % of the rate of a rank alone", ylim=(0, 120))
    _ranks(axes, data)


def _time(axes: Any, data: dict[str, Any]) -> None:
    for pairs, d, how, own, one, style in _each(data, "strong"):
        axes.plot([r["n"] for r in own], [median(r) for r in own], label=f"{how}, b = {pairs:,}, d = {d}", **style)
        if one is not None and how == RING:
            axes.plot([r["n"] for r in own], [median(one) / r["n"] for r in own], "k:", linewidth=0.8)
    axes.set(yscale="log", ylabel="ms; dotted: a rank alone, divided by n")
    _ranks(axes, data)


def _memory(axes: Any, data: dict[str, Any]) -> None:
    for pairs, d, how, own, _, style in _each(data, "strong"):
        known = [row for row in own if row.get("peak_bytes")]
        label = f"{how}, b = {pairs:,}, d = {d}"
        axes.plot([r["n"] for r in known], [r["peak_bytes"] / MIB for r in known], label=label, **style)
    axes.set(yscale="log", ylabel="peak extra memory of a rank, MiB")
    _ranks(axes, data)


def _hidden(axes: Any, data: dict[str, Any]) -> None:
    found = hiding(data)
    names = [f"{each['rows'] // 1024}k, d = {each['d']}\n{each['exchange']}" for each in found]
    axes.bar(range(len(found)), [100 * each["share"] for each in found], color=[_COLOURS[e["exchange"]] for e in found])
    axes.set_xticks(range(len(found)), names, fontsize="x-small")
    axes.set(ylabel="share of the messages' time that is hidden, %", ylim=(0, 100), xlabel="pairs a rank")
    axes.grid(alpha=0.3, axis="y")
