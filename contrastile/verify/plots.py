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
"""The colours on light paper, and what they are on dark paper."""

LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "bound": ("a-priori bound", {"color": "#c2410c"}),
    "probable": ("probabilistic bound", {"color": "#c2410c", "linestyle": "--"}),
    "plain": ("plain computation, same dtype", {"color": "#6b7280", "linestyle": ":"}),
    "error": ("measured error", {"color": "#1d6fd1", "marker": "o", "markersize": 3}),
}
"""What is drawn at each point: the key of ``Point``, its name, and how it looks."""


def figure(rows: Sequence[tuple[str, Sequence[Point]]], axes: Sequence[str]) -> str:
    """An ``<svg>`` element: a row of plots for each titled list of points, a column for each axis, and the legend.

    An error of 0 or NaN is left out. The same points give the same text.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**LOOK, "font.size": 9}):
        drawn = Figure(figsize=(2.7 * len(axes), 2.0 * len(rows) + 0.4), layout="constrained")
        places = drawn.subplots(len(rows), len(axes), squeeze=False, sharey="row")
        for (title, points), plots in zip(rows, places, strict=True):
            for axis, plot in zip(axes, plots, strict=True):
                here = sorted((each for each in points if each["axis"] == axis), key=lambda each: each["x"])
                sizes = [each["x"] for each in here]
                for name, (about, look) in LINES.items():
                    plot.plot(sizes, [each[name] for each in here], label=about, **look)  # type: ignore[literal-required]
                plot.set(title=title, xlabel=axis, xscale="log", yscale="log")
                plot.set_xticks(sizes, [f"{x:g}" for x in sizes])
                plot.minorticks_off()
                plot.grid(axis="y", alpha=0.3)
            # in one size of text: exponents above the line would be small
            plots[0].yaxis.set_major_formatter(lambda y, _: f"1e{np.log10(y):.0f}")
            low, high = np.log10(plots[0].get_ylim())
            plots[0].set_ylim(10 ** np.floor(low), 10 ** np.ceil(high))
        names = drawn.axes[0].get_legend_handles_labels()
        drawn.legend(*names, loc="outside lower center", ncols=len(LINES), frameon=False)
        return svg(drawn, ON_DARK)


def svg(figure: Any, on_dark: Mapping[str, str]) -> str:
    """A figure of matplotlib as an ``<svg>`` element: without paper, in the reader's own font and scheme."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    # the font that it was laid out with is wider, and rarely installed
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", file.getvalue())
    schemes = ({color: color for color in on_dark}, on_dark)
    light, dark = ("".join(f"--c{color[1:]}:{to};" for color, to in each.items()) for each in schemes)
    text = re.sub("|".join(on_dark), lambda color: f"var(--c{color[0][1:]})", text)
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    # a part of a page has no declaration of XML
    head, _, rest = text[text.index("<svg") :].partition(">")
    return f"{head}>{style}{rest}"
