"""Measures what becomes of all ranks when one fails, or makes another call: the records of docs/how-to/faults.md.

    python scripts/measure_faults.py faults mistakes               # on the CPU of this machine, under every launcher
    python scripts/measure_faults.py faults_gpus mistakes_gpus     # over NCCL, on this machine's GPUs
    python scripts/make_pages.py                                   # the tables

A fault comes between two calls and in the middle of a ring, on GPUs in a ring alone. A wrong number without an error
ends the script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEADLINE, RANKS, FAULTY, FAULTY_GPU, MISTAKEN = 10, 4, 2, 3, 1
AT_A_TIME = {False: 4, True: 5}
"""Launches at a time, on a CPU and on GPUs."""

FAULTS = {
    "killed": "is killed (SIGKILL)",
    "raises": "raises an exception",
    "leaves": "leaves early",
    "stalls": "stalls",
}
MISTAKES = {
    "skipped backward": "skips a backward and goes on",
    "skipped forward": "skips a forward and goes on",
    "swapped backwards": "runs two backwards in the other order",
    "raised between": "raises between forward and backward, and ends",
    "broken backward": "raises within a backward, and goes on",
    "two models": "trains two models over one group, as all ranks do",
    "two models in another order": "takes two models, a group for each, in the other order",
    "another scale": "holds another scale, as a tensor",
}
RAISED = re.compile("(?:Exchange|Mismatch)Error: ")
CARRIERS = "mpi", "torch"
PLACES = "before", "inside"
LAUNCHERS = {
    "mpi": "`mpirun python -m mpi4py`",
    "plain mpi": "`mpirun python`",
    "torch": "`torchrun`",
}
Row = dict[str, Any]


def fault(cuda: bool, fault: str, where: str, launcher: str) -> Row:
    """One launch in which a rank fails."""
    faulty = FAULTY_GPU if cuda else FAULTY
    program = str(ROOT / "tests" / "gpu" / "programs" / "exchange.py")
    ended = _launch(launcher, program, fault) if cuda else _launch(launcher, "faults.py", fault, where, str(faulty))
    last = [line for rank in range(RANKS) if rank != faulty for line in ended.said(rank)[-1:]]
    raised = [line for line in last if "ExchangeError" in line]
    named = sum(f"ExchangeError: rank {faulty} " in line for line in raised)
    row = {"fault": fault, "where": where, "launcher": launcher, **_ending(ended, faulty), "raised": len(raised)}
    if not cuda:
        message = min((re.sub(r"^\S+ ExchangeError: ", "", line) for line in raised), default="")
        return row | {"named": named, "message": message}
    gave_up = re.findall(r"^contrastile: rank\(s\) (.*) did not answer on the device", ended.output, re.MULTILINE)
    carried = next(iter(re.findall(r"messages by (.*)$", ended.output, re.MULTILINE)), "").strip()
    named += sum(str(faulty) in ranks.split(", ") for ranks in gave_up)
    return row | {"carried by": carried, "ended": len(gave_up), "named": named}


def mistake(cuda: bool, mistake: str, exchange: str, by: str, ranks: int) -> Row:
    """One launch in which a rank makes another call than the others."""
    args = [mistake, exchange, str(MISTAKEN), *(["cuda"] if cuda else [])]
    # a launch may take long to begin; what is measured begins with the mistake
    ended = _launch(by, "mistakes.py", *args, ranks=ranks, seconds=600)
    last = [next(iter(ended.said(rank)[-1:]), "") for rank in range(ranks)]
    if "WrongError" in ended.output:
        raise SystemExit(f"{mistake}, {exchange}, {by}, {ranks} ranks: a wrong number\n{ended.output}")
    right = [int(found[1]) if (found := re.match(r"\S+ (\d+) right", line)) else 0 for line in last]
    made = _failed(ended, MISTAKEN)
    late = [float(line.split()[0]) - made for line in last if RAISED.search(line) and made is not None]
    row = {"mistake": mistake, "exchange": exchange, "by": by, "ranks": ranks, **_ending(ended, MISTAKEN)}
    return row | {
        "right": sum(right),
        "all right": sum(line.endswith(" right") for line in last),
        "raised": sum(map(bool, map(RAISED.search, last))),
        "heard": round(max(late), 2) if late else None,
        "gave up": ended.output.count("did not answer on the device"),
        "message": min((RAISED.split(line)[1] for line in last if RAISED.search(line)), default=""),
    }


def _launch(launcher: str, program: str, *args: str, ranks: int = RANKS, seconds: float = 60) -> Any:
    sys.path.insert(0, str(ROOT / "tests" / "comm"))
    from launching import launch

    return launch(launcher, program, *args, ranks=ranks, seconds=seconds, CONTRASTILE_DEADLINE=str(DEADLINE))


def _failed(ended: Any, rank: int) -> float | None:
    """When a rank failed, or made its mistake; None where the launch ended before it."""
    return next((float(line.split()[1]) for line in ended.said(rank) if line.startswith("fails")), None)


def _ending(ended: Any, faulty: int) -> Row:
    failed = _failed(ended, faulty)
    seconds = float("nan") if failed is None else round(ended.finished - failed, 2)
    return {"seconds": seconds, "code": ended.code, "orphans": ended.orphans}


def measured(name: str) -> dict[str, Any]:
    """The record of this name."""
    kind, _, where = name.partition("_")
    cuda = where == "gpus"
    if kind == "faults":
        jobs: Any = [(fault, *each) for each in itertools.product(FAULTS, ("inside",) if cuda else PLACES, LAUNCHERS)]
    else:
        exchanges = ("ring", "gather", "replicate") if cuda else ("ring", "gather")
        what = itertools.product(MISTAKES, exchanges, CARRIERS, (2,) if cuda else (2, 3))
        jobs = [(mistake, *each) for each in what]

    def run(job: Any) -> Row:
        row: Row = job[0](cuda, *job[1:])
        print(row, flush=True)
        return row

    with ThreadPoolExecutor(1 if name == "faults" else AT_A_TIME[cuda]) as pool:
        rows = list(pool.map(run, jobs))
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": version("torch")}
    facts |= {"mpi4py": version("mpi4py"), "deadline": DEADLINE, "ranks": RANKS}
    if cuda:
        import torch

        said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
        facts |= {"device": torch.cuda.get_device_name(0), "mpirun": said.splitlines()[0].strip()}
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    else:
        facts["mpich"] = version("mpich")
    return {"environment": facts, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=["faults", "faults_gpus", "mistakes", "mistakes_gpus"])
    for name in parser.parse_args().names:
        path = ROOT / "docs" / "results" / f"{name}.json"
        path.write_text(json.dumps(measured(name), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
