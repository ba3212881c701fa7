"""Starting several ranks from a test, with an end: what they printed, how they ended, and whether any is left."""

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
"""Seconds after which a test ends what hangs: a busy machine may be slow, and a deadline under test is another one."""


@dataclass(frozen=True)
class Ended:
    """How a launch ended.

    Attributes:
        code: the launcher's exit code.
        output: of all ranks.
        orphans: processes that were left when the launcher had exited; they were ended.
    """

    code: int
    output: str
    orphans: int

    def said(self, rank: int) -> list[str]:
        """A rank's own lines."""
        return re.findall(rf"^\[{rank}\] (.*)$", self.output, re.MULTILINE)


def command(engine: str, ranks: int) -> list[str]:
    """What starts a program on several ranks."""
    if engine.endswith("mpi"):
        through = [] if engine == "plain mpi" else ["-m", "mpi4py"]
        beside = Path(sys.executable).with_name("mpirun")
        return [str(beside) if beside.exists() else "mpirun", "-n", str(ranks), sys.executable, *through]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def run(engine: str, ranks: int, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a program prints on several ranks, which are to end by themselves."""
    called = ["timeout", "--kill-after=1", str(PATIENCE), *command(engine, ranks), *words]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(called, capture_output=True, text=True, check=False, env=variables)


def launch(
    engine: str, program: str, *args: str, ranks: int = 4, seconds: float = PATIENCE, **environment: str
) -> Ended:
    """Run a program of ``programs`` on several ranks; it is ended after so many seconds."""
    name, value = "CONTRASTILE_LAUNCH", uuid.uuid4().hex
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", name: value, **environment}
    words = [*command(engine, ranks), str(PROGRAMS / program), engine.split()[-1], *args]
    with tempfile.TemporaryFile() as output:
        words = ["timeout", "--kill-after=1", str(seconds), *words]
        ended = subprocess.run(words, stdout=output, stderr=subprocess.STDOUT, env=variables, check=False)
        # a process that is just exiting is no orphan
        end = time.monotonic() + 1
        while (orphans := list(marked(f"{name}={value}"))) and time.monotonic() < end:
            time.sleep(0.02)
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Ended(ended.returncode, text, len(orphans))


def marked(mark: str) -> Iterator[int]:
    """The processes that have this in their environment and have not ended."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                yield int(place.name)
