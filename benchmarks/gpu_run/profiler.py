"""NVIDIA's tools over the fused backend: what each kernel of a step does with the machine, and whether it is clean."""

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
from typing import Any

from gpu_run.step import MARK

STEPS = (
    "32768,512,100,bfloat16,ieee",
    "32768,512,14.3,bfloat16,ieee",
    "32768,512,400,bfloat16,ieee",
    "16384,512,100,float32,tf32",
    "16384,512,100,float32,split",
)
METRICS = {
    "ns": "gpu__time_duration.sum",
    "cycles": "sm__cycles_elapsed.max",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "special": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "l2_hit": "lts__t_sector_hit_rate.pct",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
}
SHARES = ("tensor", "special", "issue", "l2_hit")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# both paths, every kind of positives, several column blocks, the sigmoid loss
CASES = ("ragged", "large-logits", "labels", "self-excluded", "blocks", "sigmoid-ids")


def profile(steps: Sequence[str] = STEPS) -> list[dict[str, Any]]:
    """One row for each step and kernel: launches, nanoseconds, bytes, shares of the peaks weighted by time.

    Raises:
        RuntimeError: ncu gave no figures.
    """
    # the clocks are left as they are: the card may be another's next
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--metrics", ",".join(METRICS.values())]
    done = _run([*command, sys.executable, "-m", "gpu_run.step", *steps])
    found = rows_of(done.stdout, steps)
    if not found:
        raise RuntimeError(f"ncu gave no figures: {(done.stderr or done.stdout)[-500:]}")
    return found


def kernel_times(steps: Sequence[str] = STEPS) -> list[dict[str, Any]]:
    """One row for each step and kernel: launches and nanoseconds, by torch's own profiler, nothing replayed."""
    import torch

    from contrastile import clip_loss
    from gpu_run.reference import features

    found: dict[tuple[str, str], dict[str, Any]] = {}
    for step in steps:
        b, d, scale, dtype, precision = step.split(",")
        given = features(int(b), int(d), float(scale), "cuda", dtype)
        leaves = given.image, given.text, given.scale
        torch.autograd.grad(clip_loss(*leaves, backend="triton", precision=precision), leaves)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            torch.autograd.grad(clip_loss(*leaves, backend="triton", precision=precision), leaves)
            torch.cuda.synchronize()
        for event in seen.key_averages():
            name = kernel(event.key)
            total = found.setdefault((step, name), {"step": step, "kernel": name, "launches": 0, "ns": 0.0})
            total["launches"] += event.count
            total["ns"] += 1e3 * event.device_time_total
    return list(found.values())


def rows_of(text: str, steps: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of ``profile`` from what ncu printed."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    step, found = -1, {}
    for row in csv.DictReader(lines):
        # the second line holds the units
        if not row["ID"]:
            continue
        name = kernel(row["Kernel Name"])
        if name == MARK:
            step += 1
            continue
        one = {key: _value(row.get(metric, "")) for key, metric in METRICS.items()}
        total = found.setdefault((steps[step], name), dict.fromkeys(METRICS, 0.0) | {"launches": 0})
        total["launches"] += 1
        for key, value in one.items():
            total[key] += value * one["ns"] if key in SHARES else value
    for total in found.values():
        for key in SHARES:
            total[key] /= total["ns"] or 1.0
    return [{"step": where, "kernel": name, **total} for (where, name), total in found.items()]


def _value(text: str) -> float:
    """A figure of ncu's; 0 where it has none."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return 0.0


def kernel(name: str) -> str:
    """A kernel's short name: cuBLAS for its products, "other" for torch's own elementwise ones."""
    short = re.sub(r"^void |[<(].*", "", name)
    if short.startswith(("nvjet", "cutlass", "sm90_xmma", "ampere")):
        # the transposition is in the name: dQ = G K reads G as it lies
        return f"cuBLAS {short.rsplit('_', 1)[-1]}"
    return "torch" if "::" in short else short


def sanitize(tools: Iterable[str] = TOOLS) -> list[dict[str, Any]]:
    """One row for each tool of compute-sanitizer: whether a small verify is clean, and the tool's own last word."""

    def one(tool: str) -> dict[str, Any]:
        verify = ["-m", "contrastile", "verify", "--backend", "triton", "--device", "cuda", "--quiet"]
        verify += ["--case", *CASES, "--property", "value", "gradients"]
        # torch's pool would hide a step beyond one of its blocks
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = _run(["compute-sanitizer", "--tool", tool, sys.executable, *verify], alone)
        last = [line.strip("= ") for line in done.stdout.splitlines() if "SUMMARY" in line]
        verdict = [line for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
        clean = bool(last and re.search(r"SUMMARY: 0 (errors|hazards)", last[-1]) and verdict)
        return {
            "tool": tool,
            "clean": clean,
            "summary": last[-1] if last else done.stderr[-300:],
            "verify": verdict[-1] if verdict else "did not end",
            "first": [] if clean else [line for line in done.stdout.splitlines() if line.startswith("=====")][:40],
        }

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, tools))


def compile_times(steps: Sequence[str] = (STEPS[0], STEPS[3], STEPS[4])) -> list[dict[str, Any]]:
    """Seconds of a first call that compiles everything, of one that finds it on disk, and of a warm one."""
    found = []
    for step in steps:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "gpu_run.step", step]
            cold, kept = (json.loads(_run(command, {"TRITON_CACHE_DIR": folder}).stdout) for _ in range(2))
        found.append({"step": step, "compiled": cold["first"], "from_disk": kept["first"], "warm": kept["third"]})
    return found


def _run(command: list[str], more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    environment = os.environ | {"PYTHONPATH": path} | (more or {})
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
