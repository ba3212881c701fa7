"""``contrastile doctor``: what is available here, what is missing, and the command that mends it.

Packages are looked for, not imported, except those that a backend needs: each available backend computes a small loss
and is held to the oracle. One that breaks on import is reported as broken and stops nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from contrastile.backends.contract import BackendUnavailableError
from contrastile.backends.cupy.devices import gpus
from contrastile.backends.registry import Known, available, known
from contrastile.bench import agreement, peers
from contrastile.bench.display import show_table
from contrastile.bench.environment import environment, version
from contrastile.verify.files import why_not_writable

State = Literal["ok", "missing", "broken", "wrong"]

EXTRAS = {
    "torch": ("torch", "torch tensors, autograd, contrastile.nn, the fast backends"),
    "triton": ("triton", "fused GPU kernels"),
    "cupy": ("cupy", "CUDA C++ kernels without torch"),
    "mpi4py": ("mpi", "many processes over MPI"),
    "hypothesis": ("verify", "drawn problems in contrastile verify"),
    "rich": ("verify", "tables and progress bars"),
    "matplotlib": ("verify", "contrastile bench --plot"),
}
"""Optional packages: the extra that brings each, and what it is for."""

SCALE = 100.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        kind: "backend", "package" or "gpu".
        name: of the backend, package or device.
        state: "ok"; "missing", not installed; "broken", does not load or run; "wrong", disagrees with the oracle.
        detail: version, error / bound and time, or what went wrong.
        mend: what mends it, or "".
    """

    kind: str
    name: str
    state: State
    detail: str
    mend: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to a parser."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")


def main(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0 when at least one backend computes what the oracle computes, else 1; 2 when it was interrupted or its file
        cannot be written. A missing optional package is no failure.
    """
    reason = why_not_writable(args.json)
    if reason is not None:
        return _cannot(reason)
    facts = environment()
    findings: list[Finding] = []
    try:
        for finding in examine():
            findings.append(finding)
    except KeyboardInterrupt:
        reason = "interrupted; this is what was found until then"
    works = any(each.kind == "backend" and each.state == "ok" for each in findings)
    show(facts, findings, works, whole=reason is None)
    if args.json:
        report = {
            "verdict": "interrupted" if reason else "pass" if works else "fail",
            "environment": facts,
            "findings": [asdict(each) for each in findings],
        }
        try:
            args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            reason = f"cannot write {args.json}: {error.strerror}"
    return _cannot(reason) if reason else 0 if works else 1


def _cannot(reason: str) -> int:
    sys.stdout.flush()
    print(f"contrastile doctor: {reason}", file=sys.stderr)
    return 2


def examine() -> Iterator[Finding]:
    """Every known backend, every optional package, and every GPU that torch sees, one after the other."""
    lacking = available()
    for name, entry in known().items():
        yield _backend(name, entry, lacking.get(name))
    yield from map(_package, EXTRAS)
    yield from _gpus()


def show(facts: dict[str, Any], findings: list[Finding], works: bool, *, whole: bool = True) -> None:
    """Prints the environment, the findings and, of the whole of them, the verdict."""
    show_table("Environment", ("fact", "value"), [(name, str(value)) for name, value in facts.items()])
    rows = [(each.kind, each.name, each.state, each.detail, each.mend) for each in findings]
    show_table("Findings", ("what", "name", "state", "detail", "to mend it"), rows)
    good = [each.name for each in findings if each.kind == "backend" and each.state == "ok"]
    if works or whole:
        print(f"works here: {', '.join(good)}" if works else "no backend works here")


def _backend(name: str, entry: Known, missing: str | None) -> Finding:
    """Loads a backend and holds a small loss and its gradients to the oracle."""
    if missing is not None:
        return Finding("backend", name, "missing", missing.partition("; run:")[0], entry.install)
    try:
        implementation = peers.ours(name)
        device, dtype = _place(implementation)
        if device == "cuda" and implementation.library == "torch" and not _has_gpu():
            return Finding("backend", name, "missing", "runs on cuda, and torch sees no GPU here", _GPU_MEND)
        start = time.perf_counter()
        found = agreement.check(implementation, dtype, device, SCALE, rows=agreement.FEW_ROWS)
        taken = time.perf_counter() - start
    except BackendUnavailableError as error:
        # its packages are there: what is missing is what the message says, and so is what mends it
        detail, _, mend = str(error).partition(" is not available: ")[2].partition("; ")
        state: State = "missing" if error.__cause__ is None else "broken"
        return Finding("backend", name, state, detail, mend)
    except (Exception, SystemExit) as error:  # other people's code may raise anything, and the report must go on
        return Finding("backend", name, "broken", f"{type(error).__name__}: {error}", entry.install)
    if found.ratio is None:
        return Finding("backend", name, "broken", found.reason, entry.install)
    detail = f"{dtype} on {device}: {found.ratio:.2g} x its bound from the oracle, {taken:.2f} s"
    if found.agrees:
        return Finding("backend", name, "ok", detail)
    return Finding("backend", name, "wrong", f"{detail}; {found.reason}", f"contrastile verify --backend {name}")


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
        return Finding("package", name, "missing", purpose, f"pip install 'contrastile[{extra}]'")
    return Finding("package", name, "ok", f"{found}: {purpose}")


_GPU_MEND = "on a machine with an NVIDIA GPU: install a CUDA build of torch"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpus() -> list[Finding]:
    """The GPUs that torch sees, or CuPy where there is no torch; or that there is one which torch does not see."""
    if find_spec("torch") is None and find_spec("cupy") is not None:
        try:
            return [Finding("gpu", gpu, "ok", f"{size / 2**30:.0f} GiB") for gpu, size in gpus()]
        except (ImportError, OSError):
            return []
    try:
        import torch

        count = torch.cuda.device_count() if _has_gpu() else 0
    except (ImportError, OSError):
        return []
    if not count and shutil.which("nvidia-smi"):
        detail = f"a driver is installed, but torch {torch.__version__} sees no GPU"
        return [Finding("gpu", "NVIDIA", "missing", detail, _GPU_MEND)]
    devices = (torch.cuda.get_device_properties(i) for i in range(count))
    return [Finding("gpu", each.name, "ok", f"{each.total_memory / 2**30:.0f} GiB") for each in devices]
