"""The process in which ``contrastile verify`` runs other people's code: its rows go to the parent, one line each.

``isolation`` starts it and says what it is to run. What the backend prints goes to a file, never to the parent. It ends
with its parent, whose end of the standard input then closes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from contrastile.backends import registry
from contrastile.backends.contract import Backend, BackendUnavailableError
from contrastile.environment import finds_a_gpu
from contrastile.reporting import CannotRunError, one_line
from contrastile.verify.losses.selection import LossSelection
from contrastile.verify.losses.subject import Loss
from contrastile.verify.runner import Check, Row, Run
from contrastile.verify.selection import Selection
from contrastile.verify.worlds import Threads


@dataclass(frozen=True, slots=True)
class Task:
    """What to run: ``selection.Selection`` in what JSON can hold, whose attributes are not repeated here.

    Attributes:
        backends: names; None for all that are available.
        ranks: how many threads a world has; None for a process alone.
        losses: "module:attribute" of losses that are run instead of backends; None for backends.
        objective: what these losses compute; None for what they claim.
    """

    backends: list[str] | None
    cases: list[str] | None
    properties: list[str] | None
    dtypes: Sequence[str]
    device: str
    examples: int
    seed: int
    precisions: list[str] | None
    workspace: int | None = None
    keep: int | None = None
    ranks: int | None = None
    losses: list[str] | None = None
    objective: str | None = None

    def of_losses(self) -> LossSelection:
        """The selection of losses.

        Raises:
            CannotRunError: one of them cannot be had, or claims what cannot be claimed.
        """
        losses = []
        for name in self.losses or ():
            try:
                losses.append(Loss.of(name, objective=self.objective))
                _ = losses[-1].arrays
            except (TypeError, ValueError, ImportError) as error:
                raise CannotRunError(f"loss {name!r}: {error}") from error
        device = self.device
        if device == "auto":
            everywhere = all("cuda" in loss.claims.devices for loss in losses)
            device = "cuda" if everywhere and finds_a_gpu() else "cpu"
        return LossSelection(losses, self.cases, self.properties, self.dtypes, device)

    def selection(self, backends: dict[str, Backend], *, gpu: bool = False) -> Selection:
        """The selection, of these backends, on a machine with a GPU or without one."""
        here: dict[str, Any] = {"backends": backends, "gpu": gpu}
        here["world"] = None if self.ranks is None else Threads(self.ranks)
        return Selection(**here, **{x.name: getattr(self, x.name) for x in fields(Selection) if x.name not in here})


def load(named: list[str] | None) -> Iterator[tuple[str, Backend | str]]:
    """Each backend to run, by name; for one that is unavailable and was not asked for by name, the reason.

    Raises:
        CannotRunError: one that was asked for cannot be had.
    """
    for name in dict.fromkeys(named or registry.names()):
        try:
            yield name, registry.load(name)
        except BackendUnavailableError as error:
            if named:
                raise CannotRunError(str(error)) from error
            yield name, str(error)
        except (Exception, SystemExit) as error:
            # importing other people's code may raise anything
            ours = isinstance(error, ValueError | TypeError)
            raise CannotRunError(str(error) if ours else f"backend {name!r} raised {one_line(error)}") from error


def whole(name: str, status: str, reason: str, ranks: int = 1) -> Row:
    """A row about all of a backend."""
    return Check(name, "all", "all", "all", None, str, device="all", world=ranks).row(status, reason=reason)


def require_device(name: str) -> None:
    """Raise CannotRunError where there is no such device."""
    if name == "cuda" and not finds_a_gpu():
        raise CannotRunError(
            "--device cuda needs a GPU that torch or CuPy can use, and neither finds one; use --device cpu"
        )


class _Output:
    """What is written to the standard output, by Python or below it, goes to a file."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        os.dup2(self._file.fileno(), sys.stdout.fileno())
        self._libc = ctypes.CDLL(None) if os.name == "posix" else None

    def __call__(self) -> str:
        """What was written since the last call, its beginning in one line."""
        with contextlib.suppress(ValueError, AttributeError):
            # a backend may have closed it
            sys.stdout.flush()
        if self._libc is not None:
            self._libc.fflush(None)
        self._file.seek(0)
        text = self._file.read(200)
        self._file.seek(0)
        self._file.truncate()
        return " ".join(text.decode(errors="replace").split())[:80]


def main() -> None:
    """Run the task that the first line of the standard input holds, and report to the standard output."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    output = _Output()
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        _run(Task(**order.pop("task")), say, output, **order)
    except CannotRunError as error:
        say(cannot=str(error))
    # everything is reported: run no finalisers
    os._exit(0)


def _end_with_parent() -> None:
    # the parent writes no second line: this returns when it is gone
    sys.stdin.readline()
    os._exit(1)


def _run(
    task: Task, say: Any, output: _Output, *, start: int, share: tuple[int, int], first: bool, lost: Mapping[str, str]
) -> None:
    ranks = task.ranks or 1
    require_device(task.device)
    how: dict[str, Any] = {"printed": output, "start": start, "share": share, "excluded": lost}
    how["begin"] = lambda number, total, row, command: say(begin=row, number=number, total=total, command=command)
    if task.losses is not None:
        say(loading=task.losses)
        losses = task.of_losses()
        # what a module prints when it is imported is no check's
        output()
        _report(Run(losses, **how), say)
        return
    found: dict[str, Backend] = {}
    say(loading=task.backends or "the backends")
    for name, backend in load(task.backends):
        if isinstance(backend, str):
            if first:
                say(row=whole(name, "skip", backend, ranks))
            continue
        found[name] = backend
        said = output()
        if said and first:
            say(printed=said, backend=name)
    # looking for a GPU imports torch, which takes longer than many a check
    may = task.device != "cpu" and any("cuda" in backend.devices for backend in found.values())
    selection = task.selection(found, gpu=may and finds_a_gpu())
    _report(Run(selection, **how), say)


def _report(run: Run, say: Any) -> None:
    for number, row in run.numbered():
        failure = None
        if run.failures:
            last = run.failures.pop()
            failure = {"worst": asdict(last.worst), "label": last.label, "command": last.command}
        say(row=row, failure=failure, number=number, total=run.total)
    say(done=True)
