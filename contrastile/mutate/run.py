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
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypedDict

from contrastile.backends import registry as backends
from contrastile.mutate.registry import CONTRACT, EXCHANGE, FACE, PACKAGE, SCHEDULE, Mutant, Patch, PatchError
from contrastile.mutate.wrappers import WRAPPERS
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


class Result(TypedDict):
    """The result of a mutant.

    ``problems`` and ``seconds`` are the problems computed and the time spent until the verdict; ``case``, ``property``
    and ``dtype`` are those of the check that caught it.
    """

    name: str
    about: str
    backend: str
    status: Status
    case: str
    property: str
    dtype: str
    reason: str
    problems: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Target:
    """The backend in which defects are planted, and where it runs.

    Attributes:
        backend: wrapped by the contract's defects; None for torch, or numpy where there is no torch.
        device: kind of device.
        deadline: seconds that a run of verify may take.
    """

    backend: str | None = None
    device: str = "cpu"
    deadline: float = 600.0

    def base(self, mutant: Mutant) -> str:
        """The name of the correct backend that a mutant changes."""
        if mutant.component in (SCHEDULE, EXCHANGE):
            return "numpy"
        if mutant.component != CONTRACT:
            return "torch" if mutant.component in FACE else mutant.component
        needs = WRAPPERS[mutant.defect].needs
        return self.backend or needs or ("torch" if backends.available()["torch"] is None else "numpy")

    def missing(self, mutant: Mutant) -> str | None:
        """Why a mutant cannot run here, or None."""
        base = self.base(mutant)
        missing = backends.available().get(base)
        if missing is not None:
            return missing
        if mutant.package and find_spec(mutant.package) is None:
            return f"needs {mutant.package}"
        needed = mutant.device or ("cuda" if base.partition(":")[0] == "cupy" else self.device)
        if needed != self.device:
            return f"needs a GPU: --device {needed}"
        needs = WRAPPERS[mutant.defect].needs if mutant.component == CONTRACT else None
        library = base if base in ("numpy", "torch") or needs is None else backends.load(base).arrays.name
        return None if needs in (None, library) else f"needs {needs}'s arrays, and the backend has {library}'s"

    def on_gpu(self, base: str) -> bool:
        return self.device == "cuda" and base != "numpy"

    def place(self, mutant: Mutant) -> str:
        """The kind of device on which a mutant runs: above the backends, the CPU."""
        return "cuda" if self.on_gpu(self.base(mutant)) and mutant.component not in FACE else "cpu"

    def arguments(self, mutant: Mutant) -> list[list[str]]:
        """The arguments of ``contrastile verify`` for a mutant: its checks, else all, except under the interpreter.

        On a GPU a few checks come first: what all of them need is compiled for each mutant anew.
        """
        base = self.base(mutant)
        words = self.world(mutant)
        words += ["--device", self.place(mutant)]
        if self.place(mutant) == "cuda":
            return [[*words, "--quick"], words]
        words += mutant.checks
        words += ["--dtype", "float32"] if mutant.component in FACE and "--dtype" not in mutant.checks else []
        for option, values in INTERPRETED.items() if base == "triton" else ():
            words += [] if option in words else [option, *values]
        return [words]

    def world(self, mutant: Mutant) -> list[str]:
        """The option that gives a mutant its ranks."""
        if "--world" in mutant.checks:
            at = mutant.checks.index("--world")
            return [*mutant.checks[at : at + 2]]
        return ["--world", str(WORLD)] if mutant.component == EXCHANGE else []

    def environment(self, base: str, *paths: str) -> dict[str, str]:
        """The environment variables of a run, which imports the package from the first path."""
        found = dict(os.environ, PYTHONPATH=os.pathsep.join([*paths, *filter(None, sys.path)]))
        if base.partition(":")[0] == "triton":
            found["TRITON_INTERPRET"] = "0" if self.on_gpu(base) else "1"
        return found


@dataclass(slots=True)
class MutationRun:
    """Mutants, and their results as they run.

    Attributes:
        target: where they are planted.
        mutants: in order.
        jobs: how many run at a time.
        progress: called with (mutants done, mutants in all, the name of the last).
        results: of the mutants that are done, in their order.
    """

    target: Target
    mutants: Sequence[Mutant]
    jobs: int = 1
    progress: ProgressCallback = lambda done, total, what: None
    results: list[Result] = field(default_factory=list)
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _stopped: bool = False

    def all(self) -> list[Result]:
        """Run every mutant, and then every check that caught one on the correct code.

        If it is interrupted, all processes are killed, and ``results`` has those that are done.
        """
        order = {mutant.name: at for at, mutant in enumerate(self.mutants)}
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                futures = [pool.submit(self._one, mutant) for mutant in self.mutants]
                for future in as_completed(futures):
                    self.results.append(found := future.result())
                    self.results.sort(key=lambda result: order[result["name"]])
                    self.progress(len(self.results), len(self.mutants), found["name"])
                wrong = dict(each for found in pool.map(self._control, self._controls()) for each in found)
            finally:
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    _kill(process)
        for result in self.results:
            if result["name"] in wrong:
                result["status"] = "broken"
                result["reason"] = f"the correct code fails there, too: {wrong[result['name']]}"
        return self.results

    def _one(self, mutant: Mutant) -> Result:
        base = self.target.base(mutant)
        missing = self.target.missing(mutant)
        if missing is not None:
            return _result(mutant, base, "not run", reason=missing)
        start = time.monotonic()
        found = self._verified(mutant, base)
        found["seconds"] = round(time.monotonic() - start, 2)
        # a run that computed nothing is no evidence
        if mutant.equivalent is not None and found["status"] == "missed" and found["problems"]:
            return {**found, "status": "equivalent", "reason": mutant.equivalent}
        if mutant.equivalent is not None and found["status"] == "caught":
            return {**found, "status": "broken", "reason": f"declared equivalent, but caught: {found['reason']}"}
        return found

    def _verified(self, mutant: Mutant, base: str) -> Result:
        name = base if mutant.patch else f"contrastile.mutate.wrappers:{mutant.defect}@{base}"
        named = ["--backend", name, "--fail-fast"]
        with TemporaryDirectory() as folder:
            try:
                if mutant.patch is not None:
                    plant(mutant.patch, Path(folder))
            except PatchError as error:
                return _result(mutant, base, "broken", reason=str(error))
            *first, everything = self.target.arguments(mutant)
            for words in first:
                found = verdict(mutant, base, self._verify(Path(folder), base, [*named, *words]))
                if found["status"] == "caught":
                    return found
            return verdict(mutant, base, self._verify(Path(folder), base, [*named, *everything]))

    def _verify(self, folder: Path, base: str, words: Sequence[str]) -> Done:
        """Run ``contrastile verify`` on the package in a folder, or on this one if the folder has none."""
        out = folder / "verify.json"
        command = [sys.executable, "-m", "contrastile", "verify", *words, "--json", str(out), "--quiet", "--jobs", "1"]
        environment = self.target.environment(base, str(folder), str(PACKAGE.parent))
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
            output, errors = process.communicate(timeout=self.target.deadline)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.communicate()
            return Done(None, [], f"verify had no verdict after {self.target.deadline:g} s")
        finally:
            self._running.discard(process)
        rows = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
        lines = (errors.strip() or output.strip()).splitlines()
        return Done(process.returncode, rows, lines[-1] if lines else "it printed nothing")

    def _controls(self) -> list[tuple[Mutant, list[Result]]]:
        """Caught results by ranks, backend, dtype and property, each group with one of its mutants."""
        groups: dict[tuple[str, ...], tuple[Mutant, list[Result]]] = {}
        for mutant, result in zip(self.mutants, self.results, strict=True):
            # a failure of the whole backend, or of the verdict, has no case to rerun
            if result["status"] == "caught" and result["case"] not in ("", "all"):
                key = *self.target.world(mutant), result["backend"], result["dtype"], result["property"]
                groups.setdefault(key, (mutant, []))[1].append(result)
        return list(groups.values())

    def _control(self, group: tuple[Mutant, list[Result]]) -> list[tuple[str, str]]:
        """Names of mutants whose checks fail on the correct code, too, each with the reason."""
        mutant, caught = group
        base = self.target.base(mutant)
        dtype, _, precision = caught[0]["dtype"].partition("/")
        words = ["--backend", base, "--property", caught[0]["property"], "--dtype", dtype]
        words += ["--precision", precision or "ieee"] if dtype == "float32" else []
        words += ["--case", *dict.fromkeys(result["case"] for result in caught)]
        words += self.target.world(mutant)
        words += ["--device", self.target.place(mutant)]
        with TemporaryDirectory() as folder:
            done = self._verify(Path(folder), base, words)
        failed = {_check(row): str(row["reason"]) for row in done.rows if row["status"] == "fail"}
        # a run that did not finish clears no check
        rest = None if failed or done.code == 0 else done.last_line
        found = ((result["name"], failed.get(_check(result), rest)) for result in caught)
        return [(name, reason) for name, reason in found if reason is not None]


@dataclass(frozen=True, slots=True)
class Done:
    """A run of verify: its exit code, None if it ran past the deadline; its rows; the last line that it printed."""

    code: int | None
    rows: list[dict[str, Any]]
    last_line: str

    @property
    def first(self) -> dict[str, Any] | None:
        return next((row for row in self.rows if row["status"] == "fail"), None)


def _check(row: Any) -> tuple[str, str, str]:
    return row["case"], row["property"], row["dtype"]


def plant(patch: Patch, folder: Path, package: Path = PACKAGE) -> None:
    """Copy the package into a folder and apply a patch to the copy.

    Raises:
        PatchError: it does not fit.
    """
    text = patch.applied(package)
    copy = Path(shutil.copytree(package, folder / package.name))
    changed = copy / patch.file
    changed.write_text(text, encoding="utf-8")
    # bytecode of an old source with the same size and time stamp would be used for the new one
    for compiled in (changed.parent / "__pycache__").glob(f"{changed.stem}.*"):
        compiled.unlink()


def verdict(mutant: Mutant, base: str, done: Done) -> Result:
    """The result of a mutant: caught by a row that failed, or by verify's verdict on all rows."""
    problems = len({(row["dtype"], row["case"]) for row in done.rows if row["status"] in ("pass", "fail")})
    first = done.first
    if first is not None:
        status: Status = "broken" if _MISFIT.search(first["reason"]) else "caught"
        found = _result(mutant, base, status, reason=first["reason"], problems=problems)
        return {**found, **{key: first[key] for key in ("case", "property", "dtype")}}  # type: ignore[typeddict-item]
    if done.rows and done.code and problems:
        return _result(mutant, base, "caught", reason=done.last_line, problems=problems)
    if done.code is None:
        return _result(mutant, base, "missed", reason=done.last_line)
    if done.code < 0:
        return _result(mutant, base, "missed", reason=f"verify was killed by signal {-done.code}")
    if done.code > 0:
        return _result(mutant, base, "broken", reason=done.last_line)
    reason = "verify passed" if done.rows else "verify exited with code 0 and no verdict"
    return _result(mutant, base, "missed", reason=reason, problems=problems)


def _result(mutant: Mutant, base: str, status: Status, *, reason: str, problems: int = 0) -> Result:
    return Result(
        name=mutant.name,
        about=mutant.about,
        backend=base,
        status=status,
        case="",
        property="",
        dtype="",
        reason=reason,
        problems=problems,
        seconds=0.0,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a run and every process that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
