"""A run whose checks happen in a child process, so that a backend that exits, crashes, hangs or prints harms no other.

One child runs all checks. If it ends or exceeds the deadline, its check has failed, and a new child continues with the
next check; a backend that has ended several children is not tested any further.
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
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Any

from contrastile.reporting import CannotRunError, ProgressCallback
from contrastile.verify.run import Worst, wrong
from contrastile.verify.runner import Failure, Row
from contrastile.verify.worker import Task, whole

DEADLINE = {"cpu": 120.0, "cuda": 600.0}
"""Seconds that one check may take, by device: on a GPU it may compile kernels first."""

MAX_LOST = 3
"""Children that a backend may end before it is excluded."""

_START = 120.0

# the child imports from the parent's path, whatever its current folder is
_PROGRAM = "import sys; sys.path[:] = {path!r}; from contrastile.verify.worker import main; main()"


@dataclass(slots=True)
class Isolated:
    """A run in progress: iterate over ``rows`` once; ``failures`` fills as it goes.

    Attributes:
        task: what to run.
        deadline: seconds that one check may take.
        progress: see ``runner.Run``.
        failures: the failures so far.
        done: checks done so far.
        total: checks in all, once known.
        interrupted: whether it was stopped early.
    """

    task: Task
    deadline: float
    progress: ProgressCallback = lambda done, total, what: None
    failures: list[Failure] = field(default_factory=list)
    done: int = 0
    total: int = 0
    interrupted: bool = False
    _lost: Counter[str] = field(default_factory=Counter)

    def rows(self) -> Iterator[Row]:
        """One row for each check, as each is done.

        Raises:
            CannotRunError: a backend or the device is not available.
        """
        while True:
            worker = _Worker(asdict(self.task), self.done, self._excluded())
            try:
                if (yield from self._until_lost(worker)):
                    return
            finally:
                worker.end()

    def _excluded(self) -> dict[str, str]:
        return {name: f"it ended {n} processes before" for name, n in self._lost.items() if n >= MAX_LOST}

    def _until_lost(self, worker: _Worker) -> Generator[Row, None, bool]:
        """The rows of one child; returns whether they are the last."""
        loading: object = "the backends"
        begun: dict[str, Any] | None = None
        checking = False
        while True:
            try:
                message = worker.receive(self.deadline if checking else max(self.deadline, _START))
            except _LostError as lost:
                if begun is None:
                    raise CannotRunError(f"the process that loads {loading} {lost}") from None
                yield self._failed(begun["begin"], f"the process {lost}", begun["command"])
                self._lost[begun["begin"]["backend"]] += 1
                if checking:
                    self._step(begun["begin"])
                return False
            if "cannot" in message:
                raise CannotRunError(message["cannot"])
            if "loading" in message:
                loading = message["loading"]
            elif "printed" in message:
                row = whole(message["backend"], "fail", "", self.task.ranks or 1)
                command = f"contrastile verify --backend {message['backend']}"
                yield self._failed(row, f"printed to stdout when it was imported: {message['printed']!r}", command)
            elif "begin" in message:
                begun, checking, self.total = message, True, message["total"]
            elif "row" in message:
                row, failure = message["row"], message.get("failure")
                if failure is not None:
                    where = {**failure["worst"], "index": tuple(failure["worst"]["index"])}
                    self.failures.append(Failure(row, Worst(**where), failure["label"], failure["command"]))
                yield row
                if "number" in message:
                    checking, self.total = False, message["total"]
                    self._step(row)
            else:
                return True

    def _step(self, row: Row) -> None:
        self.done += 1
        self.progress(self.done, self.total, f"{row['backend']} {row['dtype']} {row['case']} {row['property']}")

    def _failed(self, row: Row, reason: str, command: str) -> Row:
        failed = Row(**{**row, "status": "fail", "ratio": math.inf, "reason": reason})
        self.failures.append(Failure(failed, wrong(reason), "", command))
        return failed


class _LostError(Exception):
    """The child ended, or exceeded the deadline; the message completes "the process ..."."""


class _Worker:
    """A child process, and the thread that reads its messages."""

    def __init__(self, task: dict[str, Any], start: int, lost: dict[str, str]) -> None:
        # a new session: Ctrl-C reaches the parent alone
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"task": task, "start": start, "lost": lost}) + "\n")
            self._process.stdin.flush()

    def _listen(self, stream: IO[str]) -> None:
        with contextlib.suppress(ValueError):
            for line in stream:
                self._lines.put(line)
        self._lines.put(None)

    def receive(self, seconds: float) -> dict[str, Any]:
        """Its next message.

        Raises:
            _LostError: it ended, or sent nothing within this time.
        """
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise _LostError(f"took longer than {seconds:g} s (--deadline)") from None
        if line is None:
            raise _LostError(_ending(self._process.wait()))
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self) -> None:
        """Kill it and every process that it started."""
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
