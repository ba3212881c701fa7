"""Records: what was measured on what machine, as JSON that is written again after every measurement."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from contrastile.backends.registry import installed_version
from contrastile.environment import measurement_environment
from contrastile.reporting import one_line
from harness.ranks import Ranks

PACKAGES = ("triton", "cupy-cuda13x", "inf-cl", "cut-cross-entropy", "liger-kernel", "quack-kernels", "open-clip-torch")
_FIXED = ("driver_version", "power.limit", "clocks.max.sm", "memory.total")


def facts(ranks: Ranks, commit: str | None, packages: Iterable[str] = ()) -> dict[str, Any]:
    """What the numbers were measured on: machine, versions, and the commit (as given where there is no checkout)."""
    found = measurement_environment(ranks.kind)
    found["commit"] = commit or found["commit"]
    found |= {name: installed_version(name) for name in (*PACKAGES, *packages)}
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


def _nvidia_smi(*arguments: str) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60, check=False)
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


def write(path: Path | None, data: dict[str, Any]) -> None:
    """JSON with one row a line, so that changes can be read; floats keep six digits. None writes nothing."""
    if path is None:
        return
    lines = []
    for name, value in rounded(data).items():
        if isinstance(value, list):
            rows = ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in value)
            lines.append(f" {json.dumps(name)}: [\n{rows}\n ]" if value else f" {json.dumps(name)}: []")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Numbers that JSON lacks become null; floats keep six digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def said(error: BaseException) -> str:
    """An error in one line, the reason of what was skipped."""
    return one_line(error)[:200]
