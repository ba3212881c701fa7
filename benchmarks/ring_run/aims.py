"""What was aimed at on several GPUs, and what was reached."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_run.tables import number, percent, table

from ring_run import tables
from ring_run.plan import IN_A_GRAPH, OPEN_CLIP, OURS, RING
from ring_run.tables import Data, Row

SHARD = 8192
"""Pairs of a rank at which a step is bound by its host."""
BEHIND = 0.05
"""How far ``exchange="auto"`` may lie behind the better of ring and gather."""


def aims(data: Data) -> str:
    """What was aimed at, and what was reached."""
    lines = [*_scaling_aims(data), *_auto_aim(data), *_memory_aim(data), *_peer_aims(data)]
    return table(("aim", "found", "reached"), [[what, found, tables.yes(holds)] for what, found, holds in lines])


def _best(rows: list[Row], n: int) -> Row | None:
    return min((row for row in rows if row["n"] == n), key=tables.median, default=None)


def _scaling_aims(data: Data) -> Iterator[tuple[str, str, bool]]:
    for kind, pairs, least, words in (
        ("weak", 32768, 0.95, "weak scaling, 32,768 pairs a rank, d = 512, at least 95 %"),
        ("strong", 262144, 0.90, "strong scaling, b = 262,144, d = 512, at least 90 %"),
    ):
        for size, d, rows in tables.families(data, kind):
            one = tables.alone(rows)
            for n in sorted({row["n"] for row in rows} - {1}) if one and (size, d) == (pairs, 512) else ():
                best = _best(rows, n)
                if best is not None and one is not None:
                    reached = tables.efficiency(best, one)
                    yield f"{words}: {n} ranks", f"{percent(reached)} ({tables.exchange(best)})", reached >= least


def _auto_aim(data: Data) -> Iterator[tuple[str, str, bool]]:
    found = [(tables.behind(*pair), pair[0]) for pair in tables.choices(data)]
    if found:
        worst, row = max(found, key=lambda each: each[0])
        where = f"{row['rows']:,} pairs a rank, d = {row['d']}, {row['n']} ranks"
        words = f"auto never more than {100 * BEHIND:.0f} % behind the better of ring and gather"
        yield words, f"{percent(worst)} at worst, of {len(found)} points ({where})", worst <= BEHIND


def _memory_aim(data: Data) -> Iterator[tuple[str, str, bool]]:
    """What grows with the shard falls as 1 / n; a workspace of fixed size does not."""
    for b, d, rows in tables.families(data, "strong"):
        held = {row["n"]: row["peak_bytes"] for row in rows if row.get("exchange") == RING and row.get("peak_bytes")}
        sizes = sorted(held)
        if (b, d) == (262144, 512) and len(sizes) > 1:
            few, many = sizes[0], sizes[-1]
            # held = workspace + shard / n: what shrinks from few to many is shard (1 / few - 1 / many)
            shard = (held[few] - held[many]) / (1 / few - 1 / many)
            fixed = held[many] - shard / many
            words = f"extra memory of a rank falls as 1 / n beyond a fixed workspace: ring, b = {b:,}, d = {d}"
            on_few, on_many, still = (number(x / tables.MIB) for x in (held[few], held[many], fixed))
            found = f"{on_few} MiB on {few}, {on_many} on {many}, of which fixed {still}"
            yield words, found, shard > 0


def _peer_aims(data: Data) -> Iterator[tuple[str, str, bool]]:
    rows = tables.measured(data, "peers")
    for b, least in ((65536, 2.0), (262144, 2.5)):
        here = {row["name"]: row for row in rows if row["rows"] * row["n"] == b and row["d"] == 512}
        own, other = here.get(f"{OURS}, auto"), here.get(OPEN_CLIP)
        if own and other:
            times = tables.median(other) / tables.median(own)
            words = f"at least {least:g} times as fast as open_clip's local loss: b = {b:,} on {own['n']} ranks"
            yield words, f"{number(times)} times", times >= least
    few = {row["name"]: tables.median(row) for row in rows if (row["rows"], row["d"]) == (SHARD, 512)}
    others = [few[name] for name in (OPEN_CLIP, OPEN_CLIP + IN_A_GRAPH) if name in few]
    for name, words in ((f"{OURS}, auto", ""), (f"{OURS}, auto{IN_A_GRAPH}", IN_A_GRAPH)):
        if others and name in few:
            times = min(others) / few[name]
            aim = f"at least 2 times as fast as open_clip's local loss at its best: {SHARD:,} pairs a rank{words}"
            yield aim, f"{number(times)} times", times >= 2.0
