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

ADAPTER_ERRORS = ("AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "TypeError")
"""Errors of an adapter, not of a loss: they end the run."""
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
"""The properties, cases and numbers of ranks that each column summarizes; the column of memory growth comes last."""
MEMORY = "memory growth"


def measure_peer(peer: Any) -> dict[str, Any]:
    """The cells of one peer, and where it ran: "CPU", "Triton's interpreter", a GPU's name, or "" if it cannot run.

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
    errors = [row["reason"] for row in rows if any(f"raised {name}" in row["reason"] for name in ADAPTER_ERRORS)]
    if errors:
        raise RuntimeError(f"{peer.__name__}: the adapter is wrong: {errors[0]}")
    cells = {name: cell(rows, name) for name in COLUMNS}
    cells[MEMORY] = LEFT_OUT if MEMORY_CASE in peer.without else memory_growth(loss, loss.claims.dtypes[0], device)
    return {"where": torch.cuda.get_device_name() if device == "cuda" else place, "reason": "", "cells": cells}


def cell(rows: Sequence[Any], column: str) -> Cell:
    """The worst of a column's rows: a failure, or the largest ratio; if none was tested, the reason."""
    properties, cases, worlds = COLUMNS[column]
    column_rows = [
        row
        for row in rows
        if row["property"] in (*properties, "all")
        and row["case"] in (*cases, "all")
        and (row["world"] in worlds or row["status"] == UNCLAIMED)
    ]
    tested = [row for row in column_rows if row["status"] in ("pass", "fail")]
    if not tested:
        # a reason for the column's own cases comes before a reason for all cases
        reasons = [row["reason"] for row in sorted(column_rows, key=lambda row: row["case"] == "all")]
        status = "untested" if any(row["status"] == "untested" for row in column_rows) else "-"
        return {"status": status, "reason": reasons[0]} if reasons else LEFT_OUT
    failed = [row for row in tested if row["status"] == "fail"]
    worst = max(failed or tested, key=lambda row: row["ratio"])
    ratio = float(f"{worst['ratio']:.3g}") if math.isfinite(worst["ratio"]) else "inf"
    result = {"status": "fail" if failed else "pass", "ratio": ratio, "failed": len(failed), "checks": len(tested)}
    return result | {name: worst[name] for name in ("property", "case", "world", "reason")}


def memory_growth(loss: Loss, dtype: str, device: str) -> Cell:
    """The growth of a step's peak memory when the batch doubles, as a factor and as a power of b."""
    claims = loss.claims
    width, double = claims.width(8), claims.batch(LARGEST)
    half = None if double is None else claims.batch(double // 2)
    if width is None or half is None or double is None or half >= double:
        return {"status": "-", "reason": "its sizes are fixed"}

    def step(b: int) -> float:
        call = prepare(loss, sized(claims, b, width, dtype).arguments, dtype, device)
        return peak.peak_bytes(loss.arrays.name, device, lambda: call.finish(call()))

    # the first call fills caches
    step(half)
    small, large = step(half), step(double)
    power = round(math.log2(large / small) / math.log2(double / half))
    return {"status": "measured", "times": float(f"{large / small:.3g}"), "power": power, "from": half, "to": double}


def run_python(*command: str, interpreted: bool) -> subprocess.CompletedProcess[str]:
    """Run Python in another process, under Triton's interpreter if the command needs it and there is no GPU."""
    interpreter = str(int(interpreted and not torch.cuda.is_available()))
    environment = os.environ | {"TRITON_INTERPRET": interpreter, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-W", "ignore", *command)
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)


def measure_in_process(name: str) -> dict[str, Any]:
    """The record of one peer, measured in another process.

    Raises:
        RuntimeError: the process ended early, or the adapter is wrong.
    """
    peer = PEERS[name]
    process = run_python(__file__, "--measure", name, interpreted=peer.needs == INTERPRETED)
    if process.returncode:
        raise RuntimeError(f"{name}: {process.stderr.strip().rpartition(chr(10))[2]}")
    record = {"name": name, "package": peer.package, "about": peer.about, "objective": peer.claims.objective}
    record |= {"dtype": peer.claims.dtypes[0], "without": list(peer.without)}
    return record | json.loads(process.stdout)


def read_reproducer(path: Path) -> list[dict[str, Any]]:
    """The facts in the docstring of a reproducer: a row for each number of ranks."""
    says, _, metadata = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")
    fields = dict(line.split(": ", 1) for line in metadata.splitlines())
    row = {"fact": path.stem, "says": " ".join(says.split()), "package": fields["package"]}
    row |= {"version": installed_version(fields["package"]), "case": fields["case"]}
    ranks = map(int, fields.get("ranks", "1").split())
    return [row | {"ranks": n, "interpreter": "interpreter" in fields} for n in ranks]


def reproduce(path: Path) -> Iterator[dict[str, Any]]:
    """Run a reproducer: a row for each number of ranks, with the value found, the right one, whether they differ."""
    for row in read_reproducer(path):
        if row["version"] is None:
            yield row | {"status": "skip", "reason": f"{row['package']} is not installed"}
            continue
        launcher = "-m", "torch.distributed.run", "--local-ranks-filter", "0", "--nproc-per-node", str(row["ranks"])
        program = (*(launcher if row["ranks"] > 1 else ()), stubs.__file__, str(path))
        process = run_python(*program, interpreted=row["interpreter"])
        match = re.search(r"^(?P<what>.+) = (?P<found>\S+), right (?P<right>\S+)$", process.stdout, re.MULTILINE)
        if match is None:
            yield row | {"status": "fail", "reason": " ".join((process.stdout + process.stderr).split())[-300:]}
            continue
        status = "reproduced" if match["found"] != match["right"] else "not reproduced"
        yield row | {"status": status, **match.groupdict()}


def facts(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run these reproducers, or all; print their rows and return them."""
    rows = []
    for path in [FACTS / f"{name}.py" for name in names] or sorted(FACTS.glob("*.py")):
        for row in reproduce(path):
            result = row.get("reason") or f"{row['what']} = {row['found']}, right {row['right']}"
            about = f"{row['package']} {row['version']}, {row['ranks']} ranks: {row['status']}"
            print(f"{path.stem}: {row['says']}\n  {about}: {result}", flush=True)
            rows.append(row)
    return rows


def environment() -> dict[str, Any]:
    """The versions of everything that ran, and the packages that have stand-ins."""
    packages = sorted({peer.package for peer in PEERS.values()} - {"contrastile", "torch"}, key=str.lower)
    versions = {name: installed_version(name) for name in (*packages, "triton")}
    details = {"contrastile": contrastile.__version__, "packages": versions, "stand-ins": list(stubs.install())}
    return measurement_environment() | details


def main() -> int:
    """See the module's docstring; 1 where a fact that was asked for is not reproduced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=[*PEERS], metavar="PEER", help=", ".join(PEERS))
    add("--fact", nargs="+", choices=[path.stem for path in sorted(FACTS.glob("*.py"))], metavar="NAME")
    add("--measure", choices=[*PEERS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        with redirect_stdout(sys.stderr):
            measurement = measure_peer(PEERS[args.measure])
        print(json.dumps(measurement))
        return 0
    if args.fact:
        return int(any(row["status"] in ("fail", "not reproduced") for row in facts(args.fact)))
    record = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {"peers": [], "facts": []}
    known = {row["name"]: row for row in record["peers"]}
    for name in args.only or PEERS:
        print(name, flush=True)
        known[name] = measure_in_process(name)
    fact_rows = facts() if args.only is None else record["facts"]
    peers = [known[name] for name in PEERS if name in known]
    record = {"environment": environment(), "peers": peers, "facts": fact_rows}
    RESULT.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
