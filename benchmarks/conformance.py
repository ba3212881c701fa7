"""Holds published losses to the cases of ``contrastile verify --loss``: docs/results/conformance.json.

    pip install -r benchmarks/peers/requirements.txt
    python benchmarks/conformance.py                            # everything; takes minutes
    python benchmarks/conformance.py --only lightly inf_cl      # these; the others stay as they were recorded
    python benchmarks/conformance.py --fact inf_cl_padding      # run this reproducer, and write nothing
    python scripts/make_pages.py                                # the page, from the record

A reproducer is a file of a few lines in ``peers/facts`` that needs torch and the one package, for what no case shows.
Its docstring says what it shows, then ``package``, ``case``, ``ranks`` (numbers of ranks to run it on) and
``interpreter`` (it runs a kernel, on a GPU or in Triton's interpreter). It prints ``what = found, right value``, and
the fact is reproduced where the two differ.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from peers import stubs  # noqa: E402
from peers.adapters import INTERPRETED, KERNEL, PEERS  # noqa: E402

import contrastile  # noqa: E402
from contrastile.backends.registry import installed_version  # noqa: E402
from contrastile.environment import measurement_environment  # noqa: E402
from contrastile.verify import peak  # noqa: E402
from contrastile.verify.losses import Loss, check  # noqa: E402
from contrastile.verify.losses.cases import BATCHES, sized  # noqa: E402
from contrastile.verify.losses.cases import MEMORY as MEMORY_CASE  # noqa: E402
from contrastile.verify.losses.properties import prepare  # noqa: E402
from contrastile.verify.losses.ranks import SHARDS  # noqa: E402
from contrastile.verify.runner import UNCLAIMED  # noqa: E402

RESULT = HERE.parent / "docs" / "results" / "conformance.json"
FACTS = HERE / "peers" / "facts"
Cell = dict[str, Any]

ADAPTER = ("AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "TypeError")
"""Errors that an adapter makes, not a loss: the run ends."""
LEFT_OUT = {"status": "-", "reason": "not claimed, or left out"}
LARGEST = 1024
SECONDS = 1800

_AGREE, _DDP = ("value", "gradients", "scale-gradient"), ("ddp-value", "ddp-gradients", "ddp-scale-gradient")
_EXTREME = ("hot", "certain", "certain@300", "large-logits", "opposite", "one-direction", "staircase", "norm-30")
_EXTREME += ("scale-0", "negative-scale")
_ORDINARY, _RAGGED = ("smoke", "aligned", "duplicates", "wordnet"), ("ragged", "wide", "deep", "one-pair")
_RAGGED += ("one-token", "many-tokens", "masked", "masked@opposite")
COLUMNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]] = {
    "value": (("value",), _ORDINARY, (1,)),
    "gradients": (("gradients",), _ORDINARY, (1,)),
    "scale gradient": (("scale-gradient",), _ORDINARY, (1,)),
    "extreme logits": (_AGREE, _EXTREME, (1,)),
    "equal ids": (_AGREE, ("ids", "ids@far"), (1,)),
    "ragged sizes": (_AGREE, _RAGGED, (1,)),
    "NaN": (("value",), ("nan",), (1,)),
    "strided views": (("strided",), (*_ORDINARY, *_RAGGED), (1,)),
    "determinism": (("determinism",), tuple(BATCHES), (1,)),
    "DDP: value": (("ddp-value",), ("shards",), (2, 3)),
    "DDP: gradients, 2 ranks": (("ddp-gradients",), ("shards",), (2,)),
    "DDP: gradients, 3 ranks": (("ddp-gradients",), ("shards",), (3,)),
    "DDP: scale gradient": (("ddp-scale-gradient",), ("shards",), (2, 3)),
    "DDP: uneven shards": (_DDP, ("shards@uneven",), (2, 3)),
}
"""The properties, cases and numbers of ranks that each column sums up; memory growth comes last."""
MEMORY = "memory growth"


def measured(peer: Any) -> dict[str, Any]:
    """The cells of one peer, and where it ran: "CPU", "Triton's interpreter", a GPU's name, or "" where it cannot.

    Raises:
        RuntimeError: the adapter is wrong.
    """
    device = "cuda" if peer.needs and torch.cuda.is_available() else "cpu"
    if device == "cpu" and peer.needs == KERNEL:
        return {"where": "", "reason": "not run: needs a GPU", "cells": {}}
    place = "Triton's interpreter" if peer.needs else "CPU"
    loss = Loss.of(peer, replace(peer.claims, devices=(device,)))
    cases = [name for name in (*BATCHES, *SHARDS) if name not in peer.without]
    rows = list(check(loss, dtypes=loss.claims.dtypes, cases=cases, device=device))
    broken = [row["reason"] for row in rows if any(f"raised {name}" in row["reason"] for name in ADAPTER)]
    if broken:
        raise RuntimeError(f"{peer.__name__}: the adapter is wrong: {broken[0]}")
    cells = {name: cell(rows, name) for name in COLUMNS}
    cells[MEMORY] = LEFT_OUT if MEMORY_CASE in peer.without else memory_growth(loss, loss.claims.dtypes[0], device)
    return {"where": torch.cuda.get_device_name() if device == "cuda" else place, "reason": "", "cells": cells}


def cell(rows: Sequence[Any], column: str) -> Cell:
    """The worst of a column's rows: a failure, or the largest ratio; where nothing was tested, why."""
    properties, cases, worlds = COLUMNS[column]
    own = [
        row
        for row in rows
        if row["property"] in (*properties, "all")
        and row["case"] in (*cases, "all")
        and (row["world"] in worlds or row["status"] == UNCLAIMED)
    ]
    tested = [row for row in own if row["status"] in ("pass", "fail")]
    if not tested:
        # what is said of the column's own cases, before what is said of all
        reasons = [row["reason"] for row in sorted(own, key=lambda row: row["case"] == "all")]
        status = "untested" if any(row["status"] == "untested" for row in own) else "-"
        return {"status": status, "reason": reasons[0]} if reasons else LEFT_OUT
    failed = [row for row in tested if row["status"] == "fail"]
    worst = max(failed or tested, key=lambda row: row["ratio"])
    ratio = float(f"{worst['ratio']:.3g}") if math.isfinite(worst["ratio"]) else "inf"
    found = {"status": "fail" if failed else "pass", "ratio": ratio, "failed": len(failed), "checks": len(tested)}
    return found | {name: worst[name] for name in ("property", "case", "world", "reason")}


def memory_growth(loss: Loss, dtype: str, device: str) -> Cell:
    """How many times the peak of a step's memory grows where the batch doubles, and the power of b that this is."""
    claims = loss.claims
    width, two = claims.width(8), claims.batch(LARGEST)
    one = None if two is None else claims.batch(two // 2)
    if width is None or one is None or two is None or one >= two:
        return {"status": "-", "reason": "its sizes are fixed"}

    def step(b: int) -> float:
        call = prepare(loss, sized(claims, b, width, dtype).arguments, dtype, device)
        return peak.peak_bytes(loss.arrays.name, device, lambda: call.finish(call()))

    # a first call fills caches
    step(one)
    small, large = step(one), step(two)
    power = round(math.log2(large / small) / math.log2(two / one))
    return {"status": "measured", "times": float(f"{large / small:.3g}"), "power": power, "from": one, "to": two}


def ran(*command: str, interpreted: bool) -> subprocess.CompletedProcess[str]:
    """A process of its own, under Triton's interpreter where it needs that and there is no GPU."""
    interpreter = str(int(interpreted and not torch.cuda.is_available()))
    environment = os.environ | {"TRITON_INTERPRET": interpreter, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-W", "ignore", *command)
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)


def in_a_process(name: str) -> dict[str, Any]:
    """The record of one peer.

    Raises:
        RuntimeError: the process ended early, or the adapter is wrong.
    """
    peer = PEERS[name]
    ended = ran(__file__, "--measure", name, interpreted=peer.needs == INTERPRETED)
    if ended.returncode:
        raise RuntimeError(f"{name}: {ended.stderr.strip().rpartition(chr(10))[2]}")
    record = {"name": name, "package": peer.package, "about": peer.about, "objective": peer.claims.objective}
    record |= {"dtype": peer.claims.dtypes[0], "without": list(peer.without)}
    return record | json.loads(ended.stdout)


def stated(path: Path) -> list[dict[str, Any]]:
    """What the docstring of a reproducer states, once for each number of ranks."""
    says, _, rest = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")
    fields = dict(line.split(": ", 1) for line in rest.splitlines())
    row = {"fact": path.stem, "says": " ".join(says.split()), "package": fields["package"]}
    row |= {"version": installed_version(fields["package"]), "case": fields["case"]}
    ranks = map(int, fields.get("ranks", "1").split())
    return [row | {"ranks": n, "interpreter": "interpreter" in fields} for n in ranks]


def shown(path: Path) -> Iterator[dict[str, Any]]:
    """A row for each number of ranks: what was found, what is right, whether they differ."""
    for row in stated(path):
        if row["version"] is None:
            yield row | {"status": "skip", "reason": f"{row['package']} is not installed"}
            continue
        launcher = "-m", "torch.distributed.run", "--local-ranks-filter", "0", "--nproc-per-node", str(row["ranks"])
        program = (*(launcher if row["ranks"] > 1 else ()), stubs.__file__, str(path))
        ended = ran(*program, interpreted=row["interpreter"])
        said = re.search(r"^(?P<what>.+) = (?P<found>\S+), right (?P<right>\S+)$", ended.stdout, re.MULTILINE)
        if said is None:
            yield row | {"status": "fail", "reason": " ".join((ended.stdout + ended.stderr).split())[-300:]}
            continue
        status = "reproduced" if said["found"] != said["right"] else "not reproduced"
        yield row | {"status": status, **said.groupdict()}


def facts(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of these reproducers, or of all, printed as they come."""
    rows = []
    for path in [FACTS / f"{name}.py" for name in names] or sorted(FACTS.glob("*.py")):
        for row in shown(path):
            what = row.get("reason") or f"{row['what']} = {row['found']}, right {row['right']}"
            about = f"{row['package']} {row['version']}, {row['ranks']} ranks: {row['status']}"
            print(f"{path.stem}: {row['says']}\n  {about}: {what}", flush=True)
            rows.append(row)
    return rows


def environment() -> dict[str, Any]:
    """What everything ran with: versions, and what was stood in for."""
    packages = sorted({peer.package for peer in PEERS.values()} - {"contrastile", "torch"}, key=str.lower)
    versions = {name: installed_version(name) for name in (*packages, "triton")}
    more = {"contrastile": contrastile.__version__, "packages": versions, "stand-ins": list(stubs.install())}
    return measurement_environment() | more


def main() -> int:
    """See the module's docstring; 1 where a fact that was asked for is not reproduced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=[*PEERS], metavar="PEER", help=", ".join(PEERS))
    add("--fact", nargs="+", choices=[path.stem for path in sorted(FACTS.glob("*.py"))], metavar="NAME")
    add("--measure", choices=[*PEERS], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        with redirect_stdout(sys.stderr):
            found = measured(PEERS[given.measure])
        print(json.dumps(found))
        return 0
    if given.fact:
        return int(any(row["status"] in ("fail", "not reproduced") for row in facts(given.fact)))
    record = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"peers": [], "facts": []}
    known = {row["name"]: row for row in record["peers"]}
    for name in given.only or PEERS:
        print(name, flush=True)
        known[name] = in_a_process(name)
    told = facts() if given.only is None else record["facts"]
    peers = [known[name] for name in PEERS if name in known]
    record = {"environment": environment(), "peers": peers, "facts": told}
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
