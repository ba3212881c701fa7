"""The machine: its facts, its clocks and power while something runs, and what a call holds at its peak."""

from __future__ import annotations

import gc
import importlib.metadata
import shutil
import statistics
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from contrastile.environment import measurement_environment

PACKAGES = ("triton", "cupy-cuda13x", "inf-cl", "cut-cross-entropy", "liger-kernel", "quack-kernels")
READINGS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_FIXED = ("driver_version", "power.limit", "clocks.max.sm", "memory.total")


def facts(device: str, commit: str | None) -> dict[str, Any]:
    """What the numbers were measured on: machine, versions, and the commit (as given where there is no checkout)."""
    found = measurement_environment(device)
    found["commit"] = commit or found["commit"]
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"multiprocessors": properties.multi_processor_count, "memory_bytes": properties.total_memory}
        found |= _query(_FIXED)
    return found


def _query(names: tuple[str, ...]) -> dict[str, str]:
    """Readings of nvidia-smi for the first GPU, as it prints them; none where it is missing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, "-i", "0", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return {}
    return dict(zip(names, (x.strip() for x in done.stdout.split(",")), strict=False)) if not done.returncode else {}


class Watch:
    """Reads clocks, power and temperature five times a second between ``with`` and its end; ``summary`` has them."""

    def __init__(self, device: str) -> None:
        self.tool = shutil.which("nvidia-smi") if device == "cuda" else None
        self.readings: list[list[float]] = []

    def __enter__(self) -> Watch:
        if self.tool is not None:
            command = [self.tool, "-i", "0", f"--query-gpu={','.join(READINGS)}", "--format=csv,noheader,nounits"]
            self.process = subprocess.Popen([*command, "-lms", "200"], stdout=subprocess.PIPE, text=True)
            self.reader = threading.Thread(target=self._read, daemon=True)
            self.reader.start()
        return self

    def _read(self) -> None:
        for line in self.process.stdout or ():
            try:
                self.readings.append([float(x) for x in line.split(",")])
            except ValueError:  # "[N/A]": this card does not tell
                continue

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self.tool is not None:
            self.process.terminate()
            self.process.wait()
            self.reader.join(timeout=5)
            if not self.readings:
                values = _query(READINGS).values()
                self.readings = [] if "N/A" in "".join(values) else [[float(x.split()[0]) for x in values]]

    def summary(self) -> dict[str, list[float]]:
        """Least, median and largest of each reading, by nvidia-smi's names (MHz, MHz, W, degrees Celsius)."""
        columns = zip(READINGS, zip(*self.readings, strict=True), strict=False)
        return {name: [min(x), statistics.median(x), max(x)] for name, x in columns}


def blocks_at_peak(events: Iterable[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """(bytes, how many) of the blocks that are live when most bytes are, largest first.

    Args:
        events: (action, address, bytes) in order; "alloc" begins a block and "free_requested" ends it. What was live
            before the first event does not count.
    """
    live: dict[int, int] = {}
    now = most = 0
    at_peak: list[int] = []
    for action, address, size in events:
        if action == "alloc":
            live[address] = size
            now += size
            if now > most:
                most, at_peak = now, list(live.values())
        elif action == "free_requested":
            now -= live.pop(address, 0)
    return sorted(Counter(at_peak).items(), reverse=True)


def itemised(call: Callable[[], Any]) -> list[tuple[int, int]]:
    """``blocks_at_peak`` of one call, from the record that torch's CUDA allocator keeps; results stay live."""
    gc.collect()
    torch.cuda.synchronize()
    memory: Any = torch.cuda.memory
    memory._record_memory_history(context=None, max_entries=200_000)
    try:
        kept = call()
        torch.cuda.synchronize()
        traces = memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        memory._record_memory_history(enabled=None)
    del kept
    return blocks_at_peak((each["action"], each["addr"], each["size"]) for each in traces)
