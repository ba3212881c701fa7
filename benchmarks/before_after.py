"""Times steps of two checkouts of the package in turn, on one device, in one run: what did a change cost?

``python benchmarks/before_after.py --before DIR`` holds DIR, another checkout, beside this one. Each has a process of
its own; the two take turns, sample by sample, so that both see the same clocks. A step is ``clip_loss`` forward and
backward, eager, host time included. Printed are the medians in ms and the median of the ratios after / before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def serve() -> None:
    """The process of one checkout: a line with a step in, a line with the milliseconds of one out."""
    import torch

    steps: dict[str, Any] = {}
    for line in sys.stdin:
        what = json.loads(line)
        if line not in steps:
            steps = {line: step(**what)}
        run, wait = steps[line], torch.cuda.synchronize if what["device"] == "cuda" else lambda: None
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < what["seconds"]:
            run()
            count += 1
            if count % 8 == 0:
                # few enough steps between that the queue never runs dry
                wait()
        wait()
        print(json.dumps(1e3 * (time.perf_counter() - begin) / count), flush=True)


def step(backend: str, batch: int, dim: int, dtype: str, pairs: str, scale: float, device: str, **_: Any) -> Any:
    """One step, warmed up."""
    import torch

    import contrastile

    generator = torch.Generator().manual_seed(0)
    image, text = (torch.randn(batch, dim, generator=generator) for _ in range(2))
    drawn = image, image + text / 2 if pairs == "certain" else text
    features = [torch.nn.functional.normalize(x, dim=1).to(device, getattr(torch, dtype)) for x in drawn]
    leaves = [x.requires_grad_() for x in (*features, torch.tensor(scale, device=device))]

    def run() -> None:
        contrastile.clip_loss(*leaves, backend=backend).backward()
        for x in leaves:
            x.grad = None

    for _ in range(3):
        run()
    return run


def child(root: Path) -> subprocess.Popen[str]:
    """The process of one checkout."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.Popen([sys.executable, __file__, "--serve"], cwd=root, env=environment, **pipes)


def timed(process: subprocess.Popen[str], what: dict[str, Any]) -> float:
    """One sample of a step, in ms."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    said = process.stdout.readline()
    if not said:
        raise SystemExit(f"the process of {process.args} ended at {what}")
    return float(json.loads(said))


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--serve", action="store_true", help=argparse.SUPPRESS)
    add("--before", type=Path, help="the other checkout")
    add("--backend", nargs="+", default=["auto"])
    add("--batch", nargs="+", type=int, default=[8192])
    add("--dim", type=int, default=512)
    add("--dtype", nargs="+", default=["float32"])
    add("--pairs", nargs="+", default=["random"], choices=["random", "certain"])
    add("--scale", type=float, default=100.0)
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--samples", type=int, default=7)
    add("--seconds", type=float, default=0.3, help="of one sample, at least")
    add("--json", type=Path)
    args = parser.parse_args()
    if args.serve:
        return serve()
    import torch

    name = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    both = child(args.before.resolve()), child(ROOT)
    rows = []
    print(f"{name}: ms a step, medians of {args.samples} samples")
    for backend, dtype, batch, pairs in itertools.product(args.backend, args.dtype, args.batch, args.pairs):
        what = {"backend": backend, "batch": batch, "dim": args.dim, "dtype": dtype, "pairs": pairs}
        asked = {**what, "scale": args.scale, "device": args.device, "seconds": args.seconds}
        samples = [[timed(each, asked) for each in both] for _ in range(args.samples)]
        before, after = (statistics.median(each) for each in zip(*samples, strict=True))
        ratio = statistics.median(b / a for a, b in samples)
        rows.append({**what, "before_ms": before, "after_ms": after, "ratio": ratio})
        label = f"{backend:8} {dtype:9} b = {batch:7,} {pairs:8}"
        print(f"{label} {before:9.3f} -> {after:9.3f}  x {ratio:.3f}", flush=True)
        if args.json is not None:
            found = {"device": name, "torch": torch.__version__, "scale": args.scale, "rows": rows}
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    for each in both:
        each.terminate()
        each.wait()
    return None


if __name__ == "__main__":
    main()
