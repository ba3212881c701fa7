"""The checks as pytest tests: of ``pytest --pyargs contrastile.verify``, and of the losses in a conftest.py.

``contrastile verify`` runs the former on workers of pytest-xdist, see ``session``.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from contrastile.reporting import CannotRunError
from contrastile.verify import launched
from contrastile.verify.losses.selection import LossSelection
from contrastile.verify.losses.subject import Loss
from contrastile.verify.options import OPTIONS, selected, settle
from contrastile.verify.runner import Check, Failure, Row

RESULT = "contrastile"
"""The key of a report's user property that holds the row."""

DEADLINE = {"cpu": 300.0, "cuda": 600.0}
"""Seconds that one check may take, by device: on a GPU it may compile kernels first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of ``contrastile verify`` that select checks."""
    group = parser.getgroup("contrastile")
    for name, arguments in OPTIONS.items():
        group.addoption(f"--{name.replace('_', '-')}", **arguments)


def pytest_configure(config: pytest.Config) -> None:
    """Set up a worker of ``contrastile verify``, in a session of its own: Ctrl-C reaches only the parent."""
    worker_input = getattr(config, "workerinput", {})
    if RESULT in worker_input:
        sys.path[:] = worker_input["path"]
        if hasattr(os, "setsid"):
            os.setsid()


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> Checks | None:
    """Collect the checks that the options select, in place of this package's files."""
    if path != Path(__file__).parent or parent.config.getoption("backend", 0) == 0:
        return None
    return Checks.from_parent(parent, path=path)


class Checks(pytest.Directory):
    def collect(self) -> Iterator[pytest.Item]:
        options = argparse.Namespace(**{name: self.config.getoption(name) for name in OPTIONS})
        if options.world in ("mpi", "torch"):
            raise CannotRunError(f"--world {options.world} must be given to contrastile verify, got it for pytest")
        settle(options)
        with (
            launched.opened(options.world, options.device, options.per_host) as world,
            _watched(self.config, loading_limit(options)),
        ):
            for number, check in enumerate(selected(options, world, lambda: _printed(self.config))):
                seconds = limit(options, check.device)
                yield CheckItem.from_parent(self, name=check.name(), check=check, number=number, deadline=seconds)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:  # type: ignore[override]
        """One line with the reason why the checks cannot run."""
        if isinstance(excinfo.value, CannotRunError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)


class CheckItem(pytest.Item):
    """A check as a test: it has no fixtures, and makes one report."""

    def __init__(
        self, *, check: Check, number: int = 0, skip: str = "", deadline: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.check, self.number, self.skip, self.deadline = check, number, skip, deadline

    def runtest(self) -> None:
        """Do nothing: ``pytest_runtest_protocol`` runs the check in ``report``."""

    def report(self) -> pytest.TestReport:
        start = time.time()
        row, failure = self._result()
        outcome, reason = "skipped", f"{'not claimed: ' * (row['status'] == 'unclaimed')}{row['reason']}"
        longrepr: Any = (str(self.path), None, f"Skipped: {reason}")
        if row["status"] == "pass":
            outcome, longrepr = "passed", None
        elif failure is not None:
            ratio = f"error / bound = {failure.worst.ratio:.3g}"
            lines = f"{row['backend']}, {row['property']}: {row['reason']}", ratio, f"rerun: {failure.command}"
            outcome, longrepr = "failed", "\n".join(lines)
        return pytest.TestReport(
            self.nodeid,
            self.location,
            {},
            outcome,  # type: ignore[arg-type]
            longrepr,
            "call",
            duration=time.time() - start,
            start=start,
            stop=time.time(),
            user_properties=[(RESULT, pickle.dumps((self.number, row, failure)))] if _status(self.config) else [],
        )

    def _result(self) -> tuple[Row, Failure | None]:
        if self.skip:
            return self.check.row("skip", reason=self.skip), None
        excluded = getattr(self.config, "workerinput", {}).get("lost", {})
        if self.check.backend in excluded:
            return self.check.row("untested", reason=excluded[self.check.backend]), None
        if status := _status(self.config):
            status.write_bytes(pickle.dumps((self.number, *self.check.failed(""))))
        with _watched(self.config, self.deadline):
            return self.check.run(lambda: _printed(self.config))

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if not isinstance(item, CheckItem):
        return None
    item.ihook.pytest_runtest_logreport(report=item.report())
    return True


def limit(options: Any, device: str) -> float:
    """Seconds that a check may take on a kind of device."""
    return float(options.deadline or DEADLINE["cuda" if device == "cuda" else "cpu"])


def loading_limit(options: Any) -> float:
    return max(DEADLINE["cpu"], limit(options, "cpu"))


def _status(config: pytest.Config) -> Path | None:
    """The file where a worker of ``contrastile verify`` records the check that it begins; None in other processes."""
    worker_input = getattr(config, "workerinput", {})
    return Path(worker_input[RESULT]) if RESULT in worker_input else None


@contextlib.contextmanager
def _watched(config: pytest.Config, seconds: float | None) -> Iterator[None]:
    """Capture printed text; end a worker that takes longer, even if it holds the interpreter's lock."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.resume_global_capture()
    try:
        if seconds is None or not hasattr(config, "workerinput"):
            yield
            return
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
            yield
            faulthandler.cancel_dump_traceback_later()
    finally:
        capture.suspend_global_capture()


def _printed(config: pytest.Config) -> str:
    """The beginning, in one line, of the text that Python or C code printed to stdout since the last call."""
    with contextlib.suppress(ValueError, AttributeError):
        # a backend may have closed stdout
        sys.stdout.flush()
    if os.name == "posix":
        ctypes.CDLL(None).fflush(None)
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    return " ".join(capture.read_global_capture().out.split())[:80]


class LossFile(pytest.File):
    """A conftest.py that names losses.

    ``contrastile_losses`` is a loss, a list of them, or a mapping of names to them: see ``Loss.of``.
    ``contrastile_skips``, if given, maps shell patterns of test names to the reasons why these tests are skipped.
    """

    def __init__(self, *, module: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module = module

    def collect(self) -> Iterator[pytest.Item]:
        """One test for each case and property, and a skipped test for each check that the loss does not claim."""
        attribute = self.module.contrastile_losses
        skips: Mapping[str, str] = getattr(self.module, "contrastile_skips", {})
        losses = [attribute] if isinstance(attribute, str) or callable(attribute) else attribute
        used_patterns: set[str] = set()
        losses_by_name = losses.items() if isinstance(losses, Mapping) else ((None, loss) for loss in losses)
        for name, target in losses_by_name:
            loss = Loss.of(target)
            short_name = name or loss.name.rpartition(":")[2]
            for check in LossSelection([loss]):
                test = check.name().replace(loss.name, short_name, 1)
                patterns = [pattern for pattern in skips if fnmatchcase(test, pattern)]
                used_patterns.update(patterns)
                yield CheckItem.from_parent(self, name=test, check=check, skip=skips[patterns[0]] if patterns else "")
        unused = [pattern for pattern in skips if pattern not in used_patterns]
        if unused:
            raise self.CollectError("no test has a name that matches " + ", ".join(unused))
