"""Weak and strong scaling, the sizes of a shard at which the gather wins, and the share of the messages that is hidden.

A batch of ``b`` pairs on n ranks asks ``8 b^2 d / n`` FLOPs of each. With as many pairs on every rank the work of each
grows as n, so that perfect weak scaling is n times the time of a rank alone with its own pairs, not as much time.
"""

from __future__ import annotations

from typing import Any

from contrastile.comm.connect import connect
from ring_run.bench import Bench, Calls
from ring_run.plan import AUTO, GATHER, LOCAL, RING, Size
from ring_run.stand_ins import Silent

ROUNDS = 3
SHORT = 0.4
"""Samples of what is compared at many sizes are this much shorter."""


def steps(bench: Bench, size: Size, n: int, exchanges: tuple[str, ...]) -> Calls:
    """Whole steps of a batch on n ranks, by their names."""
    rows = size.rows(n)
    part = bench.even(n, rows, size.d)
    row = {"n": n, "rows": rows, "d": size.d, "what": "step", **bench.chosen(part)}
    return {f"{how} on {n}": (bench.step(part, how), row | {"exchange": how}) for how in exchanges}


def scaling(bench: Bench) -> None:
    """The same batch, or as many pairs on every rank, on every number of ranks; all in turns."""
    sizes = list(bench.ranks.groups)
    for size in bench.plan.scaling:
        bench.tidy()
        calls: Calls = {}
        for n in sizes:
            whole = (RING, GATHER, AUTO) if n == max(sizes) else (RING, GATHER)
            calls |= steps(bench, size, n, whole if n > 1 else (LOCAL,))
        for _, row in calls.values():
            row["kind"] = "weak" if size.each else "strong"
        bench.times("scaling", calls, ROUNDS, memory=True)
    bench.tidy()


def shards(bench: Bench) -> None:
    """Ring against gather over the sizes of a shard."""
    for rows, d in bench.plan.shards:
        bench.tidy()
        calls: Calls = {}
        for n in bench.ranks.groups:
            if n > 1:
                calls |= steps(bench, Size(rows, d, each=True), n, (RING, GATHER))
        calls |= bench.in_graphs({name: calls[name] for name in calls if name == f"{GATHER} on {bench.ranks.size}"})
        bench.times("shards", calls, ROUNDS, slot=SHORT * bench.slot, patience=2.0)
    bench.tidy()


def hidden(bench: Bench) -> None:
    """A step whole, without its messages, without its products, and without either."""
    n = bench.ranks.size
    if n == 1:
        return
    real: Any = connect(bench.ranks.groups[n])
    silent, mute = Silent(real, handshake=True), Silent(real, handshake=False)
    idle = f"ring_run.stand_ins:idle_{bench.backend}"
    for rows, d in bench.plan.hidden:
        bench.tidy()
        part = bench.even(n, rows, d)
        calls: Calls = {}
        for how in (RING, GATHER):
            for what, group, backend in (
                ("step", None, ""),
                ("no messages", silent, ""),
                ("no messages, no handshake", mute, ""),
                ("no products", None, idle),
                ("neither", silent, idle),
            ):
                row = {"n": n, "rows": rows, "d": d, "exchange": how, "what": what}
                calls[f"{how}, {what}"] = bench.step(part, how, group=group, backend=backend), row
        bench.times("hidden", calls, ROUNDS, slot=SHORT * bench.slot, patience=3.0)
    bench.tidy()
