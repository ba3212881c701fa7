"""Measures what becomes of all ranks when one fails, and writes the tables of docs/how-to/faults.md.

``python scripts/make_faults_page.py`` writes the page from docs/results; with ``--measure`` it runs every fault under
every launcher first, on the CPU of this machine, and with ``--measure-gpus`` in the middle of a ring between its GPUs,
and writes what it found there. With ``--measure-mistakes`` one rank makes another call than the others, on the CPU, and
with ``--measure-mistakes-gpus`` on this machine's GPUs, over NCCL; a wrong number without an error ends the script.
"""

import json
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from page_writing import spliced, table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "how-to" / "faults.md"
DATA = ROOT / "docs" / "results" / "faults.json"
GPU_DATA = ROOT / "docs" / "results" / "faults_gpus.json"
MISTAKES_DATA = ROOT / "docs" / "results" / "mistakes.json"
MISTAKES_GPU_DATA = ROOT / "docs" / "results" / "mistakes_gpus.json"
DEADLINE, RANKS, FAULTY = 10, 4, 2
GPU_FAULTY = RANKS - 1
MISTAKEN = 1
AT_A_TIME, FEW_AT_A_TIME = 5, 4

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
CARRIERS = "mpi", "torch", "torch apart"  # the last as on several hosts
PLACES = {"before": "between two calls", "inside": "in the middle of a ring"}
LAUNCHERS = {
    "mpi": "`mpirun python -m mpi4py`",
    "plain mpi": "`mpirun python`",
    "torch": "`torchrun`",
}


def measure() -> dict[str, Any]:
    """Every fault, at every place, under every launcher."""
    rows = []
    for fault in FAULTS:
        for where in PLACES:
            for launcher in LAUNCHERS:
                ended = _launch(launcher, "faults.py", fault, where, str(FAULTY))
                said = {rank: ended.said(rank)[-1:] for rank in range(RANKS) if rank != FAULTY}
                raised = [line for lines in said.values() for line in lines if "ExchangeError" in line]
                row = {"fault": fault, "where": where, "launcher": launcher, **_ending(ended, FAULTY)}
                row |= {
                    "raised": len(raised),
                    "named": sum(f"ExchangeError: rank {FAULTY} " in line for line in raised),
                    "message": min((re.sub(r"^\S+ ExchangeError: ", "", line) for line in raised), default=""),
                }
                print(row, flush=True)
                rows.append(row)
    facts = {"python": platform.python_version(), "torch": version("torch"), "mpi4py": version("mpi4py")}
    facts |= {"mpich": version("mpich"), "deadline": DEADLINE, "ranks": RANKS, "faulty": FAULTY}
    return {"environment": facts, "rows": rows}


def measure_gpus() -> dict[str, Any]:
    """Every fault in the middle of a ring over NCCL, under every launcher; some at a time."""
    import torch

    program = str(ROOT / "tests" / "gpu" / "programs" / "exchange.py")
    what = [(fault, launcher) for fault in FAULTS for launcher in LAUNCHERS]

    def start(fault: str, launcher: str) -> Any:
        ended = _launch(launcher, program, fault)
        print(fault, launcher, ended, flush=True)
        return ended

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        ends = list(pool.map(lambda each: start(*each), what))
    rows = []
    for (fault, launcher), ended in zip(what, ends, strict=True):
        raised = [line for rank in range(RANKS) for line in ended.said(rank) if "ExchangeError" in line]
        gave_up = re.findall(r"^contrastile: rank\(s\) (.*) did not answer on the device", ended.output, re.MULTILINE)
        named = sum(str(GPU_FAULTY) in ranks.split(", ") for ranks in gave_up)
        row = {"fault": fault, "where": "inside", "launcher": launcher, **_ending(ended, GPU_FAULTY)}
        row |= {
            "carried by": next(iter(re.findall(r"messages by (.*)$", ended.output, re.MULTILINE)), "").strip(),
            "raised": len(raised),
            "ended": len(gave_up),
            "named": named + sum(f"ExchangeError: rank {GPU_FAULTY} " in line for line in raised),
        }
        rows.append(row)
    mpirun = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    facts = {"device": torch.cuda.get_device_name(0), "torch": version("torch"), "mpi4py": version("mpi4py")}
    facts |= {"nccl": ".".join(map(str, torch.cuda.nccl.version())), "mpirun": mpirun.strip()}
    facts |= {"deadline": DEADLINE, "ranks": RANKS, "faulty": GPU_FAULTY, "at a time": AT_A_TIME}
    return {"environment": facts, "rows": rows}


def measure_mistakes(*, cuda: bool = False) -> dict[str, Any]:
    """Every mistake, over both exchanges, under every launcher; with ``cuda`` on two GPUs, else two ranks and three."""
    what = [
        (mistake, exchange, by, ranks)
        for mistake in MISTAKES
        for exchange in ("ring", "gather", *(("replicate",) if cuda else ()))
        for by in CARRIERS
        if not (cuda and "apart" in by)
        for ranks in ((2,) if cuda else (2, 3))
    ]

    def start(mistake: str, exchange: str, by: str, ranks: int) -> dict[str, Any]:
        launcher, *more = by.split()
        args = [mistake, exchange, str(MISTAKEN), *more, *(["cuda"] if cuda else [])]
        # a launch may take long to begin; what is measured begins with the mistake
        ended = _launch(launcher, "mistakes.py", *args, ranks=ranks, seconds=600)
        last = [next(iter(ended.said(rank)[-1:]), "") for rank in range(ranks)]
        if "WrongError" in ended.output:
            raise SystemExit(f"{mistake}, {exchange}, {by}, {ranks} ranks: a wrong number\n{ended.output}")
        right = [int(found[1]) if (found := re.match(r"\S+ (\d+) right", line)) else 0 for line in last]
        row = {"mistake": mistake, "exchange": exchange, "by": by, "ranks": ranks, **_ending(ended, MISTAKEN)}
        row |= {
            "right": sum(right),
            "all right": sum(line.endswith(" right") for line in last),
            "raised": sum(map(bool, map(RAISED.search, last))),
            "heard": _heard(ended, last),
            "gave up": ended.output.count("did not answer on the device"),
            "message": min((RAISED.split(line)[1] for line in last if RAISED.search(line)), default=""),
        }
        print(row, flush=True)
        return row

    some = AT_A_TIME if cuda else FEW_AT_A_TIME
    with ThreadPoolExecutor(some) as pool:
        rows = list(pool.map(lambda each: start(*each), what))
    facts = {"python": platform.python_version(), "torch": version("torch"), "mpi4py": version("mpi4py")}
    facts |= {"deadline": DEADLINE, "mistaken": MISTAKEN, "at a time": some}
    if cuda:
        import torch

        facts |= {"device": torch.cuda.get_device_name(0), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return {"environment": facts, "rows": rows}


def _heard(ended: Any, lines: list[str]) -> float | None:
    """Seconds from the mistake to the last rank's error; None for none, or where the launch ended before it."""
    made = next((float(line.split()[1]) for line in ended.said(MISTAKEN) if line.startswith("fails")), None)
    if made is None:
        print(ended.output, flush=True)
        return None
    return max((round(float(x.split()[0]) - made, 2) for x in lines if RAISED.search(x)), default=None)


def _launch(
    launcher: str, program: str, *args: str, ranks: int = RANKS, seconds: float = 60, **environment: str
) -> Any:
    sys.path.insert(0, str(ROOT / "tests" / "comm"))
    from launching import launch

    deadline = str(DEADLINE)
    return launch(launcher, program, *args, ranks=ranks, seconds=seconds, CONTRASTILE_DEADLINE=deadline, **environment)


def _ending(ended: Any, faulty: int) -> dict[str, Any]:
    failed = next((float(line.split()[1]) for line in ended.said(faulty) if line.startswith("fails")), float("nan"))
    return {"seconds": round(ended.finished - failed, 2), "code": ended.code, "orphans": ended.orphans}


def faults(cpu: dict[str, Any], gpus: dict[str, Any]) -> str:
    """What is said of the faults: for each, the longest time until the last rank has exited, by launcher."""
    about = []
    for facts in (cpu["environment"], gpus["environment"]):
        nccl = f"NCCL {facts['nccl']}, " if "nccl" in facts else "gloo, "
        mpi = facts["mpirun"] if "mpirun" in facts else f"MPICH {facts['mpich']}"
        versions = f"{nccl}torch {facts['torch']}, mpi4py {facts['mpi4py']}, {mpi}"
        about.append(f"{facts['ranks']} ranks on {facts.get('device', 'a CPU')} ({versions})")
    deadline = cpu["environment"]["deadline"]
    text = f"{' and '.join(about)}. The deadline is {deadline} s. Seconds until the last rank has exited:"
    head = ["one rank ...", "started by", "CPU", "GPUs"]
    lines = [
        [name, launcher, *(_longest(data["rows"], fault=fault, launcher=by) for data in (cpu, gpus))]
        for fault, name in FAULTS.items()
        for by, launcher in LAUNCHERS.items()
    ]
    return f"{text}\n\n{_table(head, lines)}"


def mistakes(cpu: dict[str, Any], gpus: dict[str, Any]) -> str:
    """What is said of mistakes: what became of the ranks, and when the last of them raised."""
    facts = cpu["environment"], gpus["environment"]
    text = (
        "Five steps, ring and gather, on GPUs replicate too, 2 and 3 ranks on a CPU "
        f"(torch {facts[0]['torch']}) and 2 on {facts[1]['device']} (NCCL {facts[1]['nccl']}). "
        f"The deadline is {facts[0]['deadline']} s:"
    )
    head = ["one rank ...", *(f"{what}, {where}" for where in ("CPU", "GPUs") for what in ("ranks", "last error"))]
    lines = []
    for mistake, name in MISTAKES.items():
        cells = []
        for data in (cpu, gpus):
            rows = [row for row in data["rows"] if row["mistake"] == mistake]
            told = [f"{_sum(rows, key)} {kind}" for key, kind in OUTCOMES.items() if _sum(rows, key)]
            ended = _sum(rows, "ranks") - sum(_sum(rows, key) for key in OUTCOMES)
            late = [row["heard"] for row in rows if row["heard"] is not None]
            cells += [", ".join([*told, *([f"{ended} ended by the launcher"] if ended else [])])]
            cells += [f"{max(late):.1f} s" if late else "-"]
        lines.append([name, *cells])
    return f"{text}\n\n{_table(head, lines)}"


OUTCOMES = {"raised": "raised", "gave up": "ended themselves", "all right": "right to the end"}


def _sum(rows: list[dict[str, Any]], name: str) -> int:
    return sum(row[name] for row in rows)


def _longest(rows: list[dict[str, Any]], **wanted: str) -> str:
    return f"{max(row['seconds'] for row in rows if wanted.items() <= row.items()):.1f}"


def _table(head: list[str], lines: list[list[str]]) -> str:
    return table(head, lines, left=[i for i, name in enumerate(head) if not name.endswith(("CPU", "GPUs"))])


SECTIONS = {"faults": (faults, DATA, GPU_DATA), "mistakes": (mistakes, MISTAKES_DATA, MISTAKES_GPU_DATA)}


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    for name, (section, *paths) in SECTIONS.items():
        begin = f"<!-- measured: {name}, written by scripts/make_faults_page.py -->"
        text = spliced(text, begin, section(*(json.loads(path.read_text(encoding="utf-8")) for path in paths)))
    return text


if __name__ == "__main__":
    for option, path, found in (
        ("--measure", DATA, measure),
        ("--measure-gpus", GPU_DATA, measure_gpus),
        ("--measure-mistakes", MISTAKES_DATA, measure_mistakes),
        ("--measure-mistakes-gpus", MISTAKES_GPU_DATA, partial(measure_mistakes, cuda=True)),
    ):
        if option in sys.argv:
            path.write_text(json.dumps(found(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
