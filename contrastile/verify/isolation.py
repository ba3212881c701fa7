"""A run whose checks happen in another process, which a backend may leave, crash, hang or print in without harm.

The other process is one for the whole run. Where it ends, or is late, its check has failed and another goes on with the
next; a backend that has cost several is not tested any further.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from contrastile.reporting import CannotRunError
from contrastile.verify.run import Worst
from contrastile.verify.runner import Failure, Row
from contrastile.verify.worker import Task, whole

DEADLINE = {"cpu": 120.0, "cuda": 600.0}
"""Seconds that one check may take, by device: on a GPU it may have to compile kernels first."""

LOST = 3
"""Processes that a backend may cost."""

_START = 120.0

# the parent's own modules and no others, whatever the current folder holds
_PROGRAM = "import sys; sys.path[:] = {path!r}; from contrastile.verify.worker import main; main()"


@dataclass(slots=True)
class Isolated:
    """A run in progress: iterate over ``rows`` once; ``failures`` fills as it goes.

    Attributes:
        task: what to run.
        deadline: seconds that one check may take.
        progress: see ``runner.Run``.
        failures: what failed so far.
        done: checks done so far.
        total: checks in all, once known.
        interrupted: whether somebody stopped it.
    """

    task: Task
    deadline: float
    progress: Callable[[int, int, str], None] = lambda done, total, what: None
    failures: list[Failure] = field(default_factory=list)
    done: int = 0
    total: int = 0
    interrupted: bool = False
    _lost: Counter[str] = field(default_factory=Counter)

    def rows(self) -> Iterator[Row]:
        """One row for each check, as each is done.

        Raises:
            CannotRunError: what is to be run cannot be had, or cannot be loaded.
        """
        while True:
            worker = _Worker(asdict(self.task), self.done, self._barred())
            try:
                if (yield from self._until_lost(worker)):
                    return
            finally:
                worker.end()

    def _barred(self) -> dict[str, str]:
        return {name: f"it ended {n} processes before" for name, n in self._lost.items() if n >= LOST}

    def _until_lost(self, worker: _Worker) -> Generator[Row, None, bool]:
        """The rows of one process; whether they are the last."""
        loading: object = "the backends"
        begun: dict[str, Any] | None = None
        checking = False
        while True:
            try:
                said = worker.hear(self.deadline if checking else max(self.deadline, _START))
            except _LostError as lost:
                if begun is None:
                    raise CannotRunError(f"the process that loads {loading} {lost}") from None
                yield self._failed(begun["begin"], f"the process {lost}", begun["command"])
                self._lost[begun["begin"]["backend"]] += 1
                if checking:
                    self._step(begun["begin"])
                return False
            if "cannot" in said:
                raise CannotRunError(said["cannot"])
            if "loading" in said:
                loading = said["loading"]
            elif "printed" in said:
                row = whole(said["backend"], "fail", "", self.task.ranks or 1)
                command = f"contrastile verify --backend {said['backend']}"
                yield self._failed(row, f"printed to stdout when it was imported: {said['printed']!r}", command)
            elif "begin" in said:
                begun, checking, self.total = said, True, said["total"]
            elif "row" in said:
                row, failure = said["row"], said.get("failure")
                if failure is not None:
                    where = {**failure["worst"], "index": tuple(failure["worst"]["index"])}
                    self.failures.append(Failure(row, Worst(**where), failure["label"], failure["command"]))
                yield row
                if "number" in said:
                    checking, self.total = False, said["total"]
                    self._step(row)
            else:
                return True

    def _step(self, row: Row) -> None:
        self.done += 1
        self.progress(self.done, self.total, f"{row['backend']} {row['dtype']} {row['case']} {row['property']}")

    def _failed(self, row: Row, reason: str, command: str) -> Row:
        failed = Row(**{**row, "status": "fail", "ratio": math.inf, "reason": reason})
        self.failures.append(Failure(failed, Worst(math.inf, reason, (), math.inf, 0.0), "", command))
        return failed


class _LostError(Exception):
    """The process is gone, or late; the message is the rest of a sentence."""


class _Worker:
    """The other process."""

    def __init__(self, task: dict[str, Any], start: int, lost: dict[str, str]) -> None:
        # a new session: Ctrl-C is the parent's to hear
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )
        self._heard: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"task": task, "start": start, "lost": lost}) + "\n")
            self._process.stdin.flush()

    def _listen(self, stream: IO[str]) -> None:
        with contextlib.suppress(ValueError):
            for line in stream:
                self._heard.put(line)
        self._heard.put(None)

    def hear(self, seconds: float) -> dict[str, Any]:
        """What it says next.

        Raises:
            _LostError: it ended, or said nothing for so long.
        """
        try:
            line = self._heard.get(timeout=seconds)
        except queue.Empty:
            raise _LostError(f"took longer than {seconds:g} s (--deadline)") from None
        if line is None:
            raise _LostError(_ending(self._process.wait()))
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """End it, and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"died of {signal.Signals(-code).name}"
    except ValueError:
        return f"died of signal {-code}"
