"""Starting several ranks from a test with a time limit: their output, exit code and orphans."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
ENGINES = ("mpi", "torch")
PATIENCE = 600
"""Seconds after which a test ends ranks that hang; far longer than deadlines under test, as a busy machine is slow."""
# Open MPI refuses to run as root, which a container does, unless both are set
_ONE_THREAD_AS_ROOT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class LaunchResult:
    """The end of a launch.

    Attributes:
        code: the launcher's exit code.
        output: the output of all ranks.
        orphans: the number of processes that outlived the launcher and were killed.
    """

    code: int
    output: str
    orphans: int

    def lines(self, rank: int) -> list[str]:
        """The lines of one rank."""
        return re.findall(rf"^\[{rank}\] (.*)$", self.output, re.MULTILINE)


def command(engine: str, ranks: int) -> list[str]:
    """The command that starts a program on several ranks."""
    if engine.endswith("mpi"):
        module = [] if engine == "plain mpi" else ["-m", "mpi4py"]
        mpirun = Path(sys.executable).with_name("mpirun")
        return [str(mpirun) if mpirun.exists() else "mpirun", "-n", str(ranks), sys.executable, *module]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def run(engine: str, ranks: int, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program on several ranks, and capture its output."""
    full_command = ["timeout", "--kill-after=1", str(PATIENCE), *command(engine, ranks), *words]
    variables = {**os.environ, **_ONE_THREAD_AS_ROOT, **environment}
    return subprocess.run(full_command, capture_output=True, text=True, check=False, env=variables)


def launch(
    engine: str, program: str, *args: str, ranks: int = 4, seconds: float = PATIENCE, **environment: str
) -> LaunchResult:
    """Run a program of ``programs`` on several ranks, and kill it after this number of seconds."""
    name, value = "CONTRASTILE_LAUNCH", uuid.uuid4().hex
    variables = {**os.environ, **_ONE_THREAD_AS_ROOT, "PYTHONUNBUFFERED": "1", name: value, **environment}
    words = [*command(engine, ranks), str(PROGRAMS / program), engine.split()[-1], *args]
    with tempfile.TemporaryFile() as output:
        words = ["timeout", "--kill-after=1", str(seconds), *words]
        completed = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, env=variables, check=False)
        # a process that is about to exit is no orphan
        end = time.monotonic() + 1
        while (orphans := list(processes_with(f"{name}={value}"))) and time.monotonic() < end:
            time.sleep(0.02)
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return LaunchResult(completed.returncode, text, len(orphans))


def processes_with(variable: str) -> Iterator[int]:
    """The running processes with this variable in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)
