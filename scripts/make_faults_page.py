"""Measures what becomes of all ranks when one fails, and writes the table of docs/faults.md.

``python scripts/make_faults_page.py`` writes the page from docs/results/faults.json; with ``--measure`` it runs every
fault under every launcher first, on the CPU of this machine, and writes that file.
"""

import json
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "faults.md"
DATA = ROOT / "docs" / "results" / "faults.json"
BEGIN = "<!-- measured: written by scripts/make_faults_page.py from docs/results/faults.json -->"
END = "<!-- end of measured -->"
DEADLINE, RANKS, FAULTY = 10, 4, 2

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
    sys.path.insert(0, str(ROOT / "tests" / "exchange"))
    from launching import launch

    rows = []
    for fault in FAULTS:
        for where in PLACES:
            for launcher in LAUNCHERS:
                ended = launch(
                    launcher, "faults.py", fault, where, str(FAULTY), ranks=RANKS, CONTRASTILE_DEADLINE=str(DEADLINE)
                )
                failed = next(float(line.split()[1]) for line in ended.said(FAULTY) if line.startswith("fails"))
                said = {rank: ended.said(rank)[-1:] for rank in range(RANKS) if rank != FAULTY}
                raised = [line for lines in said.values() for line in lines if "ExchangeError" in line]
                row = {
                    "fault": fault,
                    "where": where,
                    "launcher": launcher,
                    "seconds": round(ended.finished - failed, 2),
                    "code": ended.code,
                    "orphans": ended.orphans,
                    "raised": len(raised),
                    "named": sum(f"ExchangeError: rank {FAULTY} " in line for line in raised),
                    "message": min((re.sub(r"^\S+ ExchangeError: ", "", line) for line in raised), default=""),
                }
                print(row, flush=True)
                rows.append(row)
    facts = {
        "python": platform.python_version(),
        "torch": version("torch"),
        "mpi4py": version("mpi4py"),
        "mpich": version("mpich"),
        "deadline": DEADLINE,
        "ranks": RANKS,
        "faulty": FAULTY,
    }
    return {"environment": facts, "rows": rows}


def measured(data: dict[str, Any]) -> str:
    """Everything between the markers, the markers included."""
    facts = data["environment"]
    lines = [
        BEGIN,
        "",
        f"{facts['ranks']} ranks on a CPU, deadline {facts['deadline']} s, rank {facts['faulty']} fails; "
        f"torch {facts['torch']} (gloo), mpi4py {facts['mpi4py']}, MPICH {facts['mpich']}, Python {facts['python']}.",
        "",
        f"| rank {facts['faulty']} ... | when | started by | last rank exited | exit code | left | `ExchangeError` |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in data["rows"]:
        told = f"{row['raised']} of {facts['ranks'] - 1}"
        if row["raised"]:
            told += f", {row['named']} name the rank"
        what = FAULTS[row["fault"]], PLACES[row["where"]], LAUNCHERS[row["launcher"]]
        lines.append(f"| {' | '.join(what)} | {row['seconds']:.2f} s | {row['code']} | {row['orphans']} | {told} |")
    return "\n".join([*lines, "", END])


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + measured(json.loads(DATA.read_text(encoding="utf-8"))) + rest.partition(END)[2]


if __name__ == "__main__":
    if "--measure" in sys.argv:
        DATA.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
