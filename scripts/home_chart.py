"""The chart of a GPU: time and memory of a choice of the implementations, beside each other or for phones."""

from __future__ import annotations

import math
from typing import Any

from page_tables import GIB, OURS, Data, Row, measured, median

from contrastile.verify import plots

LINES = {
    OURS[0]: ("#c2570c", "#ffb454", "o"),
    OURS[1]: ("#2f55c7", "#8fb0ff", "s"),
    "open_clip formula": ("#5b6470", "#a3acb8", "v"),
    "open_clip formula, compiled": ("#1b1f24", "#e6e8eb", "^"),
    "chunked PyTorch, compiled": ("#15803d", "#86efac", "P"),
    "liger-kernel x2": ("#a21caf", "#f0abfc", "D"),
}
"""Ours, what PyTorch does, and the fastest public kernel: the colours on light and on dark paper, and the marker."""


def chart(data: Data, *, phone: bool = False) -> str:
    """The chart of one record, as an SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    e = data["environment"]
    more = {"font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold"}
    with matplotlib.rc_context({**plots.LOOK, **more}):
        shape, size = ((2, 1), (4.9, 7.6)) if phone else ((1, 2), (9.8, 4.4))
        figure = Figure(figsize=size, layout="constrained")
        time, memory = figure.subplots(*shape)
        _draw(time, memory, _chosen(data))
        title = f"{e['device']}, bfloat16, d = 512, {e['date'][:10]}"
        look: dict[str, Any] = {"ncols": 2, "fontsize": 9.5} if phone else {"ncols": 3}
        look |= {"frameon": False, "title": title, "title_fontsize": 11, "loc": "outside lower center"}
        figure.legend(*time.get_legend_handles_labels(), **look)
        return plots.svg(figure, plots.ON_DARK | {light: dark for light, dark, _ in LINES.values()})


def _draw(time: Any, memory: Any, lines: dict[str, list[Row]]) -> None:
    for name, rows in lines.items():
        color, _, marker = LINES[name]
        look: dict[str, Any] = {"color": color, "marker": marker, "label": name}
        look |= {"linewidth": 2.8, "zorder": 3} if name in OURS else {"linewidth": 1.5, "linestyle": "--"}
        time.plot([row["b"] for row in rows], [median(row) for row in rows], **look)
        known = [row for row in rows if row.get("peak_bytes")]
        memory.plot([row["b"] for row in known], [row["peak_bytes"] / GIB for row in known], **look)
    sizes = sorted({row["b"] for rows in lines.values() for row in rows})
    for axes, title, unit in ((time, "Time, forward and backward", "ms"), (memory, "Peak extra memory", "GiB")):
        axes.set(xscale="log", yscale="log", xlabel="batch")
        axes.set_title(title, loc="left")
        axes.set_xticks(sizes, [f"{b // 1024}k" if b % 1024 == 0 else f"{b:,}" for b in sizes])
        # a labelled line below the lowest point
        axes.set_ylim(bottom=10 ** math.floor(math.log10(axes.get_ylim()[0] * 1.2)))
        axes.yaxis.set_major_formatter(lambda y, _, unit=unit: f"{y:g} {unit}")
        axes.minorticks_off()
        axes.grid(alpha=0.6)


def _chosen(data: Data) -> dict[str, list[Row]]:
    """The chart's lines, by batch."""
    rows = sorted(measured(data, "peers", what="both", graph=False, d=512, scale=100.0), key=lambda row: int(row["b"]))
    found = {name: [row for row in rows if row["name"] == name] for name in LINES}
    return {name: own for name, own in found.items() if own}
