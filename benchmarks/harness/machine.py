"""The machine: its facts and links, and clocks, power and temperature while something runs."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from contrastile.backends.registry import installed_version
from contrastile.environment import measurement_environment
from harness.ranks import Ranks

PACKAGES = ("triton", "cupy-cuda13x", "inf-cl", "cut-cross-entropy", "liger-kernel", "quack-kernels", "open-clip-torch")
READINGS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_FIXED = ("driver_version", "power.limit", "clocks.max.sm", "memory.total")


def facts(ranks: Ranks, commit: str | None) -> dict[str, Any]:
    """What the numbers were measured on: machine, versions, and the commit (as given where there is no checkout)."""
    found = measurement_environment(ranks.kind)
    found["commit"] = commit or found["commit"]
    found |= versions(PACKAGES)
    found["ranks"] = ranks.size
    if ranks.kind == "cuda":
        found["memory_bytes"] = torch.cuda.get_device_properties(ranks.device).total_memory
        query = ["-i", "0", f"--query-gpu={','.join(_FIXED)}", "--format=csv,noheader"]
        found |= dict(zip(_FIXED, (x.strip() for x in _nvidia_smi(*query).split(",")), strict=False))
    if ranks.kind == "cuda" and ranks.size > 1:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["links"] = linked(_nvidia_smi("topo", "-m"))
        found["environment"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "TORCH_NCCL_"))}
    return found


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """The versions of installed packages; None for one that is not installed."""
    return {name: installed_version(name) for name in names}


def _nvidia_smi(*arguments: str) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return "" if done.returncode else done.stdout


def linked(table: str) -> str:
    """``nvidia-smi topo -m`` in words: "NV18 between all 6 pairs", or each kind of link and its pairs."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines()
    rows = [line.split() for line in lines if re.match(r"\s*GPU\d+\s", line)]
    rows = [row for row in rows if row[1:] and not row[1].startswith("GPU")]
    kinds = Counter(rows[i][1 + j] for i in range(len(rows)) for j in range(i))
    if len(kinds) == 1:
        return f"{next(iter(kinds))} between all {kinds.total()} pairs"
    return ", ".join(f"{kind} between {count} pairs" for kind, count in kinds.items()) or "not known"


class Watch:
    """Reads clocks, power and temperature of the first GPU five times a second between ``with`` and its end."""

    def __init__(self, kind: str) -> None:
        self.tool = shutil.which("nvidia-smi") if kind == "cuda" else None
        self.readings: list[list[float]] = []

    def __enter__(self) -> Watch:
        if self.tool is not None:
            query = [f"--query-gpu={','.join(READINGS)}", "--format=csv,noheader,nounits", "-lms", "200"]
            self.process = subprocess.Popen([self.tool, "-i", "0", *query], stdout=subprocess.PIPE, text=True)
            self.reader = threading.Thread(target=self._read, daemon=True)
            self.reader.start()
        return self

    def _read(self) -> None:
        for line in self.process.stdout or ():
            try:
                self.readings.append([float(x) for x in line.split(",")])
            except ValueError:  # "[N/A]": this card does not tell
                continue

    def __exit__(self, *error: object) -> None:
        if self.tool is not None:
            self.process.terminate()
            self.process.wait()
            self.reader.join(timeout=5)

    def summary(self) -> dict[str, list[float]]:
        """Least, median and largest of each reading, by nvidia-smi's names (MHz, MHz, W, degrees Celsius)."""
        columns = zip(READINGS, zip(*self.readings, strict=True), strict=False)
        return {name: [min(x), statistics.median(x), max(x)] for name, x in columns}
