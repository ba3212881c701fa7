"""``contrastile doctor``: what is available here, what is missing, and the command that installs or repairs it.

Optional packages are looked for and not imported, except those that a backend needs: each available backend computes a
small loss, and its result is compared with the oracle's. A backend that breaks on import is reported as broken; the
report goes on. Packages that need an NVIDIA GPU are recommended only where there is one.
"""

from __future__ import annotations

import argparse
import sys
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
from contrastile.environment import NVIDIA, has_a_gpu, measurement_environment, torch_gpus, version
from contrastile.reporting import CannotRunError, colored, show_table, why_not_writable, write_json

State = Literal["ok", "no device", "missing", "broken", "wrong"]

EXTRAS = {
    "torch": ("torch", "torch tensors, autograd, contrastile.nn"),
    "triton": ("triton", "fused GPU kernels"),
    "cupy": ("cupy", "CUDA C++ kernels without torch"),
    "mpi4py": ("mpi", "many processes over MPI"),
    "pytest": ("verify", "the checks of contrastile verify"),
    "xdist": ("verify", "the processes of contrastile verify (pytest-xdist)"),
    "hypothesis": ("verify", "drawn problems in contrastile verify"),
    "rich": ("verify", "tables and progress bars"),
    "matplotlib": ("verify", "contrastile bench --plot"),
}
"""Optional packages: the extra that brings each, and what it is for."""

SCALE, CUDA_TORCH = 100.0, "install a CUDA build of torch"

_DTYPES = ("float32", "float16", "bfloat16", "float64")

_STYLES = {"ok": "green", "no device": "yellow", "missing": "yellow", "broken": "bold red", "wrong": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        kind: "backend", "auto", whose choice it is, "package" or "gpu"; and its name.
        state: "ok"; "no device", installed without the GPU that it needs; "missing", not installed; "broken", does not
            load or run; "wrong", disagrees with the oracle.
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
        0 when at least one backend agrees with the oracle, else 1. A missing optional package is no failure.

    Raises:
        CannotRunError: its file cannot be written.
    """
    if reason := why_not_writable(args.json):
        raise CannotRunError(reason)
    facts = measurement_environment("cuda" if torch_gpus() else "cpu")
    findings = list(examine())
    works = show(facts, findings)
    if args.json:
        verdict = "pass" if works else "fail"
        write_json(args.json, {"verdict": verdict, "environment": facts, "findings": list(map(asdict, findings))})
    return 0 if works else 1


def examine() -> Iterator[Finding]:
    """Every known backend, what "auto" takes, every optional package, and every GPU that torch sees, in this order."""
    missing = available()
    for name, entry in known().items():
        yield _backend(name, entry, missing.get(name))
    yield from _choices()
    for name, (extra, purpose) in EXTRAS.items():
        found = version(name)
        if found and name == "mpi4py" and (reason := _without_mpi()):
            yield Finding("package", name, "broken", f"{found}: {reason}", "pip install mpich, or load an MPI module")
            continue
        remedy = "" if found or (name in NVIDIA and not has_a_gpu()) else f"pip install 'contrastile[{extra}]'"
        yield Finding(
            "package", name, "ok" if found else "missing", f"{found}: {purpose}" if found else purpose, remedy
        )
    yield from _gpus()


def show(facts: dict[str, Any], findings: list[Finding]) -> bool:
    """Print the environment, the findings and the verdict: whether a backend works."""
    known_facts = [(name, str(value)) for name, value in facts.items() if value is not None]
    show_table("Environment", ("fact", "value"), known_facts)
    titles = {"backend": "Backends", "auto": 'What "auto" takes', "package": "Packages", "gpu": "GPUs"}
    for kind, title in titles.items():
        rows = [(each.name, each.state, each.detail) for each in findings if each.kind == kind]
        if rows:
            show_table(title, ("name", "state", "detail"), rows, style=lambda cell: _STYLES.get(cell, ""))
    remedies = dict.fromkeys(f"{each.name}: {each.remedy}" for each in findings if each.remedy)
    if remedies:
        print("to install or repair", *remedies, sep="\n  ", end="\n\n")
    good = [each.name for each in findings if each.kind == "backend" and each.state == "ok"]
    print(f"{colored('works here', 'green')}: {', '.join(good)}" if good else "no backend works here")
    return bool(good)


def _backend(name: str, entry: Known, missing: str | None) -> Finding:
    """Load a backend and compare a small loss and its gradients with the oracle's."""
    if missing is not None:
        detail, remedy = missing.partition("; run:")[0], entry.install
        if name in NVIDIA and not has_a_gpu():
            detail, remedy = "needs an NVIDIA GPU, and none is found here", ""
        return Finding("backend", name, "missing", detail, remedy)
    try:
        implementation = peers.ours(name)
        # a GPU only where it refuses the CPU
        places = ((dtype, device) for device in ("cpu", "cuda") for dtype in _DTYPES)
        dtype, device = next(x for x in places if implementation.refuses(*x) is None)
        if device == "cuda" and implementation.library == "torch" and not torch_gpus():
            remedy = CUDA_TORCH if has_a_gpu() else ""
            return Finding("backend", name, "no device", "runs on cuda, and torch sees no GPU here", remedy)
        start = time.perf_counter()
        found = agreement.check(implementation, dtype, device, SCALE, rows=agreement.FEW_ROWS)
        taken = time.perf_counter() - start
    except BackendUnavailableError as error:
        # its packages are installed, so the message says what else is missing and what to do about it
        detail, _, remedy = str(error).partition(" is not available: ")[2].partition("; ")
        state: State = "no device" if error.__cause__ is None else "broken"
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
    """What "auto" takes for torch tensors of the usual dtypes, and why."""
    place = "cuda" if torch_gpus() else "cpu"
    if "torch" not in sys.modules:
        return
    for dtype in ("float32", "bfloat16"):
        found = choice.explained("torch", place, dtype, "auto")
        how = f" with precision={choice.auto_precision(found.name)!r}" if dtype == "float32" else ""
        yield Finding("auto", f"{dtype} on {place}", "ok", f"{found.name}{how} ({found.why})")


def _without_mpi() -> str:
    """Why mpi4py has no MPI library, or "". Without one it breaks what asks for it, such as Lightning's Trainer."""
    try:
        # looks for the library, and does not initialise MPI
        find_spec("mpi4py.MPI")
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return ""


def _gpus() -> Iterator[Finding]:
    """The GPUs that torch sees, or CuPy where there is no torch; or that torch sees none although there is a driver."""
    try:
        if find_spec("torch") is None and find_spec("cupy") is not None:
            yield from (Finding("gpu", gpu, "ok", f"{size / 2**30:.0f} GiB") for gpu, size in gpus())
    except (ImportError, OSError):
        return
    count = torch_gpus()
    for i in range(count):
        import torch

        each = torch.cuda.get_device_properties(i)
        yield Finding("gpu", each.name, "ok", f"{each.total_memory / 2**30:.0f} GiB")
    if not count and has_a_gpu() and find_spec("torch"):
        yield Finding("gpu", "NVIDIA", "missing", "a driver is installed, but torch sees no GPU", CUDA_TORCH)
