"""Measures what becomes of all ranks when one fails, and writes the tables of docs/faults.md.

``python scripts/make_faults_page.py`` writes the page from docs/results; with ``--measure`` it runs every fault under
every launcher first, on the CPU of this machine, and with ``--measure-gpus`` in the middle of a ring between its GPUs,
with copy engines and without, and writes what it found there.
"""

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
PAGE = ROOT / "docs" / "faults.md"
DATA = ROOT / "docs" / "results" / "faults.json"
GPU_DATA = ROOT / "docs" / "results" / "faults_gpus.json"
DEADLINE, RANKS, FAULTY = 10, 4, 2
GPU_FAULTY = RANKS - 1
AT_A_TIME = 5

FAULTS = {
    "killed": "is killed (SIGKILL)",
    "raises": "raises an exception",
    "leaves": "leaves early",
    "stalls": "stalls",
}
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
    """Every fault in the middle of a ring, by NCCL and by copy engines, under every launcher; some at a time."""
    import torch

    program = str(ROOT / "benchmarks" / "nccl_smoke.py")
    what = [(copies, fault, launcher) for copies in (0, 1) for fault in FAULTS for launcher in LAUNCHERS]

    def start(copies: int, fault: str, launcher: str) -> Any:
        ended = _launch(launcher, program, fault, CONTRASTILE_COPY_ENGINES=str(copies))
        print(copies, fault, launcher, ended, flush=True)
        return ended

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        ends = list(pool.map(lambda each: start(*each), what))
    rows = []
    for (_, fault, launcher), ended in zip(what, ends, strict=True):
        raised = [line for rank in range(RANKS) for line in ended.said(rank) if "ExchangeError" in line]
        gave_up = re.findall(r"^contrastile: rank\(s\) (.*) did not answer on the device", ended.output, re.MULTILINE)
        named = sum(str(GPU_FAULTY) in ranks.split(", ") for ranks in gave_up)
        row = {"fault": fault, "where": "inside", "launcher": launcher, **_ending(ended, GPU_FAULTY)}
        row |= {
            "carried by": next(iter(re.findall(r"large messages by (.*)$", ended.output, re.MULTILINE)), "").strip(),
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


def _launch(launcher: str, program: str, *args: str, **environment: str) -> Any:
    sys.path.insert(0, str(ROOT / "tests" / "exchange"))
    from launching import launch

    return launch(launcher, program, *args, ranks=RANKS, CONTRASTILE_DEADLINE=str(DEADLINE), **environment)


def _ending(ended: Any, faulty: int) -> dict[str, Any]:
    failed = next((float(line.split()[1]) for line in ended.said(faulty) if line.startswith("fails")), float("nan"))
    return {"seconds": round(ended.finished - failed, 2), "code": ended.code, "orphans": ended.orphans}


_HEAD = "started by", "last rank exited", "exit code", "left"


def measured(data: dict[str, Any]) -> str:
    """What is said of the faults on a CPU."""
    facts = data["environment"]
    about = (
        f"{facts['ranks']} ranks on a CPU, deadline {facts['deadline']} s, rank {facts['faulty']} fails; "
        f"torch {facts['torch']} (gloo), mpi4py {facts['mpi4py']}, MPICH {facts['mpich']}, Python {facts['python']}."
    )
    head = (
        f"rank {facts['faulty']} ...",
        "when",
        "started by",
        "last rank exited",
        "exit code",
        "left",
        "`ExchangeError`",
    )
    lines = []
    for row in data["rows"]:
        told = f"{row['raised']} of {facts['ranks'] - 1}"
        if row["raised"]:
            told += f", {row['named']} name the rank"
        lines.append([FAULTS[row["fault"]], PLACES[row["where"]], LAUNCHERS[row["launcher"]], *_ended(row), told])
    return f"{about}\n\n{_table(head, lines)}"


def measured_gpus(data: dict[str, Any]) -> str:
    """What is said of the faults on GPUs."""
    facts = data["environment"]
    about = (
        f"{facts['ranks']} ranks on {facts['device']}, deadline {facts['deadline']} s, rank {facts['faulty']} fails "
        f"in the middle of a ring of messages of 4 MiB; NCCL {facts['nccl']}, torch {facts['torch']}, "
        f"mpi4py {facts['mpi4py']}, {facts['mpirun']}; {facts['at a time']} launches at a time."
    )
    head = f"rank {facts['faulty']} ...", "messages by", *_HEAD, "ended themselves"
    lines = []
    for row in data["rows"]:
        by_themselves = row["raised"] + row["ended"]
        told = f"{by_themselves} of {facts['ranks'] - 1}"
        if by_themselves:
            told += f", {row['named']} name the rank"
        lines.append([FAULTS[row["fault"]], row["carried by"], LAUNCHERS[row["launcher"]], *_ended(row), told])
    return f"{about}\n\n{_table(head, lines)}"


def _ended(row: dict[str, Any]) -> list[str]:
    return [f"{row['seconds']:.2f} s", str(row["code"]), str(row["orphans"])]


def _table(head: tuple[str, ...], lines: list[list[str]]) -> str:
    """With all but the names on the right."""
    names = head.index("last rank exited")
    marks = ["---"] * names + ["---:"] * (len(head) - names - 1) + ["---"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *lines))


SECTIONS = {DATA: measured, GPU_DATA: measured_gpus}


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    for path, section in SECTIONS.items():
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
    for option, path, found in (("--measure", DATA, measure), ("--measure-gpus", GPU_DATA, measure_gpus)):
        if option in sys.argv:
            path.write_text(json.dumps(found(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
