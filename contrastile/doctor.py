"""``contrastile doctor``: what is available here, what is missing, and the command that installs or repairs it.

Optional packages are looked up without importing them, except those that a backend needs: each available backend
computes a small loss, which is compared with the oracle's. A backend that fails on import is reported as broken, and
the report continues. Packages that need an NVIDIA GPU are recommended only if there is one.
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
"""Optional packages: the extra that installs each, and its purpose."""

SCALE, CUDA_TORCH = 100.0, "install a CUDA build of torch"

_DTYPES = ("float32", "float16", "bfloat16", "float64")

_COLORS = {"ok": "green", "no device": "yellow", "missing": "yellow", "broken": "red", "wrong": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        kind: "backend", "auto" (a choice of backend="auto"), "package" or "gpu"; ``name`` is its name.
        state: "ok"; "no device", installed, but without the GPU that it needs; "missing", not installed; "broken", does
            not load or run; "wrong", disagrees with the oracle.
        detail: the version; error / bound and time; or what went wrong.
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
        CannotRunError: the file of ``--json`` cannot be written.
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
    """Examine every known backend, the choices of "auto", every optional package, and every GPU, in this order."""
    missing = available()
    for name, entry in known().items():
        yield _examine_backend(name, entry, missing.get(name))
    yield from _auto_choices()
    for name, (extra, purpose) in EXTRAS.items():
        release = version(name)
        if release and name == "mpi4py" and (reason := _why_no_mpi()):
            yield Finding("package", name, "broken", f"{release}: {reason}", "pip install mpich, or load an MPI module")
            continue
        remedy = "" if release or (name in NVIDIA and not has_a_gpu()) else f"pip install 'contrastile[{extra}]'"
        yield Finding(
            "package", name, "ok" if release else "missing", f"{release}: {purpose}" if release else purpose, remedy
        )
    yield from _gpus()


def show(facts: dict[str, Any], findings: list[Finding]) -> bool:
    """Print the environment, the findings and the verdict; return whether a backend works."""
    known_facts = [(name, str(value)) for name, value in facts.items() if value is not None]
    show_table("Environment", ("fact", "value"), known_facts)
    titles = {"backend": "Backends", "auto": 'What "auto" takes', "package": "Packages", "gpu": "GPUs"}
    for kind, title in titles.items():
        rows = [(finding.name, finding.state, finding.detail) for finding in findings if finding.kind == kind]
        if rows:
            show_table(title, ("name", "state", "detail"), rows, color=lambda cell: _COLORS.get(cell, ""))
    remedies = dict.fromkeys(f"{finding.name}: {finding.remedy}" for finding in findings if finding.remedy)
    if remedies:
        print("to install or repair", *remedies, sep="\n  ", end="\n\n")
    working = [finding.name for finding in findings if finding.kind == "backend" and finding.state == "ok"]
    print(f"{colored('works here', 'green')}: {', '.join(working)}" if working else "no backend works here")
    return bool(working)


def _examine_backend(name: str, entry: Known, missing: str | None) -> Finding:
    """Load a backend and compare a small loss and its gradients with the oracle's."""
    if missing is not None:
        detail, remedy = missing.partition("; run:")[0], entry.install
        if name in NVIDIA and not has_a_gpu():
            detail, remedy = "needs an NVIDIA GPU, and none is found here", ""
        return Finding("backend", name, "missing", detail, remedy)
    try:
        implementation = peers.ours(name)
        # use a GPU only if the backend refuses the CPU
        places = ((dtype, device) for device in ("cpu", "cuda") for dtype in _DTYPES)
        dtype, device = next(x for x in places if implementation.refuses(*x) is None)
        if device == "cuda" and implementation.library == "torch" and not torch_gpus():
            remedy = CUDA_TORCH if has_a_gpu() else ""
            return Finding("backend", name, "no device", "runs on cuda, and torch sees no GPU here", remedy)
        start = time.perf_counter()
        result = agreement.check(implementation, dtype, device, SCALE, rows=agreement.FEW_ROWS)
        seconds = time.perf_counter() - start
    except BackendUnavailableError as error:
        # the packages are installed, so the message names another cause and its remedy
        detail, _, remedy = str(error).partition(" is not available: ")[2].partition("; ")
        state: State = "no device" if error.__cause__ is None else "broken"
        return Finding("backend", name, state, detail, remedy)
    except (Exception, SystemExit) as error:  # a third-party backend may raise anything, and the report must continue
        return Finding("backend", name, "broken", f"{type(error).__name__}: {error}", entry.install)
    if result.ratio is None:
        return Finding("backend", name, "broken", result.reason, entry.install)
    detail = f"{dtype} on {device}: error {result.ratio:.2g} x its bound, {seconds:.2f} s"
    if result.agrees:
        return Finding("backend", name, "ok", detail)
    return Finding("backend", name, "wrong", f"{detail}; {result.reason}", f"contrastile verify --backend {name}")


def _auto_choices() -> Iterator[Finding]:
    """The backend that "auto" chooses for torch tensors of the usual dtypes, and why."""
    place = "cuda" if torch_gpus() else "cpu"
    if "torch" not in sys.modules:
        return
    for dtype in ("float32", "bfloat16"):
        chosen = choice.explained("torch", place, dtype, "auto")
        suffix = f" with precision={choice.auto_precision(chosen.name)!r}" if dtype == "float32" else ""
        yield Finding("auto", f"{dtype} on {place}", "ok", f"{chosen.name}{suffix} ({chosen.why})")


def _why_no_mpi() -> str:
    """Why mpi4py has no MPI library, or "". Without a library, importing it breaks e.g. Lightning's Trainer."""
    try:
        # this looks up the library, and does not initialise MPI
        find_spec("mpi4py.MPI")
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return ""


def _gpus() -> Iterator[Finding]:
    """The GPUs that torch sees, or CuPy without torch; else, if there is a driver, that torch sees no GPU."""
    try:
        if find_spec("torch") is None and find_spec("cupy") is not None:
            yield from (Finding("gpu", gpu, "ok", f"{size / 2**30:.0f} GiB") for gpu, size in gpus())
    except (ImportError, OSError):
        return
    count = torch_gpus()
    for i in range(count):
        import torch

        properties = torch.cuda.get_device_properties(i)
        yield Finding("gpu", properties.name, "ok", f"{properties.total_memory / 2**30:.0f} GiB")
    if not count and has_a_gpu() and find_spec("torch"):
        yield Finding("gpu", "NVIDIA", "missing", "a driver is installed, but torch sees no GPU", CUDA_TORCH)
