"""The environment of a measurement: versions, processor, threads, BLAS, device, date and commit."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from contrastile.backends.registry import installed_version


def environment() -> dict[str, Any]:
    """The facts in every JSON report; None for a package that is not installed."""
    return {
        "contrastile": installed_version("contrastile"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": installed_version("torch"),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _processor(),
        # the cores that this process may use
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def measurement_environment(device: str = "cpu") -> dict[str, Any]:
    """``environment`` and the facts that times depend on; torch's facts only if torch can be imported."""
    facts: dict[str, Any] = {**environment(), "numpy_blas": _numpy_blas(), "device": device}
    try:
        import torch
    except (ImportError, OSError):
        return facts
    blas = re.search(r"\bBLAS_INFO=(\w+)", torch.__config__.show())
    facts |= {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_blas": blas.group(1) if blas else "unknown",
    }
    if device == "cuda" and torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
    return facts


def torch_gpus() -> int:
    """The number of GPUs that torch sees; 0 if torch is missing or broken."""
    try:
        import torch
    except (ImportError, OSError):
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


NVIDIA = ("triton", "cupy")
"""Backends, and their packages, that need an NVIDIA GPU."""


def has_a_gpu() -> bool:
    """Whether this machine has an NVIDIA driver, and so a GPU."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def finds_a_gpu() -> bool:
    """Whether torch or CuPy can use a GPU here."""
    if torch_gpus():
        return True
    if importlib.util.find_spec("cupy") is None:
        return False
    from contrastile.backends.cupy.devices import gpus

    return bool(gpus())


def available_bytes(device: str) -> int | None:
    """Bytes available to new allocations; None if unknown."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def version(module: str) -> str | None:
    """The version of the distribution that provides a module; None if the module is not found.

    The module is not imported.
    """
    if importlib.util.find_spec(module) is None:
        return None
    distributions = importlib.metadata.packages_distributions().get(module)
    return importlib.metadata.version(distributions[0]) if distributions else "of unknown version"


def _numpy_blas() -> str:
    """The BLAS that NumPy was built with, and its version."""
    build_config = np.show_config(mode="dicts")
    blas = build_config.get("Build Dependencies", {}).get("blas", {}) if isinstance(build_config, dict) else {}
    return " ".join(str(blas[key]) for key in ("name", "version") if blas.get(key)) or "unknown"


def _processor() -> str:
    """The processor's name, or its architecture if the name is unknown."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@cache
def _commit() -> str | None:
    """The git commit that this package's files are checked out from, or None."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
