"""A run of pytest for ``contrastile verify``: the checks on workers of pytest-xdist, which a crash harms alone.

If a worker ends or exceeds the deadline, its check has failed, and a new one goes on; a backend that has ended several
workers is not tested any further by the next.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest

import contrastile
from contrastile.reporting import CannotRunError, ProgressCallback, ending
from contrastile.verify import plugin
from contrastile.verify.comparison import wrong
from contrastile.verify.options import OPTIONS
from contrastile.verify.runner import Failure, Row, words

MAX_LOST = 3
"""Workers that a backend may end before it is excluded."""

_LEFT_OUT = ("terminal", "cacheprovider", "faulthandler", "tmpdir", "warnings", "logging", "unittest", "doctest")


@dataclass(slots=True)
class Session:
    """A run, whose rows and failures come in no order, by the number of their check.

    ``given`` are the options as ``options.settle`` leaves them.
    """

    given: argparse.Namespace
    jobs: int = 1
    progress: ProgressCallback = lambda done, total, what: None
    found: dict[int, tuple[Row, Failure | None]] = field(default_factory=dict)
    total: int = 0
    interrupted: bool = False
    _folder: Path = Path()
    _why_not: str = ""
    _ready: set[str] = field(default_factory=set)
    _lost: Counter[str] = field(default_factory=Counter)
    _processes: dict[str, Any] = field(default_factory=dict)

    def run(self, *, fail_fast: bool = False) -> tuple[list[Row], list[Failure]]:
        """The rows in the order of their checks, and the failures; up to the first of them with ``fail_fast``.

        Raises:
            CannotRunError: a backend or the device is not available.
        """
        command = ["--pyargs", "contrastile.verify", "-p", plugin.__name__, "-p", "xdist.plugin", "-n", str(self.jobs)]
        command += ["--dist", "worksteal", "--max-worker-restart", str(sys.maxsize), "--assert", "plain"]
        # nobody's settings but these
        command += ["-c", os.devnull, "--rootdir", str(Path(contrastile.__file__).parent), "--noconftest"]
        command += [word for name in _LEFT_OUT for word in ("-p", f"no:{name}")]
        command += ["-x"] * fail_fast + words({name: getattr(self.given, name) for name in OPTIONS})
        with TemporaryDirectory() as folder, _environment(self.jobs, folder):
            self._folder = Path(folder)
            code = pytest.main(command, [self])
        if self._why_not:
            raise CannotRunError(self._why_not)
        if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            raise CannotRunError(f"pytest ended with exit code {int(code)}")
        pairs = [self.found[number] for number in sorted(self.found)]
        first = next((place for place, (_, failure) in enumerate(pairs, 1) if failure), len(pairs))
        pairs = pairs[: first if fail_fast else None]
        return [row for row, _ in pairs], [failure for _, failure in pairs if failure is not None]

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where it writes what it begins, and whose checks it leaves out."""
        lost = {name: f"it ended {n} processes before" for name, n in self._lost.items() if n >= MAX_LOST}
        status = self._folder / node.gateway.id
        status.touch()
        # execnet has no public name for it
        self._processes[node.gateway.id] = node.gateway._io.popen
        node.workerinput |= {plugin.RESULT: str(status), "path": sys.path, "lost": lost}

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """A worker knows the checks."""
        self._ready.add(node.gateway.id)
        self.total = len(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A worker cannot run the checks."""
        self._why_not = self._why_not or report.longreprtext

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker has ended."""
        process = self._processes[node.gateway.id]
        if not error or self._why_not:
            return
        # what it has started may go on
        _kill(process)
        if node.gateway.id not in self._ready:
            what = self.given.loss or self.given.backend or "the backends"
            self._why_not = f"the process that loads {what} {self._ending(node, plugin.loading_limit(self.given))}"
            pytest.exit(self._why_not)

    def pytest_handlecrashitem(self, report: Any) -> None:
        """The check that ended its worker has failed."""
        number, row, failure = pickle.loads((self._folder / report.node.gateway.id).read_bytes())
        row["reason"] = f"the process {self._ending(report.node, plugin.limit(self.given, row['device']))}"
        self._lost[row["backend"]] += 1
        self._done(number, row, replace(failure, row=row, worst=wrong(row["reason"])))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A check is done."""
        for name, result in report.user_properties:
            if name == plugin.RESULT:
                self._done(*pickle.loads(result))  # type: ignore[arg-type]

    def _done(self, number: int, row: Row, failure: Failure | None) -> None:
        self.found[number] = row, failure
        what = f"{row['backend']} {row['dtype']} {row['case']} {row['property']}"
        self.progress(len(self.found), self.total, what)

    def _ending(self, node: Any, seconds: float) -> str:
        """How a worker has ended, which has so much time."""
        late = time.time() - (self._folder / node.gateway.id).stat().st_mtime >= seconds
        code = self._processes[node.gateway.id].wait()
        return f"took longer than {seconds:g} s (--deadline)" if late else ending(code)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """The run was stopped, or has stopped itself."""
        self.interrupted = excinfo.type is KeyboardInterrupt

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """End every worker, and what it has started: nothing waits until it has unloaded its libraries."""
        for process in self._processes.values():
            _kill(process)


def _kill(process: Any) -> None:
    """End a worker, which leads a session of its own, and every process that it started."""
    with suppress(ProcessLookupError, PermissionError):
        process.kill()
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _environment(jobs: int, folder: str) -> Iterator[None]:
    """What the workers inherit: no plugins but those of the command, and no threads that would wait for each other."""
    # hypothesis writes its caches to the current folder, unless it is told of another
    own = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_STORAGE_DIRECTORY": folder}
    with mock.patch.dict(os.environ, own):
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
            os.environ.pop(name, None)
        # a thread that spins while it waits takes the core from one that computes
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS") if jobs > 1 else ():
            os.environ.setdefault(name, "1")
        yield
