"""The record of a run: one JSON file, written again after every measurement, so that what breaks off loses nothing."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

from contrastile.reporting import one_line

PARTS = ("verify", "times", "big")
SAME = ("device", "commit", "torch", "triton")


def file_name(device: str, size: int = 1) -> str:
    """``gpu_<device>[_x<ranks>].json``, the device's name in small letters and underscores."""
    name = re.sub("[^a-z0-9]+", "_", device.lower()).strip("_")
    return f"gpu_{name}.json" if size == 1 else f"gpu_{name}_x{size}.json"


class Record:
    """What was found so far: ``environment``, ``settings`` and one list for each of PARTS.

    Args:
        path: where it is written; None on ranks that write nothing.
        environment: what it was measured on.
        settings: of the run.
        resume: keep what an earlier run of the same commit measured.

    Raises:
        ValueError: there is another run's record at ``path``.
    """

    def __init__(
        self, path: Path | None, environment: dict[str, Any], settings: dict[str, Any], *, resume: bool = False
    ) -> None:
        self.path, self.started, self.seconds = path, time.monotonic(), float(settings["seconds"])
        self.data: dict[str, Any] = {"environment": environment, "settings": settings} | {part: [] for part in PARTS}
        if path is not None and resume and path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            if any(old["environment"].get(name) != environment.get(name) for name in SAME):
                raise ValueError(f"{path} is of another {', '.join(SAME)}; write elsewhere, or leave out --resume")
            self.data |= {part: old.get(part, []) for part in PARTS}

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.seconds - (time.monotonic() - self.started)

    def add(self, part: str, row: dict[str, Any], key: tuple[str, ...]) -> None:
        """Add a row in place of one that agrees with it on ``key``, and write the file.

        A row that was skipped replaces no measured one.
        """
        others = []
        for old in self.data[part]:
            if any(old.get(name) != row.get(name) for name in key):
                others.append(old)
            elif row.get("status") == "skip" and old.get("status") == "measured":
                return
        self.data[part] = [*others, rounded(row)]
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(compact(self.data), encoding="utf-8")


def compact(data: dict[str, Any]) -> str:
    """JSON with one row a line, so that changes can be read."""
    lines = []
    for name, value in data.items():
        if isinstance(value, list):
            rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in value)
            lines.append(f" {json.dumps(name)}: [\n{rows}\n ]" if value else f" {json.dumps(name)}: []")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def said(error: BaseException) -> str:
    """An error in one line, the reason of what was skipped."""
    return one_line(error)[:200]


def rounded(value: Any) -> Any:
    """Numbers that JSON lacks become null; floats keep six digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
