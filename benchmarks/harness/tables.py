"""The tables of the pages, each from the data of one record."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

MIB, GIB = 2**20, 2**30
Data = dict[str, Any]
Row = dict[str, Any]
ANCHOR = 65536

CALL = re.compile(
    r"(?P<loss>\w+)(?P<ids> ids)? (?P<dtype>\w+) b=(?P<b>\d+) d=(?P<d>\d+)(?: precision=(?P<precision>\w+))?"
)
"""The label of a row of ``everyday.py``."""
HEADS = {
    "auto": "contrastile",
    "plain": "plain PyTorch",
    "compiled": "compiled",
    "open_clip formula": "plain PyTorch",
    "open_clip formula, compiled": "compiled",
}
"""What the pages call those that ``everyday.py`` compares; over ranks plain PyTorch is open_clip's local loss."""
CALLS = (
    *(f"clip_loss bfloat16 b={b} d=512" for b in (256, 4096, 16384, 65536)),
    *(f"clip_loss float32 b={b} d=512" for b in (4096, 16384)),
    *(f"sigmoid_loss bfloat16 b={b} d=768" for b in (4096, 32768)),
    *(f"nt_xent bfloat16 b={size}" for size in ("4096 d=128", "32768 d=512")),
    *("sup_con bfloat16 b=16384 d=128", "info_nce bfloat16 b=4096 d=768"),
)
"""The rows of the README on one GPU."""
CALLS_OF_RANKS = tuple(f"clip_loss bfloat16 b={b} d=512" for b in (256, 8192))
"""And on several."""
_RATIO = "faster of plain and compiled / contrastile"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, or "" without rows; numbers to the right."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    rule = " | ".join("---" if i == 0 else "---:" for i in range(len(head)))
    return "\n".join([f"| {' | '.join(head)} |", f"| {rule} |", *body]) if body else ""


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits, thousands marked; "-" for what is not known."""
    if value is None:
        return "-"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return f"{value:.{digits - 1}e}"
    if value == 0:
        return "0"
    return f"{value:,.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def percent(value: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * value:.1f} %"


def measured(data: Data, part: str, **wanted: Any) -> list[Row]:
    """Timed rows of a part that agree with all of ``wanted``."""
    rows = [row for row in data["times"] if row["part"] == part and row["status"] == "measured"]
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def median(row: Row) -> float:
    """Milliseconds of one call."""
    return float(statistics.median(row["milliseconds"]))


def rate(row: Row) -> float:
    """TFLOP/s of each GPU, of the ``8 b^2 d / n`` that a whole step asks of it."""
    return 8.0 * row["rows"] * row["b"] * row["d"] / median(row) * 1e-9


def limit(rows: Sequence[Row], b: int) -> float:
    """Milliseconds of ``8 b^2 d / n`` at the ceiling beside these rows."""
    here = [row for row in rows if row["b"] == b]
    top = statistics.median(x for row in here for x in row["ceiling_tflops"])
    return 8.0 * here[0]["rows"] * b * here[0]["d"] / top * 1e-9


def machine(environment: Data) -> str:
    """What a record was measured on."""
    n, device = environment.get("ranks", 1), str(environment["device"])
    if device == "cpu":
        device = f"{environment['cpu']}, {environment['threads']} threads"
    return device if n == 1 else f"{n} x {device}"


def cell(row: Row | None) -> str:
    """Time, share of the ceiling, peak extra memory of a rank."""
    if row is None:
        return "-"
    told = [f"{number(median(row))} ms", percent(statistics.median(row["fraction"]))]
    return ", ".join([*told, *([f"{number(row['peak_bytes'] / MIB, 4)} MiB"] if row.get("peak_bytes") else [])])


def steps(data: Data, names: Sequence[str] = (), least: int = 1) -> str:
    """Our own on one process, one line a point and one column an implementation.

    Args:
        data: the record.
        names: of the implementations; all by default.
        least: implementations that a line must have.
    """
    rows = [row for row in measured(data, "steps", n=1, what="both") if not names or row["name"] in names]
    several = list(dict.fromkeys(row["name"] for row in rows))
    found: dict[tuple[int, int, float, bool], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["b"], row["d"], row["scale"], row["graph"]), {})[row["name"]] = row
    told = {point: at for point, at in found.items() if len(at) >= least}
    plain = all((scale, graph) == (100.0, False) for _, _, scale, graph in told)
    lines = []
    for (b, d, scale, graph), at in sorted(told.items()):
        where = [number(b, 1), str(d), *([] if plain else [f"{scale:g}", "yes" if graph else "no"])]
        lines.append([*where, *(cell(at.get(name)) for name in several)])
    return table(["b", "d", *([] if plain else ["scale", "graph"]), *several], lines)


def scaling(data: Data) -> str:
    """Our own on several ranks: weak scaling (pairs of each rank given), then strong (pairs of the batch)."""
    lines = []
    for each in (True, False):
        rows = measured(data, "steps", what="both", graph=False)
        key = "rows" if each else "b"
        wanted = dict.fromkeys((row[key], row["d"]) for row in rows if row["each"] == each and row["n"] == 1)
        for size, d in sorted(wanted):
            here = [row for row in rows if (row[key], row["d"]) == (size, d)]
            (alone, *_) = (row for row in here if row["n"] == 1)
            for n in sorted({row["n"] for row in here}):
                by = {row["exchange"]: row for row in here if row["n"] == n}
                best = min(by.values(), key=median)
                what = f"{number(size, 1)} {'a rank' if each else 'in all'}"
                ways = [cell(by.get(how)) for how in ("local", "ring", "gather")]
                lines.append([what, str(d), str(n), *ways, percent(rate(best) / rate(alone))])
    return table(["pairs", "d", "ranks", "one process", "ring", "gather", "best efficiency, auto included"], lines)


def peers(data: Data) -> str:
    """All implementations at each size: milliseconds, and at the anchor the ceiling's share and memory."""
    rows = measured(data, "peers", what="both")
    if not rows:
        return ""
    sizes = sorted({row["b"] for row in rows})
    anchor = ANCHOR if ANCHOR in sizes else max(sizes)
    ends = [f"of the ceiling at {anchor:,}", f"peak extra MiB at {anchor:,}"]
    divided = "" if rows[0]["n"] == 1 else f" / {rows[0]['n']}"
    limits = [number(limit(rows, b)) for b in sizes]
    lines = [[f"*the limit, 8 b² d{divided} / ceiling*", *limits, "100 %", "0"]]
    for label in dict.fromkeys(map(labelled, rows)):
        at = {row["b"]: row for row in rows if labelled(row) == label}
        here = at.get(anchor)
        share = percent(statistics.median(here["fraction"])) if here else "-"
        memory = number(here["peak_bytes"] / MIB, 4) if here and here.get("peak_bytes") else "-"
        lines.append([label, *(number(median(at[b])) if b in at else "-" for b in sizes), share, memory])
    return table(["implementation", *(f"b = {b:,}, ms" for b in sizes), *ends], lines)


def labelled(row: Row) -> str:
    """The implementation, how its ranks exchange, and whether it is replayed."""
    exchange = f", {row['exchange']}" if row["exchange"] not in ("local", "") else ""
    return f"{row['name']}{exchange}{', in a CUDA graph' if row['graph'] else ''}"


def big(data: Data) -> str:
    """Single calls at the largest batches, sampled rows and columns against float64."""
    head = ("implementation", "b", "d", "forward, s", "backward, s", "of the ceiling", "peak extra GiB a rank")
    lines = []
    for row in (row for row in data["big"] if row["status"] == "measured"):
        peak = None if row["peak_bytes"] is None else row["peak_bytes"] / GIB
        seconds = [number(row[name] / 1e3) for name in ("forward_ms", "backward_ms")]
        found = [number(row.get(name), 2) for name in ("d_image", "d_text")]
        where = [row["name"], f"{row['b']:,}", str(row["d"])]
        lines.append([*where, *seconds, percent(row["fraction"]), number(peak), *found])
    return table((*head, "dQ, relative error", "dK"), lines)


def everyday(data: Data) -> str:
    """All calls of a record of ``everyday.py``: clip_loss, then the other losses."""
    found = _calls(data)
    names = list(dict.fromkeys(name for at in found.values() for name in at))
    head = ["call", *(f"{HEADS[name]}, ms" if name in HEADS else f"`{name}`, ms" for name in names), _RATIO]
    tables = []
    for clip in (True, False):
        here = {label: at for label, at in found.items() if label.startswith("clip_loss") == clip}
        lines = [[in_words(x), *(number(at.get(name)) for name in names), _ratio(x, at)] for x, at in here.items()]
        tables.append(table(head, lines))
    return "\n\n".join(filter(None, tables))


def everyday_calls(alone: Data, several: Data | None) -> str:
    """The calls of the README, of a record of one GPU and of one of several."""
    lines, heads = [], list(dict.fromkeys(HEADS.values()))
    for data, wanted in ((alone, CALLS), (several, CALLS_OF_RANKS)):
        if data is None:
            continue
        found, n = _calls(data), data["environment"]["ranks"]
        for label in (x for x in wanted if x in found):
            times = {HEADS[name]: ms for name, ms in found[label].items() if name in HEADS}
            call = in_words(label) + (f", on each of {n} GPUs" if n > 1 else "")
            lines.append([call, *(number(times.get(head)) for head in heads), _ratio(label, found[label])])
    return table(["call", *(f"{head}, ms" for head in heads), _RATIO], lines)


def in_words(label: str) -> str:
    """A row of ``everyday.py``, for people."""
    found = CALL.fullmatch(label)
    if found is None:
        return label
    settings = ["ids"] if found["ids"] else []
    settings += [found["precision"]] if found["precision"] else []
    return ", ".join([f"`{found['loss']}`", *settings, found["dtype"], f"b = {int(found['b']):,}", f"d = {found['d']}"])


def _calls(data: Data) -> dict[str, dict[str, float]]:
    """Milliseconds of each call by the names of those who computed it."""
    found: dict[str, dict[str, float]] = {}
    for row in data["rows"]:
        if row["status"] == "measured":
            found.setdefault(row["row"], {})[row["name"]] = row["median_ms"]
    return found


def _ratio(label: str, at: dict[str, float]) -> str:
    """Time of the faster of the others over ours; "-" by tf32, in which they do not multiply."""
    others = [ms for name, ms in at.items() if name in HEADS and name != "auto" and "tf32" not in label]
    return f"{min(others) / at['auto']:.1f} x" if others and "auto" in at else "-"


def training(data: Data) -> str:
    """Every competitor's optimizer step, and the share of the loss in ours, of a record of ``training.py``."""
    ours = next((row for row in data["steps"] if row["name"].startswith("contrastile")), {})
    lines = []
    for row in sorted(data["steps"], key=lambda row: (row["name"].startswith("autocast"), row.get("s", 0.0))):
        if row["status"] != "measured":
            lines.append([row["name"], "-", "-", row["reason"], "-", "-", "-"])
            continue
        same = row["b"] == ours.get("b") and "s" in ours
        ratio = f"{row['s'] / ours['s']:.2f} x" if same and row is not ours else "-"
        peak = None if row["peak_bytes"] is None else row["peak_bytes"] / GIB
        chunk = f"{row['chunk']:,}" if row["chunk"] < row["b"] else "-"
        rate = number(row["pairs_per_second"])
        lines.append([row["name"], f"{row['b']:,}", chunk, number(row["s"]), rate, number(peak), ratio])
    head = ("gradient cache", "pairs", "chunk", "seconds a step", "pairs a second", "peak GiB", "time / contrastile's")
    alone = [
        f"`info_nce` alone takes {number(1e3 * row['s'])} ms forward and backward, {percent(row['s'] / ours['s'])} of "
        "contrastile's step."
        for row in data["loss"]
        if ours.get("b") == row["b"] and "s" in ours and "s" in row
    ]
    return "\n\n".join([table(head, lines), *alone])


def training_memory(data: Data) -> str:
    """Peak memory of ours over the batch, of a record of ``training.py``."""
    rows = [row for row in data["memory"] if row["status"] == "measured" and row["peak_bytes"] is not None]
    lines = [[f"{row['b']:,}", number(row["peak_bytes"] / MIB, 4)] for row in sorted(rows, key=lambda row: row["b"])]
    return table(("pairs", f"peak MiB in chunks of {rows[0]['chunk']:,}"), lines) if rows else ""


def verified(data: Data) -> str:
    """The verdicts without which nothing is timed, in a sentence."""
    rows = [row for row in data["verify"] if row["verdict"] == "pass"]
    if not rows:
        return ""
    worst = max(row["worst"] for row in rows)
    names, count = ", ".join(row["name"] for row in rows), sum(row["pass"] for row in rows)
    return f"Verified first, {count} checks of {names}: the largest error is {number(worst)} of its bound."
