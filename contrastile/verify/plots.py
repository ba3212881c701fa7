"""Plots as SVG text, without any library: errors against a size on logarithmic axes, and their bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from contrastile.verify.comparison import Point

LINES = {
    "bound": "a-priori bound",
    "probable": "probabilistic bound",
    "plain": "plain computation, same dtype",
    "error": "measured error",
}
"""What is drawn at each point: the key of ``Point``, and its name."""

STYLE = """
.plot { font: 11px system-ui, sans-serif; color: #1b1f24; max-width: 100%; height: auto; }
.plot text { fill: currentColor; }
.plot .grid { stroke: currentColor; opacity: 0.15; }
.plot polyline { fill: none; stroke-width: 1.6; }
.plot .bound { stroke: #c2410c; } .plot .probable { stroke: #c2410c; stroke-dasharray: 5 3; }
.plot .plain { stroke: #6b7280; stroke-dasharray: 2 2; } .plot .error { stroke: #1d6fd1; }
.plot circle.error { fill: #1d6fd1; }
@media (prefers-color-scheme: dark) {
  .plot { color: #e6e8eb; }
  .plot .bound, .plot .probable { stroke: #fb923c; } .plot .plain { stroke: #9ca3af; }
  .plot .error { stroke: #60a5fa; } .plot circle.error { fill: #60a5fa; }
}
"""
"""Of plots alone, light and dark."""

_WIDTH, _HEIGHT = 250, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 38, 16, 22, 30


def plot(title: str, axis: str, points: Sequence[Point]) -> str:
    """One plot: relative error against one axis.

    Args:
        title: above it.
        axis: which points are drawn: those whose ``axis`` it is.
        points: any.

    Returns:
        An ``<svg>`` element; without points, an empty frame.
    """
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
    return f'<svg class="plot" {_NAMESPACE} {size} role="img">{_inside(title, axis, points)}</svg>'


def legend() -> str:
    """The names of the lines, as a plot without axes."""
    return f'<svg class="plot" {_NAMESPACE} viewBox="0 0 440 40" width="440" role="img">{_names()}</svg>'


def _names() -> str:
    parts = []
    for place, (name, about) in enumerate(LINES.items()):
        x, y = 6 + 224 * (place % 2), 12 + 18 * (place // 2)
        parts.append(f'<polyline class="{name}" points="{x},{y} {x + 24},{y}"/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}">{escape(about)}</text>')
    return "".join(parts)


def figure(rows: Sequence[tuple[str, Sequence[Point]]], axes: Sequence[str]) -> str:
    """A picture of its own: a row of plots for each titled list of points, a column for each axis, and the legend."""
    width, height = _WIDTH * len(axes), _HEIGHT * len(rows) + 44
    parts = [f"<style>{STYLE}</style>", f'<g transform="translate(4 {_HEIGHT * len(rows) + 2})">{_names()}</g>']
    for i, (title, points) in enumerate(rows):
        for j, axis in enumerate(axes):
            parts.append(f'<g transform="translate({_WIDTH * j} {_HEIGHT * i})">{_inside(title, axis, points)}</g>')
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg class="plot" {_NAMESPACE} {size} role="img">{"".join(parts)}</svg>\n'


_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'


def _inside(title: str, axis: str, points: Sequence[Point]) -> str:
    """A plot's elements, its top left corner at the origin."""
    here = sorted((each for each in points if each["axis"] == axis), key=lambda each: each["x"])
    parts = [f"<title>{escape(f'{title}: error against {axis}')}</title>"]
    parts.append(f'<text x="{_LEFT}" y="13" font-weight="600">{escape(title)}</text>')
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" text-anchor="end">{escape(axis)}</text>')
    drawn = [(each["x"], {name: each[name] for name in LINES}) for each in here]  # type: ignore[literal-required]
    heights = [y for _, values in drawn for y in values.values() if 0 < y < math.inf]
    if not heights:
        return "".join([*parts, f'<text x="{_LEFT}" y="{_HEIGHT // 2}">nothing was measured</text>'])
    low, high = math.floor(math.log10(min(heights))), math.ceil(math.log10(max(heights)))
    high += high == low
    first, last = math.log(drawn[0][0]), math.log(drawn[-1][0])

    def across(x: float) -> float:
        share = (math.log(x) - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        # an error of 0 lies on the axis
        share = (math.log10(y) - low) / (high - low) if y > 0 else 0.0
        return _HEIGHT - _BOTTOM - min(max(share, 0.0), 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    for power in range(low, high + 1, max(1, (high - low) // 5)):
        y = down(10.0**power)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for x, _ in drawn:
        parts.append(f'<text x="{across(x):.1f}" y="{_HEIGHT - _BOTTOM + 13}" text-anchor="middle">{x:g}</text>')
    for name in LINES:
        line = " ".join(f"{across(x):.1f},{down(values[name]):.1f}" for x, values in drawn)
        parts.append(f'<polyline class="{name}" points="{line}"/>')
    parts += [f'<circle class="error" cx="{across(x):.1f}" cy="{down(v["error"]):.1f}" r="2.4"/>' for x, v in drawn]
    return "".join(parts)
