"""What is profiled: backends, steps, and the names of kernels; each kernel's counters by ncu; times of first calls."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

MARK = "spin_kernel"
"""In the name of the kernel that stands before each step."""

BACKENDS = {
    "triton": "triton",
    "cupy": "cupy",
    "ampere": "cupy",
    "keeping": "cupy",
}
ENVIRONMENT = {"ampere": {"CONTRASTILE_CUPY_KERNELS": "sm80"}, "keeping": {"CONTRASTILE_KEEP_MIB": "2048"}}
"""What the front door calls each backend; ``ampere`` is cupy without Hopper's own kernels, ``keeping`` cupy with room
for all exponentials of these steps."""

_BFLOAT16 = tuple(f"32768,{d},{scale},bfloat16,ieee" for d, scale in ((512, 100), (512, 14.3), (512, 400), (1024, 100)))
STEPS = {
    "triton": (*_BFLOAT16, "16384,512,100,float32,tf32", "16384,512,100,float32,split"),
    "cupy": _BFLOAT16,
    "ampere": (_BFLOAT16[0], _BFLOAT16[2]),
    "keeping": (_BFLOAT16[0], *_BFLOAT16[2:]),
}
COMPILED = tuple(STEPS["triton"][i] for i in (0, 4, 5))
OTHERS = ("32768,512,10,bfloat16,ieee,sigmoid", "32768,512,100,bfloat16,ieee,ids", "16384,512,10,bfloat16,ieee,sup_con")
"""Steps of other losses, whose kernels have instances and helpers of their own."""

# few enough for one pass of each launch, which then runs as it does in the step, caches included
METRICS = {
    "ns": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "xu": "sm__inst_executed_pipe_xu.sum",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
}
SOURCES = Path(__file__).resolve().parents[2] / "contrastile" / "backends"


def profile(backend: str, steps: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One row for each step and kernel: launches, nanoseconds, cycles, bytes, and the tensor cores' share by time.

    Raises:
        RuntimeError: ncu gave no figures.
    """
    steps = steps or STEPS[backend]
    # the clocks are left as they are: the card may be another's next
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    command += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS.values())]
    done = run([*command, sys.executable, "-m", "gpu_run.step", backend, *steps])
    found = rows_of(done.stdout, backend, steps)
    if not found:
        raise RuntimeError(f"ncu gave no figures: {(done.stderr or done.stdout)[-500:]}")
    return found


def rows_of(text: str, backend: str, steps: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of ``profile`` from what ncu printed."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    passes = {x: int(count) for x, count in re.findall(r'^==PROF== .*" - (\d+): .* (\d+) pass', text, re.MULTILINE)}
    step, found = -1, {}
    for row in csv.DictReader(lines):
        # the second line holds the units
        if not row["ID"]:
            continue
        if MARK in row["Kernel Name"]:
            step += 1
            continue
        name = kernel(row["Kernel Name"])
        one = {key: _value(row.get(metric, "")) for key, metric in METRICS.items()}
        total = found.setdefault((steps[step], name), dict.fromkeys(METRICS, 0.0) | {"launches": 0, "passes": 0})
        total["launches"] += 1
        total["passes"] = max(total["passes"], passes.get(row["ID"], 1))
        for key, value in one.items():
            total[key] += value * one["ns"] if key == "tensor" else value
    for total in found.values():
        total["tensor"] /= total["ns"] or 1.0
    return [{"backend": backend, "step": where, "kernel": name, **total} for (where, name), total in found.items()]


def _value(text: str) -> float:
    """A figure of ncu's; 0 where it has none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


@cache
def own_kernels() -> frozenset[str]:
    """Names of the kernels of this package, from its sources."""
    patterns = {"triton/*.py": r"@triton\.jit.*?\ndef (\w+)", "cupy/cuda/*.cu": r"__global__[^;{]*?(\w+)\(const __grid"}
    texts = ((path.read_text(encoding="utf-8"), where) for where in patterns for path in SOURCES.glob(where))
    return frozenset(name for text, where in texts for name in re.findall(patterns[where], text, re.DOTALL))


def kernel(name: str) -> str:
    """A kernel's short name: our own as their sources have it, cuBLAS with its transpositions, torch and CuPy at large.

    The transpositions tell the products apart: dQ = G K reads G as it lies (NN), dK = G^T Q transposed (NT).
    """
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    short = re.split(r"[<(]", plain, maxsplit=1)[0].strip().rsplit("::", 1)[-1]
    if short in own_kernels():
        return short
    if re.search("nvjet|cutlass|xmma|gemm|cublas", name, re.IGNORECASE):
        transposed = re.search(r"_([nt]{2})[nt]?(?:_align|[_>(]|$)", name, re.IGNORECASE)
        return f"cuBLAS {transposed[1].upper()}" if transposed else "cuBLAS"
    for owner, sign in (("torch", "at::"), ("CuPy", "cupy")):
        if sign in name:
            return owner
    return short or "unnamed"


def compile_times(steps: Iterable[str] = COMPILED) -> list[dict[str, Any]]:
    """Seconds of a first call that compiles all of Triton's kernels, of one that finds them on disk, of a warm one."""

    def one(step: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "gpu_run.step", "triton", step]
            told = [run(command, {"TRITON_CACHE_DIR": folder}).stdout for _ in range(2)]
        cold, kept = (json.loads(text.splitlines()[0]) for text in told)
        return {"step": step, "compiled": cold["first"], "from_disk": kept["first"], "warm": kept["third"]}

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, steps))


def run(
    command: Sequence[str], more: dict[str, str] | None = None, seconds: float = 500
) -> subprocess.CompletedProcess[str]:
    """Run a command that finds what this process finds.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``seconds``.
    """
    path = os.pathsep.join(p for p in sys.path if p)
    environment = os.environ | {"PYTHONPATH": path} | (more or {})
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
