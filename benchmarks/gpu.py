"""Measures the losses on one GPU: verified first, then timed beside cuBLAS and every public alternative.

``python benchmarks/gpu.py [--seconds N] [--parts ...] [--out DIR] [--commit HASH] [--resume]``; without a GPU
``--device cpu --smoke`` shows that everything but the fused kernels runs. The record is written after every
measurement; ``benchmarks/gpu_report.py`` makes the page of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from gpu_run import checks  # noqa: E402
from gpu_run.bench import Bench  # noqa: E402
from gpu_run.machine import facts  # noqa: E402
from gpu_run.peers import TIMED  # noqa: E402
from gpu_run.plan import FUSED, GPU, SMOKE, WITHOUT_GPU, Point  # noqa: E402
from gpu_run.record import Record, file_name  # noqa: E402

ROUNDS = 5
PEER_SLOT = 0.6
"""Samples of the comparison and the grid are this much shorter than those of what was aimed at."""

PEER_PATIENCE = 3.0
"""Seconds that the samples of one implementation at one size of the comparison may take."""


def aims(bench: Bench) -> None:
    """What was aimed at, one point at a time."""
    for point, aims in bench.plan.aims:
        wanted = {name: aim for name, aim in aims.items() if name in bench.aimed}
        if wanted:
            bench.times("aims", list(wanted), point, ROUNDS, aims=wanted)


def shorter(bench: Bench, group: Callable[[Bench], None]) -> None:
    """A part with shorter samples."""
    slot, bench.slot = bench.slot, bench.slot * PEER_SLOT
    group(bench)
    bench.slot = slot


def peers(bench: Bench) -> None:
    """All implementations, interleaved, at each size."""
    for b, rounds in bench.plan.peers:
        bench.times("peers", TIMED, Point(b, bench.plan.peer_width), rounds, PEER_PATIENCE)


def grid(bench: Bench) -> None:
    """Further points of our own, interleaved."""
    for point in bench.plan.grid:
        bench.times("grid", bench.ours, point, 3)


def properties(bench: Bench) -> None:
    """What must hold and has no speed."""
    checks.repeats(bench)
    checks.pairs(bench)


PARTS: dict[str, Callable[[Bench], None]] = {
    "aims": aims,
    "checks": properties,
    "errors": checks.errors,
    "peers": lambda bench: shorter(bench, peers),
    "grid": lambda bench: shorter(bench, grid),
    "big": checks.big,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 when a backend of ours failed verify or cannot be loaded, which is then not timed; 2 without a GPU.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=480.0, help="skip what no longer fits in this time (%(default)s)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure, in this order (all)")
    add("--slot", type=float, default=0.5, help="seconds of a sample, and of the ceiling beside it (%(default)s)")
    add("--full", action="store_true", help="verify every case, property and dtype")
    add("--out", type=Path, default=HERE.parent / "docs" / "results", metavar="DIR", help="where the record goes")
    add("--about", nargs="+", choices=FUSED, default=list(FUSED), help="which of our own the run is about (all)")
    add("--without", nargs="+", default=[], metavar="NAME", help="leave out what has this in its name")
    add("--commit", help="what the record says was measured, where there is no checkout")
    add("--resume", action="store_true", help="keep what an earlier run of this commit measured")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where (%(default)s)")
    add("--smoke", action="store_true", help="tiny sizes: it runs, and its numbers mean nothing")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/gpu.py: torch sees no GPU; --device cpu --smoke shows that it runs", file=sys.stderr)
        return 2
    environment = facts(given.device, given.commit)
    settings = {"seconds": given.seconds, "slot": given.slot, "smoke": given.smoke, "rounds": ROUNDS}
    path = given.out / file_name(environment["device"] + (" smoke" if given.smoke else ""))
    record = Record(path, environment, settings, resume=given.resume)
    about = [*given.about, *WITHOUT_GPU[:1]]
    bench = Bench(
        record, SMOKE if given.smoke else GPU, given.device, 0.002 if given.smoke else given.slot, about=about
    )
    sound = bench.gather(given.without, full=given.full)
    for name, reason in bench.absent.items():
        print(f"not measured: {name}: {reason}", flush=True)
    for part in given.parts:
        PARTS[part](bench)
        print(f"{part}: done, {record.left():.0f} s left", flush=True)
    print(f"wrote {path}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
