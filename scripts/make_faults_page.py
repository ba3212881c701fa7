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
}
CARRIERS = {"mpi": "MPI", "torch": "torchrun, one host", "torch apart": "torchrun, as on several hosts"}
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
        for exchange in ("ring", "gather")
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
            "raised": sum("ExchangeError" in line for line in last),
            "heard": _heard(ended, last),
            "gave up": ended.output.count("did not answer on the device"),
            "message": min(
                (line.partition("ExchangeError: ")[2] for line in last if "ExchangeError" in line), default=""
            ),
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
    """Seconds from the mistake to the last ExchangeError; None for none, or where the launch ended before it."""
    made = next((float(line.split()[1]) for line in ended.said(MISTAKEN) if line.startswith("fails")), None)
    if made is None:
        print(ended.output, flush=True)
        return None
    return max((round(float(x.split()[0]) - made, 2) for x in lines if "ExchangeError" in x), default=None)


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


def measured(data: dict[str, Any]) -> str:
    """What is said of the faults on a CPU: both places in one row."""
    facts = data["environment"]
    about = (
        f"{facts['ranks']} ranks on a CPU, deadline {facts['deadline']} s, rank {facts['faulty']} fails "
        f"{' and '.join(PLACES.values())}; torch {facts['torch']} (gloo), mpi4py {facts['mpi4py']}, "
        f"MPICH {facts['mpich']}, Python {facts['python']}."
    )
    head = f"rank {facts['faulty']} ...", "started by", *_HEAD, "`ExchangeError`"
    lines = []
    for rows in _groups(data["rows"], "fault", "launcher"):
        told = _told(_sum(rows, "raised"), _sum(rows, "named"), len(rows) * (facts["ranks"] - 1))
        lines.append([FAULTS[rows[0]["fault"]], LAUNCHERS[rows[0]["launcher"]], *_ended(rows), told])
    return f"{about}\n\n{_table(head, lines)}"


def measured_gpus(data: dict[str, Any]) -> str:
    """What is said of the faults on GPUs."""
    facts = data["environment"]
    about = (
        f"{facts['ranks']} ranks on {facts['device']}, deadline {facts['deadline']} s, rank {facts['faulty']} fails "
        f"in the middle of a ring of messages of 4 MiB; NCCL {facts['nccl']}, torch {facts['torch']}, "
        f"mpi4py {facts['mpi4py']}, {facts['mpirun']}; {facts['at a time']} launches at a time."
    )
    head = f"rank {facts['faulty']} ...", "started by", *_HEAD, "ended themselves"
    lines = []
    for rows in _groups(data["rows"], "fault", "launcher"):
        told = _told(_sum(rows, "raised") + _sum(rows, "ended"), _sum(rows, "named"), len(rows) * (facts["ranks"] - 1))
        lines.append([FAULTS[rows[0]["fault"]], LAUNCHERS[rows[0]["launcher"]], *_ended(rows), told])
    return f"{about}\n\n{_table(head, lines)}"


def mistakes(data: dict[str, Any]) -> str:
    """What is said of mistakes, on a CPU or on GPUs: both exchanges and all numbers of ranks in one row."""
    facts = data["environment"]
    sizes = " and ".join(str(n) for n in sorted({row["ranks"] for row in data["rows"]}))
    where = f"{facts['device']}, NCCL {facts['nccl']}" if "device" in facts else "a CPU"
    about = (
        f"{sizes} ranks on {where}, ring and gather, deadline {facts['deadline']} s, rank {facts['mistaken']} makes "
        f"the mistake; torch {facts['torch']}, mpi4py {facts['mpi4py']}; {facts['at a time']} launches at a time."
    )
    head = f"rank {facts['mistaken']} ...", "messages by", "last error", *_HEAD, "right numbers", "outcome"
    lines = []
    for rows in _groups(data["rows"], "mistake", "by"):
        ranks = _sum(rows, "ranks")
        said = [f"{kind} {_sum(rows, name)} of {ranks}" for name, kind in OUTCOMES.items() if _sum(rows, name)]
        late = [row["heard"] for row in rows if row["heard"] is not None]
        heard = f"{max(late):.2f} s" if late else ""
        names = MISTAKES[rows[0]["mistake"]], CARRIERS[rows[0]["by"]]
        outcome = ", ".join(said) or "ended by the launcher"
        lines.append([*names, heard, *_ended(rows), str(_sum(rows, "right")), outcome])
    return f"{about}\n\n{_table(head, lines)}"


_HEAD = "last rank exited", "exit code", "left"
OUTCOMES = {
    "raised": "`ExchangeError` on",
    "gave up": "the process ended itself on",
    "all right": "right to the end on",
}


def _groups(rows: list[dict[str, Any]], *names: str) -> list[list[dict[str, Any]]]:
    """Rows that have these in common, in the order of the first of each."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return list(found.values())


def _sum(rows: list[dict[str, Any]], name: str) -> int:
    return sum(row[name] for row in rows)


def _told(number: int, named: int, ranks: int) -> str:
    return f"{number} of {ranks}" + (f", {named} name the rank" if number else "")


def _ended(rows: list[dict[str, Any]]) -> list[str]:
    """The longest time, the exit codes, and the processes that were left."""
    codes = ", ".join(map(str, sorted({row["code"] for row in rows})))
    return [f"{max(row['seconds'] for row in rows):.2f} s", codes, str(_sum(rows, "orphans"))]


def _table(head: tuple[str, ...], lines: list[list[str]]) -> str:
    """With all but the names on the right."""
    names = next(i for i, name in enumerate(head) if name.startswith("last "))
    marks = ["---"] * names + ["---:"] * (len(head) - names - 1) + ["---"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))


SECTIONS = {DATA: measured, GPU_DATA: measured_gpus, MISTAKES_DATA: mistakes, MISTAKES_GPU_DATA: mistakes}


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    for path, section in SECTIONS.items():
        if not path.exists():
            continue
        name = path.relative_to(ROOT).as_posix()
        begin, end = (
            f"<!-- measured: written by scripts/make_faults_page.py from {name} -->",
            "<!-- end of measured -->",
        )
        before, _, rest = text.partition(begin)
        body = section(json.loads(path.read_text(encoding="utf-8")))
        text = f"{before}{begin}\n\n{body}\n\n{end}{rest.partition(end)[2]}"
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
