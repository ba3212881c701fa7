"""The Hopper tile kernels of the cupy backend by themselves: verified against float64, then measured.

``python benchmarks/cupy_kernels.py verify`` launches every kernel on ragged chunks with all masks and compares with
float64; ``measure`` times them beside cuBLAS (8192^3, through torch) in one interleaved, sustained run and verifies
first. ``--watchdog`` compiles waits that trap, ``--small`` takes the smallest shapes alone (for compute-sanitizer).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import cupy  # noqa: E402
from cupy_kernel_checks import BM, BN, Problem, tensor_map, verify  # noqa: E402

from contrastile.backends.cupy import build  # noqa: E402
from contrastile.backends.cupy.arguments import struct  # noqa: E402
from contrastile.backends.cupy.instances import PLAIN  # noqa: E402
from contrastile.backends.cupy.launch import pointer  # noqa: E402

_kept: list[Any] = []  # what launches point to


def elapsed(run: Callable[[], Any], times: int) -> float:
    """Milliseconds a run."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) / times


def jobs(b: int, depth: int, height: int, width: int, band: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """Kernels and the operations of their products."""
    whole = Problem(b, b, depth, (0, 0, b, b), PLAIN, "bfloat16", band=band)
    safe = Problem(b, b, depth, (0, 0, b, b), PLAIN, "bfloat16", band=band)
    chunk = (0, 0, height, width)
    parts = [cupy.empty((2, -(-b // size), b), cupy.float32) for size in (BN, BM)]
    sides = [struct("Partials")(sums=pointer(x[0]), references=pointer(x[1]), stride=b) for x in parts]
    made = {}
    for name, p in (("forward", whole), ("forward safe", safe)):
        p.set_plan(status=int(p is safe))
        arguments = struct("ForwardArguments")(**p.common(), rows=sides[0], columns=sides[1])
        made[name] = p.launcher("forward", arguments, p.maps(), p is safe), 2.0 * b * b * depth
    g = cupy.empty((height, width), cupy.uint16)
    vectors = [cupy.random.rand(b, dtype=cupy.float32) * 1e-5 for _ in range(4)]
    side = struct("GradientSide")(*map(pointer, vectors))
    for name, fast in (("G", 1), ("G safe", 0)):
        p = Problem(b, b, depth, chunk, PLAIN, "bfloat16", band=band)
        p.set_plan(fast=fast, bias=-10.0)
        _kept.append(p)
        arguments = struct("GradientArguments")(
            **p.common(), row=side, column=side, entries=pointer(vectors[0]), g=pointer(g), g_stride=width
        )
        maps = [*p.maps(), tensor_map(g, height, width, (16, 64), "bfloat16")]
        made[name] = p.launcher("gradient", arguments, maps), 2.0 * height * width * depth
    p.set_plan(fast=0, bias=-10.0)
    arguments = struct("SigmoidArguments")(
        **p.common(), row_weight=pointer(vectors[0]), loss_parts=pointer(parts[0]), slope_parts=pointer(parts[1]),
        part_stride=height, g=pointer(g), g_stride=width,
    )  # fmt: skip
    made["sigmoid"] = p.launcher("sigmoid", arguments, maps), made["G"][1]
    _kept.extend((parts, vectors, whole, safe, p, g))
    return made


def measure(b: int, depths: list[int], height: int, width: int, band: int, rounds: int, only: list[str]) -> None:
    """Each kernel in samples of equal length between two of cuBLAS; rates, and fractions of the mean of these two."""
    import torch

    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    for depth in depths:
        made = jobs(b, depth, height, width, band)
        made = {name: made[name] for name in only or made}
        made["cuBLAS"] = (lambda: torch.mm(left, right.t(), out=out)), 2.0 * 8192**3
        rates: dict[str, list[float]] = {name: [] for name in made}
        shares: dict[str, list[float]] = {name: [] for name in made}
        for run, _ in made.values():
            elapsed(run, 2)
        before = 0.0
        for turn in range(rounds + 1):
            for name, (run, work) in made.items():
                rate = work / elapsed(run, max(2, int(9e13 / work))) / 1e9
                after = 2.0 * 8192**3 / elapsed(made["cuBLAS"][0], 80) / 1e9
                if turn > 0:  # the first turn warms the card
                    rates[name].append(rate)
                    shares[name].append(200 * rate / (before + after))
                before = after
        line = "  ".join(f"{x} {statistics.median(rates[x]):.0f} = {statistics.median(shares[x]):.1f} %" for x in made)
        print(f"b {b} d {depth} G {height} x {width} band {band}, TFLOP/s and share of cuBLAS: {line}", flush=True)
        _kept.clear()
        cupy.get_default_memory_pool().free_all_blocks()


def main() -> int:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("verify", "measure"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--loud", action="store_true")
    parser.add_argument("--watchdog", action="store_true")
    parser.add_argument("--sources", type=Path, default=build.SOURCES, help="another folder of kernels, to compare")
    parser.add_argument("--unverified", action="store_true")
    parser.add_argument("-b", type=int, default=32768)
    parser.add_argument("--depths", type=int, nargs="+", default=[512, 768, 1024])
    parser.add_argument("--chunk", type=int, nargs=2, default=[8192, 32768])
    parser.add_argument("--band", type=int, nargs="+", default=[16])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    build.SOURCES = given.sources
    if given.watchdog:
        options: Any = (*build.OPTIONS, "-DCONTRASTILE_WATCHDOG=4000000")
        build.OPTIONS = options
    failed = 0 if given.unverified else verify(given.small or given.what == "measure", given.loud)
    if given.what == "measure" and not failed:
        height, width = given.chunk
        for band in given.band:
            measure(given.b, given.depths, height, width, band, given.rounds, given.only)
    return failed


if __name__ == "__main__":
    sys.exit(main())
