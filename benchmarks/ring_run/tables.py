"""The tables of docs/scaling.md, each from the data of one record."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from gpu_run.tables import number, percent, spread, table

from ring_run.plan import GATHER, INF_CL, LOCAL, OPEN_CLIP, RING

MIB, GIB = 2**20, 2**30
Data = dict[str, Any]
Row = dict[str, Any]


def measured(data: Data, part: str, **wanted: Any) -> list[Row]:
    """Timed rows of a part that agree with all of ``wanted``."""
    rows = [row for row in data["times"] if row["part"] == part and row["status"] == "measured"]
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def median(row: Row) -> float:
    """Milliseconds of one call."""
    return float(statistics.median(row["milliseconds"]))


def host(row: Row) -> str:
    """Milliseconds of the host for one call, where they were taken."""
    return number(statistics.median(row["host_ms"])) if row.get("host_ms") else "-"


def tflops(row: Row) -> float:
    """TFLOP/s of each GPU, of the ``8 b^2 d / n`` that are asked of it."""
    return 8.0 * row["rows"] ** 2 * row["n"] * row["d"] / median(row) * 1e-9


def efficiency(row: Row, alone: Row) -> float:
    """A rank's rate over that of a rank alone: of one with as many pairs, or of one with the whole batch."""
    return tflops(row) / tflops(alone)


def families(data: Data, kind: str) -> Iterator[tuple[int, int, list[Row]]]:
    """Rows of one batch over the numbers of ranks: (pairs of a rank, or of the batch), d, rows.

    A point that lies on both kinds' lines was timed once, for one of them.
    """
    rows = sorted(measured(data, "scaling"), key=lambda row: int(row["n"]))

    def size(row: Row) -> tuple[int, int]:
        return row["rows"] * (1 if kind == "weak" else row["n"]), row["d"]

    for pairs, d in dict.fromkeys(size(row) for row in rows if row["kind"] == kind):
        yield pairs, d, [row for row in rows if size(row) == (pairs, d)]


def alone(rows: list[Row]) -> Row | None:
    """The rank that works by itself."""
    return next((row for row in rows if row["n"] == 1), None)


def scaling(data: Data, kind: str) -> str:
    """Weak or strong scaling."""
    first = "pairs a rank" if kind == "weak" else "b"
    head = (
        first,
        "d",
        "ranks",
        "exchange",
        "time, ms",
        "TFLOP/s a GPU",
        "of the ceiling",
        "efficiency",
        "peak extra MiB a rank",
    )
    lines = []
    for pairs, d, rows in families(data, kind):
        one = alone(rows)
        for row in rows:
            share = percent(efficiency(row, one)) if one is not None else "-"
            extra = number(row["peak_bytes"] / MIB, 4) if row.get("peak_bytes") else "-"
            where = [number(pairs, 1), str(d), str(row["n"]), exchange(row)]
            lines.append([*where, spread(row["milliseconds"]), number(tflops(row)), _share(row), share, extra])
    return table(head, lines)


def exchange(row: Row) -> str:
    """Its schedule; of ``auto`` also what it chose."""
    return f"auto: {row['auto']}" if row.get("exchange") == "auto" and "auto" in row else row.get("exchange", "")


def _share(row: Row) -> str:
    return percent(statistics.median(row["fraction"])) if row.get("fraction") else "-"


def memory(data: Data) -> str:
    """Extra memory of a rank against the number of ranks that share a batch, and what of it does not shrink."""
    lines = []
    for b, d, rows in families(data, "strong"):
        for how in (RING, GATHER):
            known = [row for row in rows if row.get("peak_bytes") and row["exchange"] in (how, LOCAL)]
            for row in known if len(known) > 1 else []:
                own = 2 * row["rows"] * d * 2 / MIB
                held = row["peak_bytes"] / MIB
                name = how if row["n"] > 1 else LOCAL
                line = [number(b, 1), str(d), name, str(row["n"]), number(held, 4), number(own, 4)]
                if line not in lines:
                    lines.append(line)
    return table(("b", "d", "exchange", "ranks", "peak extra MiB a rank", "features of a rank, MiB"), lines)


def choices(data: Data) -> list[tuple[Row, Row]]:
    """Ring and gather at the same point, over all parts that timed both; what ``auto`` took, with its own samples too.

    A call by ``auto`` and one by name of what it chose are the same call: the samples of both are its own.
    """
    found = []
    for part in ("shards", "scaling", "peers"):
        rows = measured(data, part, what="step")
        for ring in (row for row in rows if row.get("exchange") == RING):
            where = {name: ring[name] for name in ("n", "rows", "d", "setting")}
            automatic = [x for row in rows if _at(row, "auto", where) for x in row["milliseconds"]]
            for gather in (row for row in rows if _at(row, GATHER, where)):
                both = {RING: ring, GATHER: gather}
                chosen = both[ring["auto"]]
                both[ring["auto"]] = chosen | {"milliseconds": [*chosen["milliseconds"], *automatic]}
                found.append((both[RING], both[GATHER]))
    return found


def _at(row: Row, exchange: str, where: dict[str, Any]) -> bool:
    """Whether a row is of this exchange at this point."""
    return row.get("exchange") == exchange and all(row[name] == value for name, value in where.items())


def behind(ring: Row, gather: Row) -> float:
    """How much longer what ``auto`` chose takes than the better of the two, as a share."""
    chosen = {RING: ring, GATHER: gather}[ring["auto"]]
    return median(chosen) / min(median(ring), median(gather)) - 1


def exchanges(data: Data) -> str:
    """Ring against gather over the sizes of a shard."""
    lines = []
    for ring, gather in choices(data):
        if ring["part"] == "shards":
            where = [number(ring["rows"], 1), str(ring["d"]), str(ring["n"])]
            times = [number(median(x)) for x in (ring, gather)]
            at = {name: ring[name] for name in ("n", "rows", "d")}
            graphs = [number(median(x)) for x in measured(data, "shards", captured=GATHER, **at)] or ["-"]
            hosts = [host(ring), host(gather), graphs[0]]
            lines.append(
                [*where, *times, *hosts, _share(ring), _share(gather), ring["auto"], percent(behind(ring, gather))]
            )
    head = (
        "pairs a rank",
        "d",
        "ranks",
        "ring, ms",
        "gather, ms",
        "ring, host",
        "gather, host",
        "gather in a graph, ms",
    )
    tail = ("ring, of the ceiling", "gather, of the ceiling", "auto takes", "behind the better by")
    return table((*head, *tail), lines)


def hiding(data: Data) -> list[dict[str, Any]]:
    """What of the messages' own time a step hides, at each point and by each schedule."""
    found = []
    rows, names = measured(data, "hidden"), ("n", "rows", "d", "exchange", "setting")
    for where in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        at = {row["what"]: median(row) for row in rows if tuple(row[name] for name in names) == where}
        if {"step", "no messages", "no products", "neither"} <= set(at):
            exposed, messages = at["step"] - at["no messages"], at["no products"] - at["neither"]
            share = min(1.0, max(0.0, 1 - exposed / messages)) if messages > 0 else 1.0
            found.append({**dict(zip(names, where, strict=True)), **at, "messages": messages, "share": share})
    return found


def hidden(data: Data) -> str:
    """The share of the messages that is hidden."""
    head = ("pairs a rank", "d", "ranks", "exchange", "step, ms", "without messages", "without products", "neither")
    tail = ("messages alone", "hidden", "without messages or handshake")
    lines = []
    for each in hiding(data):
        where = [number(each["rows"], 1), str(each["d"]), str(each["n"]), each["exchange"]]
        names = "step", "no messages", "no products", "neither", "messages"
        mute = number(each["no messages, no handshake"]) if "no messages, no handshake" in each else "-"
        lines.append([*where, *(number(each[name]) for name in names), percent(each["share"]), mute])
    return table((*head, *tail), lines)


def overlap(data: Data) -> str:
    """A block beside a message: what the message adds."""
    rows, lines = measured(data, "overlap"), []
    for row in (row for row in rows if row.get("transfer") and "waves" in row):
        apart = measured(data, "overlap", **{name: row[name] for name in ("n", "rows", "d", "what", "setting")})
        blocks = {(x["waves"], x["spared"]): median(x) for x in apart if "waves" in x and "transfer" not in x}
        alone = [median(x) for x in apart if x.get("transfer") == row["transfer"] and "waves" not in x]
        same, whole = blocks.get((row["waves"], row["spared"])), blocks.get((1, 0))
        if same is not None and whole is not None and alone:
            at = [row["setting"] or "-", number(row["rows"], 1), row["what"], row["transfer"]]
            how = [str(row["waves"]), str(row["spared"])]
            lines.append([*at, *how, *(number(x) for x in (alone[0], same, median(row), median(row) - whole))])
    head = ("setting", "pairs a rank", "block", "by", "waves", "SMs spared", "message alone, ms", "block alone, ms")
    return table((*head, "both, ms", "over the block in 1 wave, ms"), lines)


def peers(data: Data) -> str:
    """Others at each size."""
    rows, lines = measured(data, "peers"), []
    for row in rows:
        b = row["rows"] * row["n"]
        own = ours(rows, b, row["d"])
        times = number(median(row) / median(own)) if own else "-"
        held = more = "-"
        if row.get("peak_bytes"):
            held = number(row["peak_bytes"] / MIB, 4)
            more = number(row["peak_bytes"] / own["peak_bytes"]) if own and own.get("peak_bytes") else "-"
        name = f"{row['name']}: {row['auto']}" if row is own else row["name"]
        rate = number(median(row)), host(row), number(tflops(row)), _share(row)
        lines.append([number(b, 1), str(row["d"]), name, *rate, times, held, more])
    head = ("b", "d", "implementation", "time, ms", "host, ms", "TFLOP/s a GPU", "of the ceiling", "times ours")
    return table((*head, "peak extra MiB a rank", "times ours"), lines)


def ours(rows: list[Row], b: int, d: int) -> Row | None:
    """What the front door does by itself at a size, among the peers' rows."""
    return next((x for x in rows if x.get("exchange") == "auto" and (x["rows"] * x["n"], x["d"]) == (b, d)), None)


def headline(data: Data) -> str:
    """The largest batch."""
    head = ("pairs", "d", "ranks", "exchange", "forward, s", "backward, s", "TFLOP/s a GPU", "of the ceiling")
    tail = ("extra GiB a rank", "features of a rank, GiB", "loss", "sampled", "largest error / bound", "holds")
    lines = []
    for row in (row for row in data["headline"] if row["status"] == "measured"):
        worst = "-" if not row.get("ratios") else "; ".join(f"{k} {number(v, 2)}" for k, v in row["ratios"].items())
        held = number(row["peak_bytes"] / GIB, 3) if row.get("peak_bytes") else "-"
        times = [number(row[name] / 1e3) for name in ("forward_ms", "backward_ms")]
        where = [f"{row['pairs']:,}", str(row["d"]), str(row["n"]), row["exchange"]]
        rate = [number(row["tflops"]), percent(row["fraction"])]
        more = [held, number(row["features_bytes"] / GIB, 3), number(row["loss"], 4), str(row["samples"])]
        lines.append([*where, *times, *rate, *more, worst, yes(row.get("holds", False))])
    return table((*head, *tail), lines)


def verified(data: Data) -> str:
    """What was held to float64, and to one process, before anything was timed."""
    lines = []
    for row in data["checks"]:
        worst = "; ".join(f"{name} {number(value, 2)}" for name, value in row["ratios"].items())
        sizes = ", ".join(f"{size:,}" for size in row["sizes"])
        what = [row["check"], str(row["n"]), row["exchange"], sizes, str(row["d"]), f"{row['scale']:g}", worst]
        lines.append([*what, yes(row["repeats"]), yes(row["holds"])])
    head = ("check", "ranks", "exchange", "pairs of the ranks", "d", "scale", "largest error / bound")
    return table((*head, "same bits twice", "holds"), lines)


def yes(holds: bool) -> str:
    """As a table says it."""
    return "yes" if holds else "**no**"


def comparison(data: Data) -> str:
    """One sentence on the alternatives at the largest size at which any of them was timed."""
    rows = measured(data, "peers")
    others = [row for row in rows if row["name"] in (OPEN_CLIP, INF_CL)]
    if not others:
        return ""
    b = max(row["rows"] * row["n"] for row in others)
    own = ours(rows, b, others[0]["d"])
    here = [row for row in others if row["rows"] * row["n"] == b]
    found = [f"{row['name']} takes {number(median(row) / median(own))} times as long" for row in here if own]
    return f"At b = {b:,} on {others[0]['n']} ranks {' and '.join(found)}." if found else ""


def skipped(data: Data) -> str:
    """What was not timed, and why."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in data["times"]:
        if row["status"] == "skip":
            found.setdefault((row["name"], row["reason"]), []).append(f"{row['rows']:,} a rank")
    lines = [f"- {name}, {'; '.join(dict.fromkeys(sizes))}: {reason}" for (name, reason), sizes in found.items()]
    lines += [f"- {row['pairs']:,} pairs: {row['reason']}" for row in data["headline"] if row["status"] == "skip"]
    return "\n".join(lines)
