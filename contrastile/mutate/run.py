"""Runs each mutant in a process of its own, from a copy of the package with the patch applied."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from contrastile.backends import registry as backends
from contrastile.mutate.registry import EXCHANGE, FACE, PACKAGE, Mutant, PatchError
from contrastile.reporting import ProgressCallback

Status = Literal["caught", "missed", "equivalent", "broken", "not run"]

WORLD = 3
"""The number of ranks for mutants of the exchange. The two directions of a ring differ from three ranks on."""

INTERPRETED = {
    "--case": ["ragged", "square-ragged", "hot", "labels", "ids-drop", "signed-zero-weights", "sigmoid-ids"],
    "--property": ["value", "gradients"],
    "--dtype": ["float32"],
    "--precision": ["ieee"],
}
"""The checks of a mutant of the Triton kernels under the interpreter."""

# Such an error shows that the patch no longer fits the code around it, so the mutant is broken, not caught.
_MISFIT = re.compile(r"raised (Name|Attribute|Type|Import|ModuleNotFound|Syntax|Indentation|Compilation)Error")


@dataclass(slots=True)
class Result:
    """The result of a mutant.

    ``problems`` and ``seconds`` are the problems computed and the time spent until the verdict; ``case``, ``property``
    and ``dtype`` are those of the check that caught it.
    """

    name: str
    about: str
    backend: str
    status: Status
    case: str = ""
    property: str = ""
    dtype: str = ""
    reason: str = ""
    problems: int = 0
    seconds: float = 0.0


def missing(mutant: Mutant, device: str) -> str | None:
    """Why a mutant cannot run on this kind of device, or None."""
    reason = backends.available()[mutant.backend]
    if reason is not None:
        return reason
    if mutant.package and find_spec(mutant.package) is None:
        return f"needs {mutant.package}"
    required = mutant.device or ("cuda" if mutant.component == "cupy" else device)
    return None if required == device else f"needs a GPU: --device {required}"


def place(mutant: Mutant, device: str) -> str:
    """The kind of device on which a mutant runs. A mutant of code above the backends runs on the CPU."""
    return device if mutant.component in ("torch", "triton", "cupy") else "cpu"


def arguments(mutant: Mutant, device: str) -> list[list[str]]:
    """The arguments of each run of ``contrastile verify`` for a mutant: its own checks or all; fewer if interpreted.

    On a GPU a first run has its own checks, or a few, because all checks compile many kernels for each mutant.
    """
    options = [*world(mutant), "--device", place(mutant, device)]
    if place(mutant, device) == "cuda":
        return [[*options, *(mutant.checks or ["--quick"])], options]
    options += mutant.checks
    options += ["--dtype", "float32"] if mutant.component in FACE and "--dtype" not in mutant.checks else []
    for option, values in INTERPRETED.items() if mutant.backend == "triton" else ():
        options += [] if option in options else [option, *values]
    return [options]


def world(mutant: Mutant) -> list[str]:
    """The option that gives a mutant its ranks."""
    if "--world" in mutant.checks:
        index = mutant.checks.index("--world")
        return [*mutant.checks[index : index + 2]]
    return ["--world", str(WORLD)] if mutant.component == EXCHANGE else []


@dataclass(slots=True)
class MutationRun:
    """A run of mutants, with their results so far. Each run of verify may take ``deadline`` seconds."""

    mutants: Sequence[Mutant]
    device: str = "cpu"
    deadline: float = 600.0
    jobs: int = 1
    progress: ProgressCallback = lambda done, total, label: None
    results: list[Result] = field(default_factory=list)
    _controls: dict[tuple[str, ...], Done] = field(default_factory=dict)
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _stopped: bool = False

    def all(self) -> list[Result]:
        """Run every mutant, and rerun the check that caught it on the correct code.

        An interruption kills all processes. ``results`` then ends before the first unfinished mutant.
        """
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for result in pool.map(self._run_mutant, self.mutants):
                    self.results.append(result)
                    self.progress(len(self.results), len(self.mutants), result.name)
            finally:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    _kill(process)
        return self.results

    def _run_mutant(self, mutant: Mutant) -> Result:
        reason = missing(mutant, self.device)
        if reason is not None:
            return _result(mutant, "not run", reason=reason)
        start = time.monotonic()
        result = self._verify_mutant(mutant)
        result.seconds = round(time.monotonic() - start, 2)
        # A run that computed no problem proves nothing.
        if mutant.equivalent is not None and result.status == "missed" and result.problems:
            return replace(result, status="equivalent", reason=mutant.equivalent)
        if mutant.equivalent is not None and result.status == "caught":
            return replace(result, status="broken", reason=f"declared equivalent, but caught: {result.reason}")
        # A failure of the whole backend, or of the verdict, has no case to rerun.
        if result.status == "caught" and result.case not in ("", "all"):
            reason = self._control_failure(mutant, result)
            if reason is not None:
                return replace(result, status="broken", reason=f"the correct code fails there, too: {reason}")
        return result

    def _verify_mutant(self, mutant: Mutant) -> Result:
        with TemporaryDirectory() as folder:
            try:
                plant(mutant, Path(folder))
            except PatchError as error:
                return _result(mutant, "broken", reason=str(error))
            *first_runs, last_run = arguments(mutant, self.device)
            for options in first_runs:
                result = verdict(mutant, self._verify(mutant, Path(folder), ["--fail-fast", *options]))
                if result.status == "caught":
                    return result
            return verdict(mutant, self._verify(mutant, Path(folder), ["--fail-fast", *last_run]))

    def _verify(self, mutant: Mutant, folder: Path, options: Sequence[str]) -> Done:
        """Run ``contrastile verify`` on the package in a folder, or on this one if the folder has none."""
        json_path = folder / "verify.json"
        command = [sys.executable, "-m", "contrastile", "verify", "--backend", mutant.backend, *options]
        command += ["--json", str(json_path), "--quiet", "--jobs", "1"]
        path = os.pathsep.join([str(folder), str(PACKAGE.parent), *filter(None, sys.path)])
        environment = dict(os.environ, PYTHONPATH=path)
        if mutant.backend == "triton":
            environment["TRITON_INTERPRET"] = "0" if place(mutant, self.device) == "cuda" else "1"
        # Start a new session, so that the process can be killed together with all its children.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._running.add(process)
        if self._stopped:
            _kill(process)
        try:
            output, errors = process.communicate(timeout=self.deadline)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            return Done(None, [], f"verify had no verdict after {self.deadline:g} s")
        finally:
            self._running.discard(process)
        rows = json.loads(json_path.read_text(encoding="utf-8"))["rows"] if json_path.exists() else []
        lines = (errors.strip() or output.strip()).splitlines()
        return Done(process.returncode, rows, lines[-1] if lines else "it printed nothing")

    def _control_failure(self, mutant: Mutant, caught: Result) -> str | None:
        """Why the correct code fails the check that caught a mutant, or None."""
        dtype, _, precision = caught.dtype.partition("/")
        options = [*world(mutant), "--device", place(mutant, self.device), "--dtype", dtype]
        options += ["--case", caught.case, "--property", caught.property]
        options += ["--precision", precision or "ieee"] if dtype == "float32" else []
        done = self._controls.get((mutant.backend, *options))
        if done is None:
            with TemporaryDirectory() as folder:
                done = self._controls[mutant.backend, *options] = self._verify(mutant, Path(folder), options)
        reasons = (str(row["reason"]) for row in done.rows if row["status"] == "fail")
        # A run that did not finish does not prove that the correct code passes.
        return next(reasons, None if done.code == 0 else done.last_line)


@dataclass(frozen=True, slots=True)
class Done:
    """A finished run of verify: its exit code, None past the deadline; its rows; and its last line of output."""

    code: int | None
    rows: list[dict[str, Any]]
    last_line: str


def plant(mutant: Mutant, folder: Path, package: Path = PACKAGE) -> None:
    """Copy the package into a folder and apply a mutant's patch to the copy.

    Raises:
        PatchError: the patch does not fit.
    """
    text = mutant.applied(package)
    copy = Path(shutil.copytree(package, folder / package.name))
    file = copy / mutant.file
    file.write_text(text, encoding="utf-8")
    # Delete bytecode: Python would reuse it if the new source had the same size and time stamp.
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def verdict(mutant: Mutant, done: Done) -> Result:
    """The result of a mutant: caught by a row that failed, or by verify's verdict on all rows."""
    problems = len({(row["dtype"], row["case"]) for row in done.rows if row["status"] in ("pass", "fail")})
    failure = next((row for row in done.rows if row["status"] == "fail"), None)
    if failure is not None:
        status: Status = "broken" if _MISFIT.search(failure["reason"]) else "caught"
        details = {key: failure[key] for key in ("case", "property", "dtype", "reason")}
        return _result(mutant, status, **details, problems=problems)
    if done.rows and done.code and problems:
        return _result(mutant, "caught", reason=done.last_line, problems=problems)
    if done.code is None:
        return _result(mutant, "missed", reason=done.last_line)
    if done.code < 0:
        return _result(mutant, "missed", reason=f"verify was killed by signal {-done.code}")
    if done.code > 0:
        return _result(mutant, "broken", reason=done.last_line)
    reason = "verify passed" if done.rows else "verify exited with code 0 and no verdict"
    return _result(mutant, "missed", reason=reason, problems=problems)


def _result(mutant: Mutant, status: Status, **more: Any) -> Result:
    return Result(mutant.name, mutant.about, mutant.backend, status, **more)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
