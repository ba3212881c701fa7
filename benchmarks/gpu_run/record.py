"""The record of a run: one JSON file, written again after every measurement, so that what breaks off loses nothing."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = ("verify", "times", "errors", "checks", "big")


def file_name(device: str) -> str:
    """``gpu_<device>.json``, the device's name in small letters and underscores."""
    return f"gpu_{re.sub('[^a-z0-9]+', '_', device.lower()).strip('_')}.json"


class Record:
    """What was found so far.

    Attributes:
        path: where it is written.
        data: ``environment``, ``settings`` and one list for each of the parts.
    """

    def __init__(
        self,
        path: Path,
        environment: dict[str, Any],
        settings: dict[str, Any],
        *,
        resume: bool,
        parts: Sequence[str] = PARTS,
    ) -> None:
        self.path, self.started, self.seconds = path, time.monotonic(), float(settings["seconds"])
        self.data: dict[str, Any] = {part: [] for part in parts}
        if resume and path.exists():
            old = json.loads(path.read_text(encoding="utf-8"))
            same = ("device", "commit", "torch", "triton")
            if any(old["environment"].get(name) != environment.get(name) for name in same):
                raise ValueError(f"{path} is of another {', '.join(same)}; write elsewhere, or leave out --resume")
            self.data |= {part: old[part] for part in parts}
        self.data = {"environment": environment, "settings": settings} | self.data

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.seconds - (time.monotonic() - self.started)

    def add(self, part: str, row: dict[str, Any], key: tuple[str, ...]) -> None:
        """Add a row in place of one that agrees with it on ``key``, and write the file.

        A row that was skipped takes no measured one's place: the same call may be part of two comparisons.
        """
        others: list[dict[str, Any]] = []
        for old in self.data[part]:
            if any(old.get(name) != row.get(name) for name in key):
                others.append(old)
            elif row.get("status") == "skip" and old.get("status") == "measured":
                return
        self.data[part] = [*others, _plain(row)]
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


def _plain(value: Any) -> Any:
    """Numbers that JSON lacks become null; floats keep six digits."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
