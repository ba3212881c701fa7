"""A run of pytest for ``contrastile verify``: workers of pytest-xdist run the checks, so that a crash ends one worker.

If a worker ends or exceeds the deadline, its check has failed, and a new worker continues. Later workers leave out the
checks of a backend that has ended several workers.
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
"""The number of ended workers after which a backend is excluded."""

_LEFT_OUT = ("terminal", "cacheprovider", "faulthandler", "tmpdir", "warnings", "logging", "unittest", "doctest")


@dataclass(slots=True)
class Session:
    """A run. Results arrive in any order; ``results`` holds them by the number of their check.

    ``given`` are the settled options of ``options.settle``.
    """

    given: argparse.Namespace
    jobs: int = 1
    progress: ProgressCallback = lambda done, total, what: None
    results: dict[int, tuple[Row, Failure | None]] = field(default_factory=dict)
    total: int = 0
    interrupted: bool = False
    _folder: Path = Path()
    _error: str = ""
    _ready: set[str] = field(default_factory=set)
    _lost: Counter[str] = field(default_factory=Counter)
    _processes: dict[str, Any] = field(default_factory=dict)

    def run(self, *, fail_fast: bool = False) -> tuple[list[Row], list[Failure]]:
        """The rows in the order of their checks, and the failures; with ``fail_fast`` up to the first failure.

        Raises:
            CannotRunError: a backend or the device is not available.
        """
        command = ["--pyargs", "contrastile.verify", "-p", plugin.__name__, "-p", "xdist.plugin", "-n", str(self.jobs)]
        command += ["--dist", "worksteal", "--max-worker-restart", str(sys.maxsize), "--assert", "plain"]
        # ignore the user's configuration of pytest
        command += ["-c", os.devnull, "--rootdir", str(Path(contrastile.__file__).parent), "--noconftest"]
        command += [word for name in _LEFT_OUT for word in ("-p", f"no:{name}")]
        command += ["-x"] * fail_fast + words({name: getattr(self.given, name) for name in OPTIONS})
        with TemporaryDirectory() as folder, _environment(self.jobs, folder):
            self._folder = Path(folder)
            exit_code = pytest.main(command, [self])
        if self._error:
            raise CannotRunError(self._error)
        if exit_code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            raise CannotRunError(f"pytest ended with exit code {int(exit_code)}")
        pairs = [self.results[number] for number in sorted(self.results)]
        last_place = next((place for place, (_, failure) in enumerate(pairs, 1) if failure), len(pairs))
        pairs = pairs[: last_place if fail_fast else None]
        return [row for row, _ in pairs], [failure for _, failure in pairs if failure is not None]

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker where to record the check that it begins, and which backends to leave out."""
        lost = {name: f"it ended {n} processes before" for name, n in self._lost.items() if n >= MAX_LOST}
        status_file = self._folder / node.gateway.id
        status_file.touch()
        # execnet has no public name for the process
        self._processes[node.gateway.id] = node.gateway._io.popen
        node.workerinput |= {plugin.RESULT: str(status_file), "path": sys.path, "lost": lost}

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """A worker has collected the checks."""
        self._ready.add(node.gateway.id)
        self.total = len(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A worker cannot collect the checks."""
        self._error = self._error or report.longreprtext

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker has ended."""
        process = self._processes[node.gateway.id]
        if not error or self._error:
            return
        # processes that the worker started may still run
        _kill(process)
        if node.gateway.id not in self._ready:
            loaded = self.given.loss or self.given.backend or "the backends"
            self._error = f"the process that loads {loaded} {self._ending(node, plugin.loading_limit(self.given))}"
            pytest.exit(self._error)

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
        self.results[number] = row, failure
        description = f"{row['backend']} {row['dtype']} {row['case']} {row['property']}"
        self.progress(len(self.results), self.total, description)

    def _ending(self, node: Any, seconds: float) -> str:
        """How a worker with a limit of so many seconds has ended, in words."""
        is_late = time.time() - (self._folder / node.gateway.id).stat().st_mtime >= seconds
        exit_code = self._processes[node.gateway.id].wait()
        return f"took longer than {seconds:g} s (--deadline)" if is_late else ending(exit_code)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """The user interrupted the run, or ``pytest.exit`` ended it."""
        self.interrupted = excinfo.type is KeyboardInterrupt

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Kill every worker and its processes, because unloading their libraries would take time."""
        for process in self._processes.values():
            _kill(process)


def _kill(process: Any) -> None:
    """Kill a worker and every process that it started: the worker leads a process group of its own."""
    with suppress(ProcessLookupError, PermissionError):
        process.kill()
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _environment(jobs: int, folder: str) -> Iterator[None]:
    """The workers' environment: no plugins but those of the command, and no threads that wait for each other."""
    # without this folder hypothesis writes its caches to the current one
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HYPOTHESIS_STORAGE_DIRECTORY": folder}
    with mock.patch.dict(os.environ, variables):
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
            os.environ.pop(name, None)
        # a thread that spins while it waits takes the core from a thread that computes
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS") if jobs > 1 else ():
            os.environ.setdefault(name, "1")
        yield
