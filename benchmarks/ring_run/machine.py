"""The machine: its GPUs, how they are linked, versions, and what was set for the messages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from typing import Any

import torch
from gpu_run import machine

from ring_run.ranks import Ranks


def file_name(device: str, size: int) -> str:
    """``ring_<device>_x<ranks>.json``, the device's name in small letters and underscores."""
    return f"ring_{re.sub('[^a-z0-9]+', '_', device.lower()).strip('_')}_x{size}.json"


def facts(ranks: Ranks, commit: str | None) -> dict[str, Any]:
    """What the numbers were measured on; the same on all ranks but for what only rank 0 asks."""
    found: dict[str, Any] = {"ranks": ranks.size, "devices": ranks.share(_device(ranks))}
    if ranks.rank == 0:
        found = machine.facts(ranks.kind, commit) | found
    else:
        found["device"] = found["devices"][0]
    if ranks.kind == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        seen = [other for other in range(torch.cuda.device_count()) if other != ranks.device.index]
        reach = [torch.cuda.can_device_access_peer(ranks.device.index, other) for other in seen]
        found["peer_access"] = all(all(each) for each in ranks.share(reach))
        found["links"] = links() if ranks.rank == 0 else ""
        found["environment"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "TORCH_NCCL_"))}
    return found


def _device(ranks: Ranks) -> str:
    return torch.cuda.get_device_name(ranks.device) if ranks.kind == "cuda" else "cpu"


def links() -> str:
    """How the GPUs are linked, in nvidia-smi's words: each kind of link and how many pairs have it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "not known"
    try:
        done = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "not known"
    return linked(done.stdout)


def linked(table: str) -> str:
    """``nvidia-smi topo -m`` in words: "NV18 between all 6 pairs", or each kind of link and its pairs."""
    rows = [
        line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines() if re.match(r"\s*GPU\d+\s", line)
    ]
    rows = [row for row in rows if row[1:] and not row[1].startswith("GPU")]
    names = [row[0] for row in rows]
    kinds = Counter(rows[i][1 + j] for i in range(len(names)) for j in range(i))
    if not kinds:
        return "not known"
    if len(kinds) == 1:
        return f"{next(iter(kinds))} between all {kinds.total()} pairs"
    return ", ".join(f"{kind} between {count} pairs" for kind, count in kinds.items())
