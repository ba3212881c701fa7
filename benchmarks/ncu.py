"""Counts the kernels of one step on a GPU by ncu: launches, time, bytes, and how busy the tensor cores are.

``python benchmarks/ncu.py --backend triton --batch 32768 --dim 512``. The clocks are left as they are, and one call
is profiled, after three that compile and warm up. ncu must be on the path.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

# few enough for one pass of each launch, which then runs as it does in the step, caches included
METRICS = {
    "us": "gpu__time_duration.sum",
    "tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
}
NCU = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
NCU += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS.values())]


def step(given: argparse.Namespace) -> None:
    """Run one step between the profiler's start and stop."""
    import torch
    from everyday import Case, inputs
    from harness.ranks import Ranks

    from contrastile import clip_loss

    case = Case("clip_loss", given.dtype, given.batch, given.dim, scale=given.scale)
    leaves, _ = inputs(case, Ranks.join("cuda"), 1)
    cuda: Any = torch.cuda
    for turn in range(4):
        torch.cuda.synchronize()
        if turn == 3:
            cuda.cudart().cudaProfilerStart()
        torch.autograd.grad(clip_loss(*leaves, backend=given.backend), leaves)
        torch.cuda.synchronize()
    cuda.cudart().cudaProfilerStop()


def rows_of(text: str) -> list[dict[str, Any]]:
    """A row for each kernel of what ncu printed, the longest first."""
    found: dict[str, dict[str, Any]] = {}
    for line in csv.DictReader(line for line in text.splitlines() if line.startswith('"')):
        # the second line holds the units
        if not line["ID"]:
            continue
        name = re.split(r"[<(]", line["Kernel Name"].removeprefix("void "), maxsplit=1)[0].strip()
        one = {key: float(line[metric].replace(",", "")) for key, metric in METRICS.items()}
        total = found.setdefault(name, dict.fromkeys(METRICS, 0.0) | {"kernel": name, "launches": 0})
        total["launches"] += 1
        for key, value in one.items():
            # a share of cycles is averaged over time; times are given in ns
            total[key] += value * one["us"] if key == "tensor" else value
    for total in found.values():
        total["tensor"] /= total["us"] or 1.0
        total["us"] /= 1e3
    return sorted(found.values(), key=lambda row: -row["us"])


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 1 where ncu gave no figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--backend", default="triton")
    add("--batch", type=int, default=32768)
    add("--dim", type=int, default=512)
    add("--dtype", default="bfloat16")
    add("--scale", type=float, default=100.0)
    add("--json", type=Path, metavar="FILE")
    add("--step", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.step:
        step(given)
        return 0
    command = [*NCU, sys.executable, __file__, "--step", *(arguments or sys.argv[1:])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    rows = rows_of(done.stdout)
    if not rows:
        print(f"benchmarks/ncu.py: ncu gave no figures: {(done.stderr or done.stdout)[-500:]}", file=sys.stderr)
        return 1
    for row in rows:
        told = f"{row['launches']:4} {row['us']:10.1f} us {row['tensor']:5.1f} % tensor cores"
        print(f"{told} {(row['read'] + row['written']) / 2**20:10.1f} MiB  {row['kernel']}")
    if given.json is not None:
        given.json.write_text(json.dumps(vars(given) | {"json": None, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
