"""The cells of the conformance table: what the cases found of a published loss, summed up column by column."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from contrastile.verify import peak
from contrastile.verify.losses import Loss, check
from contrastile.verify.losses.cases import BATCHES, sized
from contrastile.verify.losses.cases import MEMORY as MEMORY_CASE
from contrastile.verify.losses.properties import prepare
from contrastile.verify.losses.ranks import SHARDS
from contrastile.verify.runner import UNCLAIMED
from peers.adapters import INTERPRETED, KERNEL, PEERS, Peer

Cell = dict[str, Any]

AGREE = ("value", "gradients", "scale-gradient")
EXTREME = (
    *("hot", "certain", "certain@300", "large-logits", "opposite", "one-direction", "staircase", "norm-30"),
    *("scale-0", "negative-scale"),
)
RAGGED = ("ragged", "wide", "deep", "one-pair")
ORDINARY = ("smoke", "aligned", "duplicates", "wordnet")
MEMORY = "memory growth"
ADAPTER = ("AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "TypeError")
"""Errors that an adapter makes, not a loss: the run ends."""
LEFT_OUT = "not claimed, or left out"
LARGEST = 1024
SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Column:
    """What a column sums up: rows of these properties, cases and numbers of ranks."""

    properties: tuple[str, ...]
    cases: tuple[str, ...]
    worlds: tuple[int, ...] = (1,)

    def holds(self, row: Any) -> bool:
        """Whether a row belongs to it."""
        return (
            row["property"] in (*self.properties, "all")
            and row["case"] in (*self.cases, "all")
            and (row["world"] in self.worlds or row["status"] == UNCLAIMED)
        )


_DDP = ("ddp-value", "ddp-gradients", "ddp-scale-gradient")
COLUMNS = {
    "value": Column(("value",), ORDINARY),
    "gradients": Column(("gradients",), ORDINARY),
    "scale gradient": Column(("scale-gradient",), ORDINARY),
    "extreme logits": Column(AGREE, EXTREME),
    "equal ids": Column(AGREE, ("ids", "ids@far")),
    "ragged sizes": Column(AGREE, RAGGED),
    "NaN": Column(("value",), ("nan",)),
    "strided views": Column(("strided",), (*ORDINARY, *RAGGED)),
    "determinism": Column(("determinism",), tuple(BATCHES)),
    "DDP: value": Column(("ddp-value",), ("shards",), (2, 3)),
    "DDP: gradients, 2 ranks": Column(("ddp-gradients",), ("shards",), (2,)),
    "DDP: gradients, 3 ranks": Column(("ddp-gradients",), ("shards",), (3,)),
    "DDP: scale gradient": Column(("ddp-scale-gradient",), ("shards",), (2, 3)),
    "DDP: uneven shards": Column(_DDP, ("shards@uneven",), (2, 3)),
}
"""All columns but the last, memory growth, in their order."""


def where(peer: Peer) -> str:
    """Where it runs here: "CPU", "Triton's interpreter", a GPU's name, or "" where it cannot."""
    import torch

    if not peer.needs:
        return "CPU"
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return "Triton's interpreter" if peer.needs == INTERPRETED else ""


def measured(peer: Peer) -> dict[str, Any]:
    """The cells of one peer, and where it ran."""
    place = where(peer)
    if not place:
        return {"where": "", "reason": "not run: needs a GPU", "cells": {}}
    device = "cuda" if peer.needs and "interpreter" not in place else "cpu"
    loss = Loss.of(peer.make, replace(peer.claims, devices=(device,)))
    dtype = loss.claims.dtypes[0]
    cases = [name for name in (*BATCHES, *SHARDS) if name not in peer.without]
    with redirect_stdout(sys.stderr):
        rows = list(check(loss, dtypes=loss.claims.dtypes, cases=cases, device=device))
        broken = [row["reason"] for row in rows if any(f"raised {name}" in row["reason"] for name in ADAPTER)]
        if broken:
            raise RuntimeError(f"{peer.name}: the adapter is wrong: {broken[0]}")
        left_out = {"status": "-", "reason": LEFT_OUT}
        growth = left_out if MEMORY_CASE in peer.without else memory_growth(loss, dtype, device)
    cells = {name: cell(rows, column) for name, column in COLUMNS.items()}
    return {"where": place, "reason": "", "cells": cells | {MEMORY: growth}}


def cell(rows: Sequence[Any], column: Column) -> Cell:
    """The worst of the column's rows: a failure, or the largest ratio; where nothing was tested, why."""
    own = [row for row in rows if column.holds(row)]
    tested = [row for row in own if row["status"] in ("pass", "fail")]
    if not tested:
        # what is said of the column's own cases, before what is said of all
        reason = next((row["reason"] for row in sorted(own, key=lambda row: row["case"] == "all")), LEFT_OUT)
        return {"status": "untested" if any(row["status"] == "untested" for row in own) else "-", "reason": reason}
    failed = [row for row in tested if row["status"] == "fail"]
    worst = max(failed or tested, key=lambda row: row["ratio"])
    return {
        "status": "fail" if failed else "pass",
        "ratio": rounded(worst["ratio"]),
        "failed": len(failed),
        "checks": len(tested),
        "property": worst["property"],
        "case": worst["case"],
        "world": worst["world"],
        "reason": worst["reason"],
    }


def rounded(x: float) -> float | str:
    """Three digits; "inf" where JSON has no number."""
    return float(f"{x:.3g}") if math.isfinite(x) else "inf"


def memory_growth(loss: Loss, dtype: str, device: str) -> Cell:
    """How many times the peak of a step's memory grows where the batch doubles, and the power of b that this is."""
    claims = loss.claims
    width, two = claims.width(8), claims.batch(LARGEST)
    one = None if two is None else claims.batch(two // 2)
    if width is None or one is None or two is None or one >= two:
        return {"status": "-", "reason": "its sizes are fixed"}

    def step(b: int) -> float:
        call = prepare(loss, sized(claims, b, width, dtype).arguments, dtype, device)
        return peak.peak_bytes(loss.arrays, device, lambda: call.finish(call(loss.call)))

    # a first call fills caches
    step(one)
    small, large = step(one), step(two)
    power = round(math.log2(large / small) / math.log2(two / one))
    times = float(f"{large / small:.3g}")
    return {"status": "measured", "times": times, "power": power, "from": one, "to": two}


def in_a_process(name: str) -> dict[str, Any]:
    """The record of one peer, measured in a process of its own, under Triton's interpreter where it needs that.

    Raises:
        RuntimeError: the process ended early, or the adapter is wrong.
    """
    peer = PEERS[name]
    record = {"name": name, "package": peer.package, "about": peer.about, "objective": peer.claims.objective}
    record |= {"dtype": peer.claims.dtypes[0], "without": list(peer.without)}
    if peer.needs == KERNEL and not where(peer):
        return record | measured(peer)
    interpreted = peer.needs == INTERPRETED and "interpreter" in where(peer)
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpreted)), "OMP_NUM_THREADS": "1"}
    program = f"import json; from peers import table; print(json.dumps(table.measured(table.PEERS[{name!r}])))"
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment | {"PYTHONPATH": path},
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"{name}: {ended.stderr.strip().rpartition(chr(10))[2]}")
    found: dict[str, Any] = json.loads(ended.stdout.strip().rpartition("\n")[2])
    return record | found
