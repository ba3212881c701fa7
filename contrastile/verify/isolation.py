"""A run whose checks happen in child processes, so that a backend that exits, crashes, hangs or prints harms no other.

One child runs all checks, or each of several runs a share of the cases. If a child ends or exceeds the deadline, its
check has failed, and a new one continues with the next check of the share; a backend that has ended several
children of a share is not tested any further there.
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

from contrastile.reporting import CannotRunError, ProgressCallback, ending
from contrastile.verify.comparison import Worst, wrong
from contrastile.verify.runner import Failure, Row
from contrastile.verify.worker import Task, whole

DEADLINE = {"cpu": 120.0, "cuda": 600.0}
"""Seconds that one check may take, by device: on a GPU it may compile kernels first."""

MAX_LOST = 3
"""Children that a backend may end before it is excluded."""

_START = 120.0

# the child imports from the parent's path, whatever its current folder is
_PROGRAM = "import sys; sys.path[:] = {path!r}; from contrastile.verify.worker import main; main()"


Found = tuple[int, Row, Failure | None]
"""A row, its number (-1 where it is about a whole backend), and its failure."""


@dataclass(slots=True)
class Isolated:
    """A run in progress: iterate over ``rows`` once; ``failures`` fills as it goes.

    Attributes:
        task: what to run.
        deadline: seconds that one check may take; None for ``DEADLINE`` of its device.
        progress: see ``runner.Run``.
        jobs: child processes at a time; each runs a share of the cases.
        failures: the failures so far.
        done: checks done so far.
        total: checks in all, once known.
        interrupted: whether it was stopped early.
    """

    task: Task
    deadline: float | None
    progress: ProgressCallback = lambda done, total, what: None
    jobs: int = 1
    failures: list[Failure] = field(default_factory=list)
    done: int = 0
    total: int = 0
    interrupted: bool = False

    def rows(self) -> Iterator[Row]:
        """One row for each check, in their order, each as soon as those before it are done.

        After an interruption the rest of what was found comes next.

        Raises:
            CannotRunError: a backend or the device is not available.
        """
        waiting: dict[int, Found] = {}
        following = 0
        lanes = [_Lane(self.task, self.deadline, (k, self.jobs)) for k in range(self.jobs)]
        try:
            for found in _merged(lanes):
                number, row, _ = found
                if number < 0:
                    yield self._report(found)
                    continue
                waiting[number] = found
                self.done += 1
                self.total = max(lane.total for lane in lanes)
                self.progress(self.done, self.total, f"{row['backend']} {row['dtype']} {row['case']} {row['property']}")
                while following in waiting:
                    yield self._report(waiting.pop(following))
                    following += 1
        except KeyboardInterrupt:
            self.interrupted = True
            for number in sorted(waiting):
                yield self._report(waiting[number])
        finally:
            for lane in lanes:
                lane.end()

    def _report(self, found: Found) -> Row:
        _, row, failure = found
        if failure is not None:
            self.failures.append(failure)
        return row


def _merged(lanes: list[_Lane]) -> Iterator[Found]:
    """What the lanes find, as it comes: each is listened to in a thread."""
    found: queue.SimpleQueue[Found | BaseException | None] = queue.SimpleQueue()

    def listen(lane: _Lane) -> None:
        try:
            for each in lane.rows():
                found.put(each)
            found.put(None)
        except BaseException as error:
            found.put(error)

    for lane in lanes:
        threading.Thread(target=listen, args=(lane,), daemon=True).start()
    left = len(lanes)
    while left:
        each = found.get()
        if isinstance(each, BaseException):
            raise each
        if each is None:
            left -= 1
        else:
            yield each


@dataclass(slots=True)
class _Lane:
    """A share of the checks, run by one child after another."""

    task: Task
    deadline: float | None
    share: tuple[int, int]
    total: int = 0
    _next: int = 0
    _started: bool = False
    _ended: bool = False
    _worker: _Worker | None = None
    _lost: Counter[str] = field(default_factory=Counter)

    def rows(self) -> Iterator[Found]:
        while not self._ended:
            lost = {name: f"it ended {n} processes before" for name, n in self._lost.items() if n >= MAX_LOST}
            how = {"start": self._next, "share": self.share, "first": not self._started and not self.share[0]}
            self._worker = _Worker({"task": asdict(self.task), "lost": lost, **how}, self.share[1])
            self._started = True
            try:
                if (yield from self._until_lost(self._worker)):
                    return
            finally:
                self._worker.end()

    def end(self) -> None:
        """End the child, and start no other."""
        self._ended = True
        if self._worker is not None:
            self._worker.end()

    def _until_lost(self, worker: _Worker) -> Generator[Found, None, bool]:
        """The rows of one child; returns whether they are the last."""
        loading: object = "the backends"
        begun: dict[str, Any] | None = None
        checking = False
        while True:
            try:
                message = worker.receive(self._seconds(begun if checking else None))
            except _LostError as lost:
                if begun is None:
                    raise CannotRunError(f"the process that loads {loading} {lost}") from None
                yield _failed(begun["number"], begun["begin"], f"the process {lost}", begun["command"])
                self._lost[begun["begin"]["backend"]] += 1
                self._next = begun["number"] + 1
                return False
            if "cannot" in message:
                raise CannotRunError(message["cannot"])
            if "loading" in message:
                loading = message["loading"]
            elif "printed" in message:
                row = whole(message["backend"], "fail", "", self.task.ranks or 1)
                command = f"contrastile verify --backend {message['backend']}"
                reason = f"printed to stdout when it was imported: {message['printed']!r}"
                yield _failed(-1, row, reason, command)
            elif "begin" in message:
                begun, checking, self.total = message, True, message["total"]
            elif "row" in message:
                row, given, failure = message["row"], message.get("failure"), None
                if given is not None:
                    index = given["worst"]["index"]
                    worst = Worst(**{**given["worst"], "index": None if index is None else tuple(index)})
                    failure = Failure(row, worst, given["label"], given["command"])
                if "number" in message:
                    checking, self.total, self._next = False, message["total"], message["number"] + 1
                yield message.get("number", -1), row, failure
            else:
                return True

    def _seconds(self, begun: dict[str, Any] | None) -> float:
        """How long a message may take: of a check that has begun, or of anything else."""
        given = self.deadline
        if begun is not None:
            return DEADLINE[begun["begin"]["device"]] if given is None else given
        return max(DEADLINE["cpu"] if given is None else given, _START)


def _failed(number: int, row: Row, reason: str, command: str) -> Found:
    failed = Row(**{**row, "status": "fail", "ratio": math.inf, "excess": math.inf, "reason": reason})
    return number, failed, Failure(failed, wrong(reason), "", command)


class _LostError(Exception):
    """The child ended, or exceeded the deadline; the message completes "the process ..."."""


class _Worker:
    """A child process, and the thread that reads its messages."""

    def __init__(self, order: dict[str, Any], jobs: int) -> None:
        # the oracle's products: threads of several children would wait for each other
        limited = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if jobs > 1 else {}
        # a new session: Ctrl-C reaches the parent alone
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
            env={**limited, **os.environ},
        )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
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
            raise _LostError(ending(self._process.wait()))
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
