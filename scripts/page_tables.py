"""The tables and the charts of the benchmarks' pages, each from the records of ``benchmarks/everyday.py``."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from contrastile.schedules import timing
from contrastile.verify import plots

MIB, GIB = 2**20, 2**30
Data = dict[str, Any]
Row = dict[str, Any]

OURS = ("contrastile triton", "contrastile cupy")
ANCHOR = 65536

HEADS = {
    "auto": "contrastile",
    "plain": "plain PyTorch",
    "compiled": "compiled",
    "open_clip formula": "plain PyTorch",
    "open_clip formula, compiled": "compiled",
}
"""What the pages call the implementations of an everyday call; over ranks plain PyTorch is open_clip's local loss."""
CALLS = (
    *(f"clip_loss bfloat16 b={b} d=512" for b in (256, 4096, 16384, 65536)),
    *(f"clip_loss float32 b={b} d=512" for b in (4096, 16384)),
    *(f"sigmoid_loss bfloat16 b={b} d=768" for b in (4096, 32768)),
    *(f"nt_xent bfloat16 b={size}" for size in ("4096 d=128", "32768 d=512")),
    *("sup_con bfloat16 b=16384 d=128", "info_nce bfloat16 b=4096 d=768"),
)
"""The calls that the README shows on one GPU."""
CALLS_OF_RANKS = tuple(f"clip_loss bfloat16 b={b} d=512" for b in (256, 8192))
"""The calls that the README shows on several GPUs."""
_SPEEDUP = "speedup over the faster PyTorch version"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A Markdown table, or "" without rows; columns in ``left`` are aligned left, the others, numbers, right."""
    body = list(rows)
    rule = ["---" if i in left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body)) if body else ""


def escaped(text: str) -> str:
    """A text for a cell of a table, with Markdown's marks escaped."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", text)


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits and its thousands marked; "-" for None."""
    if value is None:
        return "-"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.{digits - 1}e}"
    if value == 0:
        return "0"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def rows_of(data: Data, part: str, **fields: Any) -> list[Row]:
    """Timed rows of a part that have all of these fields."""
    rows = [row for row in data["times"] if row["part"] == part and row["status"] == "measured"]
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def median(row: Row) -> float:
    """The median of the milliseconds of one call."""
    return float(statistics.median(row["milliseconds"]))


def ranks(data: Data) -> int:
    return int(data["environment"].get("ranks", 1))


def machine(environment: Data) -> str:
    """The machine of a record."""
    n, device = environment.get("ranks", 1), str(environment["device"])
    if device == "cpu":
        device = f"{environment['cpu']}, {environment['threads']} threads"
    return device if n == 1 else f"{n} x {device}"


def record_line(stem: str, environment: Data) -> str:
    """The version of torch, the day, and a link to the record."""
    versions = f"torch {environment['torch']}, {environment['date'][:10]}"
    return f"{versions}. [The record](../results/{stem}.json) has the commit, all versions and every sample."


def newest(records: Iterable[tuple[str, Data]]) -> list[tuple[str, Data]]:
    """The latest record of ``peers`` of each machine, the latest first."""
    by_date = sorted(records, key=lambda record: str(record[1]["environment"]["date"]))
    latest = {machine(data["environment"]): (stem, data) for stem, data in by_date if rows_of(data, "peers")}
    return list(reversed(latest.values()))


def gpu_section(stem: str, data: Data) -> str:
    """The section of a record of ``peers``, and over ranks of ``steps``: the machine, our own times, all times."""
    is_distributed = ranks(data) > 1
    source = record_line(stem, data["environment"])
    name = machine(data["environment"])
    words = f"Time and peak memory against the batch on {name}; the table has the numbers"
    overview = scaling(data) if is_distributed else f"![{words}](../results/{stem}.svg)"
    return "\n\n".join([f"## {name}", source, overview, peers(data)])


def cell(row: Row | None) -> str:
    """The time, the share of the ceiling, and the peak extra memory of a rank."""
    if row is None:
        return "-"
    parts = [f"{number(median(row))} ms", percent(statistics.median(row["fraction"]))]
    return ", ".join([*parts, *([f"{number(row['peak_bytes'] / MIB, 4)} MiB"] if row.get("peak_bytes") else [])])


def scaling(data: Data) -> str:
    """Our own times on several ranks: weak scaling, by the pairs of a rank, then strong, by the pairs of the batch."""

    def rate(row: Row) -> float:
        """The rate of each GPU up to a factor: a step takes ``8 b^2 d / n`` operations of it."""
        return float(row["rows"] * row["b"] * row["d"] / median(row))

    lines = []
    for is_weak in (True, False):
        rows = rows_of(data, "steps", what="both", graph=False)
        key = "rows" if is_weak else "b"
        points = dict.fromkeys((row[key], row["d"]) for row in rows if row["each"] == is_weak and row["n"] == 1)
        for size, d in sorted(points):
            # the fastest backend comes last, and replaces the others
            point_rows = sorted((row for row in rows if (row[key], row["d"]) == (size, d)), key=median, reverse=True)
            *_, single = (row for row in point_rows if row["n"] == 1)
            for n in sorted({row["n"] for row in point_rows}):
                by_exchange = {row["exchange"]: row for row in point_rows if row["n"] == n}
                best = min(by_exchange.values(), key=median)
                pairs = f"{number(size, 1)} {'a rank' if is_weak else 'in all'}"
                cells = [cell(by_exchange.get(exchange)) for exchange in ("local", "ring", "gather")]
                lines.append([pairs, str(d), str(n), *cells, percent(rate(best) / rate(single))])
    return table(["pairs", "d", "ranks", "one process", "ring", "gather", "best efficiency, auto included"], lines)


def model_errors(data: Data) -> dict[tuple[int, str, int, int], float]:
    """The relative errors of the model of ``schedules.timing``, by ranks, exchange, rows of a rank and width.

    The model gets the rate of a single rank with features of the same width.
    """
    rows = [*rows_of(data, "steps", what="both", graph=False), *rows_of(data, "peers", what="both", graph=False)]
    times = {(x["n"], x["exchange"], x["b"], x["d"]): median(x) for x in rows if x["name"] == "contrastile triton"}
    rates: dict[int, list[float]] = {}
    for (n, _, b, d), time in times.items():
        if n == 1:
            rates.setdefault(d, []).append(8e-9 * b * b * d / time)
    errors = {}
    for (n, exchange, b, d), time in times.items():
        if n > 1 and exchange in ("ring", "gather"):
            machine_model = timing.Machine(tflops=statistics.median(rates[d]))
            predicted = timing.seconds(exchange, timing.Ranks(1, n, b // n, d, 2), machine_model)
            errors[n, exchange, b // n, d] = abs(1e3 * predicted / time - 1)
    return errors


def hosts(stem: str, data: Data) -> str:
    """The model's times on GPUs of many hosts, and its errors on the points of a record."""
    errors = model_errors(data)
    large = [error for (*_, rows, _), error in errors.items() if rows >= 32768]
    lines = []
    for gpus in (8, 64, 256, 1024):
        ranks = timing.Ranks(gpus // 8, 8, 4096, 512, 2)
        for exchange in ("ring", "two-level", "gather") if gpus > 8 else ("ring", "gather"):
            cells = []
            for model in (timing.Machine(host_ms=0.0), timing.Machine()):
                share = timing.share(exchange, ranks, model)
                cells += [f"{number(1e3 * timing.seconds(exchange, ranks, model))} ms", percent(share)]
            rows = timing.hidden_from(exchange, ranks, timing.Machine(host_ms=0.0))
            messages, *sizes = timing.traffic(exchange, ranks)
            cells += ["never" if rows is None else number(rows, 1), number(messages, 1)]
            lines.append([number(gpus, 1), exchange, *cells, *(f"{size / MIB:,.0f}" for size in sizes)])
    head = ["GPUs", "exchange", "in a CUDA graph", "products", "eager", "products", "hides from, rows"]
    head += ["messages", "MiB inside a host", "MiB to other hosts"]
    summary = (
        f"On {len(errors)} points of [the record](../results/{stem}.json) of 2 and 4 GPUs the model is off by "
        f"{percent(statistics.median(errors.values()))} at the median, {percent(max(large))} at most from 32,768 rows "
        f"per rank on, and {percent(max(errors.values()))} below, where the host's time counts."
    )
    return f"{table(head, lines, left=(0, 1))}\n\n{summary}"


def peers(data: Data) -> str:
    """All implementations at each size: milliseconds, and at the anchor the ceiling's share and memory."""
    rows = rows_of(data, "peers", what="both")
    if not rows:
        return ""
    sizes = sorted({row["b"] for row in rows})
    anchor = ANCHOR if ANCHOR in sizes else max(sizes)
    last_columns = [f"of the ceiling at {anchor:,}", f"peak extra MiB at {anchor:,}"]
    limits = []
    for b in sizes:
        rows_of_size = [row for row in rows if row["b"] == b]
        ceiling = statistics.median(x for row in rows_of_size for x in row["ceiling_tflops"])
        limits.append(number(8.0 * rows_of_size[0]["rows"] * b * rows_of_size[0]["d"] / ceiling * 1e-9))
    divided = "" if rows[0]["n"] == 1 else f" / {rows[0]['n']}"
    lines = [[f"*the limit, 8 b² d{divided} / ceiling*", *limits, "100 %", "0"]]
    for label in dict.fromkeys(map(_label, rows)):
        by_size = {row["b"]: row for row in rows if _label(row) == label}
        at_anchor = by_size.get(anchor)
        share = percent(statistics.median(at_anchor["fraction"])) if at_anchor else "-"
        memory = number(at_anchor["peak_bytes"] / MIB, 4) if at_anchor and at_anchor.get("peak_bytes") else "-"
        lines.append([label, *(number(median(by_size[b])) if b in by_size else "-" for b in sizes), share, memory])
    return table(["implementation", *(f"b = {b:,}, ms" for b in sizes), *last_columns], lines)


def _label(row: Row) -> str:
    exchange = f", {row['exchange']}" if row["exchange"] not in ("local", "") else ""
    return f"{row['name']}{exchange}{', in a CUDA graph' if row['graph'] else ''}"


def everyday_section(stem: str, data: Data) -> str:
    """All calls of a record: clip_loss, then the other losses."""
    e, calls_by_label = data["environment"], calls(data)
    names = dict.fromkeys(name for _, times in calls_by_label.values() for name in times)
    head = ["call", *(f"{HEADS[name]}, ms" if name in HEADS else f"`{name}`, ms" for name in names), _SPEEDUP]
    parts = [f"## {machine(e)}", record_line(stem, e)]
    for clip in (True, False):
        rows = [call for label, call in calls_by_label.items() if label.startswith("clip_loss") == clip]
        lines = [[words, *(number(times.get(name)) for name in names), _speedup(words, times)] for words, times in rows]
        parts.append(table(head, lines))
    return "\n\n".join(filter(None, parts))


def readme(records: Iterable[Data]) -> str:
    """Everyday calls on the GPU that was measured last, and on the smallest measured number of the same GPUs."""
    on_gpus = [data for data in records if data["environment"]["device"] != "cpu"]
    alone = [data for data in on_gpus if ranks(data) == 1]
    if not alone:
        return ""
    latest = max(alone, key=lambda data: str(data["environment"]["date"]))
    e = latest["environment"]
    several = [data for data in on_gpus if ranks(data) > 1 and data["environment"]["device"] == e["device"]]
    chosen = [latest, *sorted(several, key=ranks)[:1]]
    days = " and ".join(sorted({data["environment"]["date"][:10] for data in chosen}))
    lines, heads = [], dict.fromkeys(HEADS.values())
    for data, labels in zip(chosen, (CALLS, CALLS_OF_RANKS), strict=False):
        calls_by_label = calls(data)
        for words, times in (calls_by_label[x] for x in labels if x in calls_by_label):
            by_head = {HEADS[name]: ms for name, ms in times.items() if name in HEADS}
            call = words + (f", on each of {ranks(data)} GPUs" if data is not latest else "")
            lines.append([call, *(number(by_head.get(head)) for head in heads), _speedup(words, times)])
    head = ["call", *(f"{head}, ms" for head in heads), _SPEEDUP]
    return f"{e['device']}, torch {e['torch']}, {days}.\n\n{table(head, lines)}"


def calls(data: Data) -> dict[str, tuple[str, dict[str, float]]]:
    """Each everyday call by its label: the call in words, and milliseconds by implementation."""
    calls_by_label: dict[str, tuple[str, dict[str, float]]] = {}
    for row in rows_of(data, "everyday"):
        loss, _, ids = row["loss"].partition(" ")
        parts = [f"`{loss}`", ids, row.get("precision", ""), row["dtype"], f"b = {row['b']:,}", f"d = {row['d']}"]
        calls_by_label.setdefault(row["row"], (", ".join(filter(None, parts)), {}))[1][row["name"]] = median(row)
    return calls_by_label


def _speedup(words: str, times: dict[str, float]) -> str:
    """The time of the faster other implementation over ours; "-" for tf32, in which the others do not multiply."""
    others = [ms for name, ms in times.items() if name in HEADS and name != "auto" and "tf32" not in words]
    return f"{min(others) / times['auto']:.1f} x" if others and "auto" in times else "-"


LINES = {
    OURS[0]: ("#c2570c", "#ffb454", "o"),
    OURS[1]: ("#2f55c7", "#8fb0ff", "s"),
    "open_clip formula": ("#5b6470", "#a3acb8", "v"),
    "open_clip formula, compiled": ("#1b1f24", "#e6e8eb", "^"),
    "chunked PyTorch, compiled": ("#15803d", "#86efac", "P"),
    "liger-kernel x2": ("#a21caf", "#f0abfc", "D"),
}
"""Ours, PyTorch's, and the fastest public kernel: the colours on light and on dark paper, and the marker."""


def chart(data: Data, *, phone: bool = False) -> str:
    """The chart of one record, as an SVG."""
    import matplotlib
    from matplotlib.figure import Figure

    e = data["environment"]
    fonts = {"font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold"}
    with matplotlib.rc_context({**plots.LOOK, **fonts}):
        shape, size = ((2, 1), (4.9, 7.6)) if phone else ((1, 2), (9.8, 4.4))
        figure = Figure(figsize=size, layout="constrained")
        time, memory = figure.subplots(*shape)
        _draw(time, memory, _chart_rows(data))
        title = f"{e['device']}, bfloat16, d = 512, {e['date'][:10]}"
        legend: dict[str, Any] = {"ncols": 2, "fontsize": 9.5} if phone else {"ncols": 3}
        legend |= {"frameon": False, "title": title, "title_fontsize": 11, "loc": "outside lower center"}
        figure.legend(*time.get_legend_handles_labels(), **legend)
        return plots.svg(figure, plots.ON_DARK | {light: dark for light, dark, _ in LINES.values()})


def _draw(time: Any, memory: Any, lines: dict[str, list[Row]]) -> None:
    for name, rows in lines.items():
        color, _, marker = LINES[name]
        style: dict[str, Any] = {"color": color, "marker": marker, "label": name}
        style |= {"linewidth": 2.8, "zorder": 3} if name in OURS else {"linewidth": 1.5, "linestyle": "--"}
        time.plot([row["b"] for row in rows], [median(row) for row in rows], **style)
        with_memory = [row for row in rows if row.get("peak_bytes")]
        memory.plot([row["b"] for row in with_memory], [row["peak_bytes"] / GIB for row in with_memory], **style)
    sizes = sorted({row["b"] for rows in lines.values() for row in rows})
    for axes, title, unit in ((time, "Time, forward and backward", "ms"), (memory, "Peak extra memory", "GiB")):
        axes.set(xscale="log", yscale="log", xlabel="batch")
        axes.set_title(title, loc="left")
        axes.set_xticks(sizes, [f"{b // 1024}k" if b % 1024 == 0 else f"{b:,}" for b in sizes])
        # begin the axis at a labelled line below the lowest point
        axes.set_ylim(bottom=10 ** math.floor(math.log10(axes.get_ylim()[0] * 1.2)))
        axes.yaxis.set_major_formatter(lambda y, _, unit=unit: f"{y:g} {unit}")
        axes.minorticks_off()
        axes.grid(alpha=0.6)


def _chart_rows(data: Data) -> dict[str, list[Row]]:
    """The chart's lines, by batch."""
    rows = sorted(rows_of(data, "peers", what="both", graph=False, d=512, scale=100.0), key=lambda row: int(row["b"]))
    rows_by_name = {name: [row for row in rows if row["name"] == name] for name in LINES}
    return {name: chart_rows for name, chart_rows in rows_by_name.items() if chart_rows}
