"""The chart of the home page: time and memory of a choice of the implementations, for light, dark and phones."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.tables import GIB, measured, median

Data = dict[str, Any]

OURS = ("contrastile triton", "contrastile cupy")
HOME = {
    OURS[0]: ("#c2570c", "#ffb454", "o"),
    OURS[1]: ("#2f55c7", "#8fb0ff", "s"),
    "open_clip formula": ("#5b6470", "#a3acb8", "v"),
    "open_clip formula, compiled": ("#1b1f24", "#e6e8eb", "^"),
}
"""Always on the home page: the line's colour on light and on dark paper, and its marker."""
KERNELS = ("liger-kernel", "quack-kernels", "cut-cross-entropy", "inf_cl")
"""How the names of public kernels begin; the home page shows the fastest two."""
_OTHERS = (("#0f766e", "#5eead4", "D"), ("#a21caf", "#f0abfc", "P"))
_INK = {"light": ("#1b1f24", "#d6dae0"), "dark": ("#e6e8eb", "#454d58")}
_SVG = {"svg.hashsalt": "contrastile", "svg.fonttype": "none"}


def told(data: Data) -> str:
    """Where and when a record was measured, as the chart of the home page says it."""
    e = data["environment"]
    return f"{e['device']}, bfloat16, d = 512, commit {(e['commit'] or 'unknown')[:12]}"


def newest(records: Mapping[str, Data]) -> Data | None:
    """The latest record of one GPU on which open_clip's formula was measured beside a backend of ours."""
    alone = [data for data in records.values() if data["environment"].get("ranks", 1) == 1]
    here = [data for data in alone if {OURS[0], "open_clip formula"} <= set(_chosen(data))]
    return max(here, key=lambda data: str(data["environment"]["date"]), default=None)


def home(data: Data, folder: Path) -> None:
    """Write the chart of the home page: home-light.svg and home-dark.svg, and the two for phones, home-phone-*.svg.

    Text stays text, in the reader's own font; the same data give the same files.

    Args:
        data: the record, as ``newest`` gives it.
        folder: where the files go.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for theme in _INK:
        for phone in (False, True):
            path = folder / f"home{'-phone' if phone else ''}-{theme}.svg"
            path.write_text(_home(data, theme, phone=phone), encoding="utf-8")


def is_home(data: Data, folder: Path) -> bool:
    """Whether the chart in a folder says that it is of this record."""
    path = folder / "home-light.svg"
    return path.exists() and told(data) in path.read_text(encoding="utf-8")


def _home(data: Data, theme: str, *, phone: bool) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    ink, faint = _INK[theme]
    style = {**_SVG, "font.size": 11, "text.color": ink}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 12, "axes.titleweight": "bold"}
    style |= {"axes.edgecolor": faint, "grid.color": faint, "xtick.color": faint, "ytick.color": faint}
    style |= {"axes.labelcolor": ink, "xtick.labelcolor": ink, "ytick.labelcolor": ink}
    with matplotlib.rc_context(style):
        shape, size = ((2, 1), (4.9, 7.4)) if phone else ((1, 2), (9.8, 4.4))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(*shape)
        _home_lines(axes[0], axes[1], _chosen(data), theme)
        handles, labels = axes[0].get_legend_handles_labels()
        look = {"ncols": 2, "fontsize": 10} if phone else {"ncols": 3}
        look |= {"frameon": False, "title": told(data), "title_fontsize": 9, "loc": "outside lower center"}
        figure.legend(handles, labels, **look)
        return _saved(figure)


def _saved(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # the reader's own font: the one it was laid out with is wider, and rarely installed
    return re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", file.getvalue())


def _home_lines(time: Any, memory: Any, lines: dict[str, list[dict[str, Any]]], theme: str) -> None:
    others = iter(_OTHERS)
    for name, rows in lines.items():
        light, dark, marker = HOME.get(name) or next(others)
        look: dict[str, Any] = {"color": light if theme == "light" else dark, "marker": marker, "label": name}
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


def _chosen(data: Data) -> dict[str, list[dict[str, Any]]]:
    """The lines of the home page, by batch: ours, open_clip's formula, the fastest two public kernels."""
    rows = sorted(measured(data, "peers", what="both", graph=False, d=512, scale=100.0), key=lambda row: int(row["b"]))
    largest: dict[str, tuple[int, float]] = {}
    for row in rows:
        if row["name"].startswith(KERNELS):
            # the largest batch counts first, then the time there
            largest[row["name"]] = -row["b"], median(row)
    best = sorted(largest, key=lambda name: largest[name])[: len(_OTHERS)]
    found = {name: [row for row in rows if row["name"] == name] for name in (*HOME, *best)}
    return {name: own for name, own in found.items() if own}
