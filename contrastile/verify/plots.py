"""Plots of errors against a size on logarithmic axes, and of their bounds, as SVG text."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from contrastile.verify.comparison import Point

_INK, _FAINT = "#1b1f24", "#d6dae0"
LOOK: dict[Any, Any] = {
    "svg.hashsalt": "contrastile",
    "svg.fonttype": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), _INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), _FAINT),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
}
"""Settings of matplotlib for every chart: the same data give the same text."""
ON_DARK = {_INK: "#e6e8eb", _FAINT: "#454d58", "#c2410c": "#ffb454", "#6b7280": "#a3acb8", "#1d6fd1": "#8fb0ff"}
"""The colours on a light background, and the colours that replace them on a dark background."""

LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "bound": ("a-priori bound", {"color": "#c2410c"}),
    "probable": ("probabilistic bound", {"color": "#c2410c", "linestyle": "--"}),
    "plain": ("plain computation, same dtype", {"color": "#6b7280", "linestyle": ":"}),
    "error": ("measured error", {"color": "#1d6fd1", "marker": "o", "markersize": 3}),
}
"""The lines of a plot: the key of ``Point``, the label, and the style."""


def figure(rows: Sequence[tuple[str, Sequence[Point]]], axes: Sequence[str]) -> str:
    """An ``<svg>`` element: a row of plots for each titled list of points, a column for each axis, and the legend.

    An error of 0 or NaN is left out. The same points give the same text.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**LOOK, "font.size": 9}):
        canvas = Figure(figsize=(2.7 * len(axes), 2.0 * len(rows) + 0.4), layout="constrained")
        plots_of_rows = canvas.subplots(len(rows), len(axes), squeeze=False, sharey="row")
        for (title, points), plots in zip(rows, plots_of_rows, strict=True):
            for axis, plot in zip(axes, plots, strict=True):
                on_axis = sorted((point for point in points if point["axis"] == axis), key=lambda point: point["x"])
                sizes = [point["x"] for point in on_axis]
                for name, (label, style) in LINES.items():
                    plot.plot(sizes, [point[name] for point in on_axis], label=label, **style)  # type: ignore[literal-required]
                plot.set(title=title, xlabel=axis, xscale="log", yscale="log")
                plot.set_xticks(sizes, [f"{x:g}" for x in sizes])
                plot.minorticks_off()
                plot.grid(axis="y", alpha=0.3)
            # 1e-3, because the exponent of 10^-3 would be too small to read
            plots[0].yaxis.set_major_formatter(lambda y, _: f"1e{np.log10(y):.0f}")
            low, high = np.log10(plots[0].get_ylim())
            plots[0].set_ylim(10 ** np.floor(low), 10 ** np.ceil(high))
        legend_entries = canvas.axes[0].get_legend_handles_labels()
        canvas.legend(*legend_entries, loc="outside lower center", ncols=len(LINES), frameon=False)
        return svg(canvas, ON_DARK)


def svg(figure: Any, on_dark: Mapping[str, str]) -> str:
    """A figure of matplotlib as an ``<svg>`` element: no background, and the font and colour scheme of the reader."""
    file = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=no_metadata)
    # the font of the layout is rarely installed; the replacement is narrower
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", file.getvalue())
    schemes = ({color: color for color in on_dark}, on_dark)
    light, dark = ("".join(f"--c{color[1:]}:{shade};" for color, shade in scheme.items()) for scheme in schemes)
    text = re.sub("|".join(on_dark), lambda color: f"var(--c{color[0][1:]})", text)
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    # an element inside a page has no XML declaration
    start, _, rest = text[text.index("<svg") :].partition(">")
    return f"{start}>{style}{rest}"
