"""The tables of docs/performance.md, each from the data of one record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from contrastile.bench.results import quartiles
from gpu_run.plan import CUPY, EVERY, FUSED, INF_CL, KEEPING, OPEN_CLIP, SAFE, WIDTH, Point

MIB = 2**20
WORKSPACE = 512 * MIB
Data = dict[str, Any]
Row = dict[str, Any]
POINT = ("b", "d", "scale", "what", "graph")
_ANCHOR = 65536
D_SCALE_AT, D_SCALE_AIM = 14.3, 2e-3


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, or "" without rows; numbers to the right."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    rule = " | ".join("---" if i == 0 else "---:" for i in range(len(head)))
    return "\n".join([f"| {' | '.join(head)} |", f"| {rule} |", *body]) if body else ""


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, thousands marked; "-" for what is not known."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "not finite"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.{digits - 1}e}"
    if value == 0:
        return "0"
    leading = math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits - 1 - leading)}f}"


def spread(values: Sequence[float], form: Callable[[float], str] = number) -> str:
    """Median and quartiles."""
    lower, middle, upper = quartiles(values)
    return f"{form(middle)} ({form(lower)} to {form(upper)})" if len(values) > 1 else form(middle)


def percent(value: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def measured(data: Data, **wanted: Any) -> list[Row]:
    """Timed rows that agree with all of ``wanted``."""
    rows = [row for row in data["times"] if row["status"] == "measured"]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def median(row: Row) -> float:
    """Milliseconds of one call."""
    return float(statistics.median(row["milliseconds"]))


def tflops(row: Row) -> float:
    """TFLOP/s of the products that are needed, in the median time."""
    return Point(*(row[name] for name in POINT)).flops / median(row) * 1e-9


def _reading(row: Row, name: str) -> str:
    found = row["readings"].get(name)
    return number(found[1]) if found else "-"


_TIMED = ("time, ms", "TFLOP/s", "ceiling, TFLOP/s", "of the ceiling")


def _timed(row: Row) -> list[str]:
    top = statistics.median(row["ceiling_tflops"])
    return [spread(row["milliseconds"]), number(tflops(row)), number(top), spread(row["fraction"], percent)]


def _where(row: Row) -> list[str]:
    path = "safe" if row["scale"] >= SAFE else "shared"
    return [number(row["b"], 1), str(row["d"]), f"{row['scale']:g}", path, "yes" if row["graph"] else "no"]


def _own(row: Row) -> list[str]:
    return [row["implementation"], *_where(row)]


_WHERE = ("b", "d", "scale", "path", "graph")


def aims(data: Data) -> str:
    """What was aimed at, and what was reached."""
    rows = []
    for row in measured(data, group="aims"):
        if "aim" not in row:
            continue
        reached = _yes(statistics.median(row["fraction"]) >= row["aim"])
        clock = [_reading(row, "clocks.sm"), _reading(row, "power.draw")]
        rows.append([*_own(row), *_timed(row), f"{100 * row['aim']:.0f} %", reached, *clock])
    return table(["implementation", *_WHERE, *_TIMED, "aim", "reached", "SM clock, MHz", "power, W"], rows)


def kept(data: Data) -> str:
    """What memory to spare buys: time, share of the ceiling and peak, with exponentials kept and without."""
    ways = (CUPY, KEEPING, EVERY)
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in measured(data, group="aims"):
        if row["implementation"] in ways:
            found.setdefault(tuple(row[name] for name in POINT), {})[row["implementation"]] = row
    rows = [
        [number(b, 1), str(d), *(_bought(several.get(way)) for way in ways)]
        for (b, d, *_), several in sorted(found.items())
        if len(several) > 1
    ]
    return table(["b", "d", *ways], rows) if rows else ""


def _bought(row: Row | None) -> str:
    if row is None:
        return "-"
    share, peak = percent(statistics.median(row["fraction"])), number(row["peak_bytes"] / MIB, 4)
    return f"{number(median(row))} ms, {share}, {peak} MiB"


def further(data: Data) -> str:
    """The rest of the grid: widths, scales, forward and backward by themselves."""
    rows = [[*_own(row), row["what"], *_timed(row)] for row in measured(data, group="grid")]
    return table(["implementation", *_WHERE, "what", *_TIMED], rows)


def peers(data: Data, *, shares: bool = True) -> str:
    """All implementations at each size: milliseconds, and at the anchor memory and, if wanted, the ceiling's share."""
    rows = measured(data, group="peers")
    if not rows:
        return ""
    sizes = sorted({row["b"] for row in rows})
    anchor = _ANCHOR if _ANCHOR in sizes else max(sizes)
    limits = [statistics.median(top for row in rows if row["b"] == b for top in row["ceiling_tflops"]) for b in sizes]
    ideal = [number(Point(b, rows[0]["d"]).flops / top * 1e-9) for b, top in zip(sizes, limits, strict=True)]
    told = slice(None if shares else 1, None)
    ends = [f"of the ceiling at {anchor:,}", f"peak extra MiB at {anchor:,}"]
    head = ["implementation", *(f"b = {b:,}, ms" for b in sizes), *ends[told]]
    lines = [["*the limit, 8 b² d / ceiling*", *ideal, *["100 %", "0"][told]]]
    for name in dict.fromkeys(row["implementation"] for row in rows):
        at = {row["b"]: row for row in rows if row["implementation"] == name}
        here = at.get(anchor)
        share = percent(statistics.median(here["fraction"])) if here else "-"
        memory = number(here["peak_bytes"] / MIB, 4) if here and "peak_bytes" in here else "-"
        lines.append([name, *(number(median(at[b])) if b in at else "-" for b in sizes), *[share, memory][told]])
    return table(head, lines)


def comparison(data: Data) -> str:
    """How many times faster than the fastest alternative, and than inf_cl."""
    rows = {row["implementation"]: row for row in measured(data, group="peers", b=_ANCHOR, d=WIDTH)}
    lines = []
    for own in (name for name in FUSED if name in rows):
        others = {name: median(row) / median(rows[own]) for name, row in rows.items() if "contrastile" not in name}
        if not others:
            continue
        name, times = min(others.items(), key=lambda each: each[1])
        where = f"At b = {_ANCHOR:,}, d = {WIDTH}"
        text = f"{where} the fastest alternative of the run is {name}: it takes {number(times)} times as long as {own}"
        lines.append(text + (f"; `inf_cl` takes {number(others[INF_CL])} times as long." if INF_CL in others else "."))
    return "\n\n".join(lines)


def skipped(data: Data) -> str:
    """What was not timed or not checked, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in (*data["times"], *data["big"], *data["errors"]):
        if row["status"] == "skip":
            found.setdefault((row["implementation"], row["reason"]), []).append(number(row["b"], 1))
    lines = [f"- {name}, b = {'; '.join(dict.fromkeys(b))}: {reason}" for (name, reason), b in found.items()]
    return "\n".join(lines)


def memory(data: Data) -> str:
    """What is live at the peak of our own call, by the allocator's record."""
    rows = [row for row in measured(data, group="aims", b=_ANCHOR, what="both", graph=False) if row.get("peak_blocks")]
    lines = []
    for row in rows:
        b, d = row["b"], row["d"]
        names = {4 * b * d: "sums of b d in float32", 2 * b * d: f"gradients of b d in {row['dtype']}"}
        total: dict[str, list[int]] = {}
        for size, count in row["peak_blocks"]:
            other = "workspace" if size > 64 * MIB else "vectors of b, partial results and all else"
            total.setdefault(names.get(size, other), []).extend([size] * count)
        where = f"{row['implementation']}, b = {b:,}, d = {d}, scale {row['scale']:g}"
        lines += [[where, what, str(len(x)), number(sum(x) / MIB, 4)] for what, x in total.items()]
        lines.append([where, "**peak extra, all of it**", "", f"**{number(row['peak_bytes'] / MIB, 4)}**"])
        beyond = row["peak_bytes"] - 4 * b * d - WORKSPACE
        lines.append([where, "beyond one sum of b d in float32 and 512 MiB of workspace", "", number(beyond / MIB, 4)])
    return table(("call", "what is live at the peak", "blocks", "MiB"), lines)


def errors(data: Data) -> str:
    """Relative errors against float64."""
    rows = [row for row in data["errors"] if row["status"] == "measured"]
    names = ("loss", "d_image", "d_text", "d_scale")
    lines = [
        [
            row["implementation"],
            number(row["b"], 1),
            f"{row['scale']:g}",
            *(number(_error(row, name), 2) for name in names),
        ]
        for row in rows
    ]
    return table(("implementation", "b", "scale", "loss", "dQ", "dK", "dscale"), lines)


def _error(row: Row, name: str) -> float:
    """JSON has null for what is not finite."""
    return math.inf if row[name] is None else float(row[name])


def checks(data: Data) -> str:
    """What holds or does not."""
    rows = [[f"{row['implementation']}: {row['check']}", _yes(row["holds"]), row["found"]] for row in data["checks"]]
    plain = [row for row in data["errors"] if row["implementation"] == OPEN_CLIP and row["status"] == "measured"]
    for name in FUSED:
        rows += _error_checks(data, name, plain)
    return table(("check", "holds", "found"), rows)


def _error_checks(data: Data, name: str, plain: Sequence[Row]) -> list[list[str]]:
    """What an implementation's errors are held to: those of the plain loss, and a limit for dscale."""
    rows = []
    ours = {(row["b"], row["scale"]): row for row in data["errors"] if row["implementation"] == name}
    for row in plain:
        own = ours.get((row["b"], row["scale"]), {"status": "skip"})
        if own["status"] == "measured":
            worst = max(_error(own, field) / _error(row, field) for field in ("d_image", "d_text"))
            at = f"b = {row['b']:,}, scale {row['scale']:g}"
            what = f"{name}: error of dQ and dK at {at}, at most twice that of the {OPEN_CLIP}"
            rows.append([what, _yes(worst <= 2), number(worst)])
    row = ours.get((_ANCHOR, D_SCALE_AT), {"status": "skip"})
    if row["status"] == "measured":
        found = _error(row, "d_scale")
        at = f"b = {_ANCHOR:,}, scale {D_SCALE_AT:g}"
        rows.append([f"{name}: relative error of dscale at {at}, at most {D_SCALE_AIM:g}"])
        rows[-1] += [_yes(found <= D_SCALE_AIM), number(found)]
    return rows


def _yes(holds: bool) -> str:
    return "yes" if holds else "**no**"


def big(data: Data) -> str:
    """Single calls at the largest batches, sampled rows and columns against float64."""
    head = (
        "implementation",
        "b",
        "d",
        "forward, s",
        "backward, s",
        "of the ceiling",
        "peak extra, GiB",
        "rows and columns sampled",
    )
    tail = ("row LSE, largest error", "column LSE, largest error", "dQ, relative", "dK, relative")
    rows = []
    for row in data["big"]:
        if row["status"] == "measured":
            peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 2**30
            found = [number(row[name], 2) for name in ("image_lse", "text_lse", "d_image", "d_text")]
            seconds = [number(row[name] / 1e3) for name in ("forward_ms", "backward_ms")]
            sizes = [row["implementation"], number(row["b"], 1), str(row["d"])]
            rows.append([*sizes, *seconds, percent(row["fraction"]), number(peak), str(row["samples"]), *found])
    return table((*head, *tail), rows)


def verified(data: Data) -> str:
    """The verdicts without which nothing is timed."""
    head = ("backend", "dtypes", "passed", "failed", "skipped", "largest error / bound", "seconds")
    rows = []
    for row in data["verify"]:
        counts = [str(row[name]) for name in ("pass", "fail", "skip")]
        what = ", ".join(row["dtypes"]) + (", all cases" if row["full"] else ", quick cases")
        rows.append([row["implementation"], what, *counts, number(row["worst"]), number(row["seconds"])])
    return table(head, rows)
