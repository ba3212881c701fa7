"""Runs each mutant in a process of its own; a patch is applied to a copy of the package."""

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
"""Ranks of the exchange's mutants: from three on, the two directions of a ring differ."""

INTERPRETED = {
    "--case": ["ragged", "square-ragged", "hot", "labels", "ids-drop", "signed-zero-weights", "sigmoid-ids"],
    "--property": ["value", "gradients"],
    "--dtype": ["float32"],
    "--precision": ["ieee"],
}
"""The checks of a mutant of the Triton kernels under the interpreter."""

# a patch that no longer fits the code around it fails by itself
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
    """Why a mutant cannot run where the kind of device is ``device``, or None."""
    reason = backends.available()[mutant.backend]
    if reason is not None:
        return reason
    if mutant.package and find_spec(mutant.package) is None:
        return f"needs {mutant.package}"
    needed = mutant.device or ("cuda" if mutant.component == "cupy" else device)
    return None if needed == device else f"needs a GPU: --device {needed}"


def place(mutant: Mutant, device: str) -> str:
    """The kind of device on which a mutant runs: above the backends, the CPU."""
    return device if mutant.component in ("torch", "triton", "cupy") else "cpu"


def arguments(mutant: Mutant, device: str) -> list[list[str]]:
    """The arguments of ``contrastile verify`` for a mutant: its checks, else all, except under the interpreter.

    On a GPU its own checks, or a few, come first: what all of them need is compiled for each mutant anew.
    """
    words = [*world(mutant), "--device", place(mutant, device)]
    if place(mutant, device) == "cuda":
        return [[*words, *(mutant.checks or ["--quick"])], words]
    words += mutant.checks
    words += ["--dtype", "float32"] if mutant.component in FACE and "--dtype" not in mutant.checks else []
    for option, values in INTERPRETED.items() if mutant.backend == "triton" else ():
        words += [] if option in words else [option, *values]
    return [words]


def world(mutant: Mutant) -> list[str]:
    """The option that gives a mutant its ranks."""
    if "--world" in mutant.checks:
        at = mutant.checks.index("--world")
        return [*mutant.checks[at : at + 2]]
    return ["--world", str(WORLD)] if mutant.component == EXCHANGE else []


@dataclass(slots=True)
class MutationRun:
    """Mutants, and their results as they run; a run of verify may take ``deadline`` seconds."""

    mutants: Sequence[Mutant]
    device: str = "cpu"
    deadline: float = 600.0
    jobs: int = 1
    progress: ProgressCallback = lambda done, total, what: None
    results: list[Result] = field(default_factory=list)
    _controls: dict[tuple[str, ...], Done] = field(default_factory=dict)
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _stopped: bool = False

    def all(self) -> list[Result]:
        """Run every mutant, and the check that caught it on the correct code.

        If it is interrupted, all processes are killed, and ``results`` has those before the first that was not done.
        """
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for found in pool.map(self._one, self.mutants):
                    self.results.append(found)
                    self.progress(len(self.results), len(self.mutants), found.name)
            finally:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    _kill(process)
        return self.results

    def _one(self, mutant: Mutant) -> Result:
        reason = missing(mutant, self.device)
        if reason is not None:
            return _result(mutant, "not run", reason=reason)
        start = time.monotonic()
        found = self._verified(mutant)
        found.seconds = round(time.monotonic() - start, 2)
        # a run that computed nothing is no evidence
        if mutant.equivalent is not None and found.status == "missed" and found.problems:
            return replace(found, status="equivalent", reason=mutant.equivalent)
        if mutant.equivalent is not None and found.status == "caught":
            return replace(found, status="broken", reason=f"declared equivalent, but caught: {found.reason}")
        # a failure of the whole backend, or of the verdict, has no case to rerun
        if found.status == "caught" and found.case not in ("", "all"):
            reason = self._control(mutant, found)
            if reason is not None:
                return replace(found, status="broken", reason=f"the correct code fails there, too: {reason}")
        return found

    def _verified(self, mutant: Mutant) -> Result:
        with TemporaryDirectory() as folder:
            try:
                plant(mutant, Path(folder))
            except PatchError as error:
                return _result(mutant, "broken", reason=str(error))
            *first, everything = arguments(mutant, self.device)
            for words in first:
                found = verdict(mutant, self._verify(mutant, Path(folder), ["--fail-fast", *words]))
                if found.status == "caught":
                    return found
            return verdict(mutant, self._verify(mutant, Path(folder), ["--fail-fast", *everything]))

    def _verify(self, mutant: Mutant, folder: Path, words: Sequence[str]) -> Done:
        """Run ``contrastile verify`` on the package in a folder, or on this one if the folder has none."""
        out = folder / "verify.json"
        command = [sys.executable, "-m", "contrastile", "verify", "--backend", mutant.backend, *words]
        command += ["--json", str(out), "--quiet", "--jobs", "1"]
        path = os.pathsep.join([str(folder), str(PACKAGE.parent), *filter(None, sys.path)])
        environment = dict(os.environ, PYTHONPATH=path)
        if mutant.backend == "triton":
            environment["TRITON_INTERPRET"] = "0" if place(mutant, self.device) == "cuda" else "1"
        # a session of its own, so that it can be killed with every process that it starts
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
        rows = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
        lines = (errors.strip() or output.strip()).splitlines()
        return Done(process.returncode, rows, lines[-1] if lines else "it printed nothing")

    def _control(self, mutant: Mutant, caught: Result) -> str | None:
        """Why the correct code fails the check that caught a mutant, or None."""
        dtype, _, precision = caught.dtype.partition("/")
        words = [*world(mutant), "--device", place(mutant, self.device), "--dtype", dtype]
        words += ["--case", caught.case, "--property", caught.property]
        words += ["--precision", precision or "ieee"] if dtype == "float32" else []
        done = self._controls.get((mutant.backend, *words))
        if done is None:
            with TemporaryDirectory() as folder:
                done = self._controls[mutant.backend, *words] = self._verify(mutant, Path(folder), words)
        failed = (str(row["reason"]) for row in done.rows if row["status"] == "fail")
        # a run that did not finish clears no check
        return next(failed, None if done.code == 0 else done.last_line)


@dataclass(frozen=True, slots=True)
class Done:
    """A run of verify: its exit code, None if it ran past the deadline; its rows; the last line that it printed."""

    code: int | None
    rows: list[dict[str, Any]]
    last_line: str


def plant(mutant: Mutant, folder: Path, package: Path = PACKAGE) -> None:
    """Copy the package into a folder and apply a mutant's patch to the copy.

    Raises:
        PatchError: it does not fit.
    """
    text = mutant.applied(package)
    copy = Path(shutil.copytree(package, folder / package.name))
    changed = copy / mutant.file
    changed.write_text(text, encoding="utf-8")
    # bytecode of an old source with the same size and time stamp would be used for the new one
    for compiled in (changed.parent / "__pycache__").glob(f"{changed.stem}.*"):
        compiled.unlink()


def verdict(mutant: Mutant, done: Done) -> Result:
    """The result of a mutant: caught by a row that failed, or by verify's verdict on all rows."""
    problems = len({(row["dtype"], row["case"]) for row in done.rows if row["status"] in ("pass", "fail")})
    first = next((row for row in done.rows if row["status"] == "fail"), None)
    if first is not None:
        status: Status = "broken" if _MISFIT.search(first["reason"]) else "caught"
        where = {key: first[key] for key in ("case", "property", "dtype", "reason")}
        return _result(mutant, status, **where, problems=problems)
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
