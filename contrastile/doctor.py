"""``contrastile doctor``: what is available here, what is missing, and the command that installs or repairs it.

Optional packages are looked for and not imported, except those that a backend needs: each available backend computes a
small loss, and its result is compared with the oracle's. A backend that breaks on import is reported as broken; the
report goes on. Packages that need an NVIDIA GPU are recommended only where there is one.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from contrastile.backends import choice
from contrastile.backends.contract import BackendUnavailableError
from contrastile.backends.cupy.devices import gpus
from contrastile.backends.registry import Known, available, known
from contrastile.bench import agreement, peers
from contrastile.environment import measurement_environment, torch_sees_a_gpu, version
from contrastile.reporting import CannotRunError, cannot_run, colored, show_table, why_not_writable, write_json

State = Literal["ok", "missing", "broken", "wrong"]

EXTRAS = {
    "torch": ("torch", "torch tensors, autograd, contrastile.nn"),
    "triton": ("triton", "fused GPU kernels"),
    "cupy": ("cupy", "CUDA C++ kernels without torch"),
    "mpi4py": ("mpi", "many processes over MPI"),
    "pytest": ("verify", "the checks of contrastile verify"),
    "xdist": ("verify", "the processes of contrastile verify (pytest-xdist)"),
    "rich": ("verify", "tables and progress bars"),
    "matplotlib": ("verify", "contrastile bench --plot"),
}
"""Optional packages: the extra that brings each, and what it is for."""

SCALE = 100.0

_LOSSES = {
    choice.SOFTMAX: "clip_loss, info_nce",
    choice.SYMMETRIC: "nt_xent, sup_con",
    choice.SIGMOID: "sigmoid_loss",
    choice.RANKS: "any loss with a group",
}

_NVIDIA = ("triton", "cupy")
"""Backends, and packages, that are of use with an NVIDIA GPU alone."""

_STYLES = {"ok": "green", "missing": "yellow", "broken": "bold red", "wrong": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        kind: "backend", "auto", "package" or "gpu".
        name: of the backend, package or device; of "auto", whose choice it is.
        state: "ok"; "missing", not installed; "broken", does not load or run; "wrong", disagrees with the oracle.
        detail: version, error / bound and time, or what went wrong.
        remedy: the command or action that helps, or "".
    """

    kind: str
    name: str
    state: State
    detail: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``contrastile doctor``."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")


def main(args: argparse.Namespace) -> int:
    """Run ``contrastile doctor``.

    Returns:
        0 when at least one backend agrees with the oracle, else 1; 2 when it was interrupted or its file cannot be
        written. A missing optional package is no failure.
    """
    reason = why_not_writable(args.json)
    if reason is not None:
        return cannot_run("doctor", reason)
    facts = measurement_environment("cuda" if _torch_gpus() else "cpu")
    findings: list[Finding] = []
    try:
        for finding in examine():
            findings.append(finding)
    except KeyboardInterrupt:
        reason = "interrupted; this is what was found until then"
    works = any(each.kind == "backend" and each.state == "ok" for each in findings)
    show(facts, findings, works, complete=reason is None)
    if args.json:
        verdict = "interrupted" if reason else "pass" if works else "fail"
        try:
            write_json(args.json, {"verdict": verdict, "environment": facts, "findings": list(map(asdict, findings))})
        except CannotRunError as error:
            reason = str(error)
    return cannot_run("doctor", reason) if reason else 0 if works else 1


def examine() -> Iterator[Finding]:
    """Every known backend, what "auto" takes, every optional package, and every GPU that torch sees, in this order."""
    missing = available()
    for name, entry in known().items():
        yield _backend(name, entry, missing.get(name))
    yield from _choices()
    yield from map(_package, EXTRAS)
    yield from _gpus()


def show(facts: dict[str, Any], findings: list[Finding], works: bool, *, complete: bool = True) -> None:
    """Print the environment, the findings, and the verdict unless nothing works in an incomplete report."""
    known_facts = [(name, str(value)) for name, value in facts.items() if value is not None]
    show_table("Environment", ("fact", "value"), known_facts)
    for kind, title in (
        ("backend", "Backends"),
        ("auto", 'What "auto" takes'),
        ("package", "Packages"),
        ("gpu", "GPUs"),
    ):
        rows = [(each.name, each.state, each.detail) for each in findings if each.kind == kind]
        if rows:
            show_table(title, ("name", "state", "detail"), rows, style=lambda cell: _STYLES.get(cell, ""))
    remedies = dict.fromkeys(f"{each.name}: {each.remedy}" for each in findings if each.remedy)
    if remedies:
        print("to install or repair", *remedies, sep="\n  ", end="\n\n")
    good = [each.name for each in findings if each.kind == "backend" and each.state == "ok"]
    if works or complete:
        print(colored("works here", "green") + f": {', '.join(good)}" if works else "no backend works here")


def _backend(name: str, entry: Known, missing: str | None) -> Finding:
    """Load a backend and compare a small loss and its gradients with the oracle's."""
    if missing is not None:
        detail, remedy = missing.partition("; run:")[0], entry.install
        if name in _NVIDIA and not _nvidia():
            detail, remedy = "needs an NVIDIA GPU, and none is found here", ""
        return Finding("backend", name, "missing", detail, remedy)
    try:
        implementation = peers.ours(name)
        device, dtype = _place(implementation)
        if device == "cuda" and implementation.library == "torch" and not torch_sees_a_gpu():
            return Finding("backend", name, "missing", "runs on cuda, and torch sees no GPU here", _cuda_torch())
        start = time.perf_counter()
        found = agreement.check(implementation, dtype, device, SCALE, rows=agreement.FEW_ROWS)
        taken = time.perf_counter() - start
    except BackendUnavailableError as error:
        # its packages are installed, so the message says what else is missing and what to do about it
        detail, _, remedy = str(error).partition(" is not available: ")[2].partition("; ")
        state: State = "missing" if error.__cause__ is None else "broken"
        return Finding("backend", name, state, detail, remedy)
    except (Exception, SystemExit) as error:  # a third-party backend may raise anything, and the report must go on
        return Finding("backend", name, "broken", f"{type(error).__name__}: {error}", entry.install)
    if found.ratio is None:
        return Finding("backend", name, "broken", found.reason, entry.install)
    detail = f"{dtype} on {device}: error {found.ratio:.2g} x its bound, {taken:.2f} s"
    if found.agrees:
        return Finding("backend", name, "ok", detail)
    return Finding("backend", name, "wrong", f"{detail}; {found.reason}", f"contrastile verify --backend {name}")


def _choices() -> Iterator[Finding]:
    """What "auto" takes for torch tensors of the usual dtypes, on a GPU for each form of a loss; and why."""
    if find_spec("torch") is None:
        return
    try:
        place = "cuda" if torch_sees_a_gpu() else "cpu"
    except (ImportError, OSError):
        return
    for dtype in ("float32", "bfloat16"):
        taken: dict[choice.Choice, list[str]] = {}
        for form, losses in _LOSSES.items():
            taken.setdefault(choice.explained("torch", place, dtype, "auto", form), []).append(losses)
        for found, served in taken.items():
            name = f"{dtype} on {place}" + (f": {', '.join(served)}" if len(taken) > 1 else "")
            how = f" with precision={choice.auto_precision(found.name)!r}" if dtype == "float32" else ""
            yield Finding("auto", name, "ok", f"{found.name}{how} ({found.why})")


def _place(implementation: peers.Implementation) -> tuple[str, str]:
    """The first device and dtype that a backend takes: a GPU only where it refuses the CPU."""
    for device in ("cpu", "cuda"):
        for dtype in ("float32", "float16", "bfloat16", "float64"):
            if implementation.refuses(dtype, device) is None:
                return device, dtype
    return "cpu", "float32"


def _package(name: str) -> Finding:
    extra, purpose = EXTRAS[name]
    found = version(name)
    if found is None:
        remedy = "" if name in _NVIDIA and not _nvidia() else f"pip install 'contrastile[{extra}]'"
        return Finding("package", name, "missing", purpose, remedy)
    return Finding("package", name, "ok", f"{found}: {purpose}")


def _gpus() -> list[Finding]:
    """The GPUs that torch sees, or CuPy where there is no torch; or that torch sees none although there is a driver."""
    if find_spec("torch") is None and find_spec("cupy") is not None:
        try:
            return [Finding("gpu", gpu, "ok", f"{size / 2**30:.0f} GiB") for gpu, size in gpus()]
        except (ImportError, OSError):
            return []
    count = _torch_gpus()
    if not count:
        if not (_nvidia() and find_spec("torch")):
            return []
        return [Finding("gpu", "NVIDIA", "missing", "a driver is installed, but torch sees no GPU", _cuda_torch())]
    import torch

    devices = (torch.cuda.get_device_properties(i) for i in range(count))
    return [Finding("gpu", each.name, "ok", f"{each.total_memory / 2**30:.0f} GiB") for each in devices]


def _torch_gpus() -> int:
    """How many GPUs torch sees; 0 where it is missing or broken."""
    try:
        if not torch_sees_a_gpu():
            return 0
        import torch
    except (ImportError, OSError):
        return 0
    return torch.cuda.device_count()


def _nvidia() -> bool:
    """Whether this machine has an NVIDIA GPU: its driver is here."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def _cuda_torch() -> str:
    return "install a CUDA build of torch" if _nvidia() else ""
