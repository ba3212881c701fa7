"""Measures the losses on this machine: verified first, then timed beside the ceiling and every public alternative.

``python benchmarks/run.py`` uses one GPU, ``torchrun --nproc-per-node N benchmarks/run.py`` all of one host.
``--smoke --device cpu`` runs everything with tiny sizes and without a GPU. The JSON record is written after every
measurement; ``scripts/make_pages.py`` makes the pages and figures of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from harness.bench import Bench  # noqa: E402
from harness.machine import facts  # noqa: E402
from harness.parts import PARTS, verify  # noqa: E402
from harness.plan import GPU, SMOKE  # noqa: E402
from harness.ranks import Ranks  # noqa: E402
from harness.record import Record, file_name  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    """Run the command on this rank.

    Returns:
        0; 1 when a backend failed verify or cannot be loaded, which is then not timed; 2 without a GPU.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="in this order; verify always comes first (all)")
    add("--seconds", type=float, default=480.0, help="skip what no longer fits in this time (%(default)s)")
    add("--slot", type=float, default=0.3, help="seconds of a sample, and of the ceiling beside it (%(default)s)")
    add("--rounds", type=int, default=5, help="samples of each call (%(default)s)")
    add(
        "--backends",
        nargs="+",
        metavar="NAME",
        help="of the package, or module:attribute (triton cupy; torch on a CPU)",
    )
    add("--without", nargs="+", default=[], metavar="WORD", help="leave out peers that have this in their name")
    add("--full", action="store_true", help="verify every case, property and dtype")
    add("--out", type=Path, default=HERE.parent / "docs" / "results", metavar="DIR", help="where the record goes")
    add("--commit", help="what the record says was measured, where there is no checkout")
    add("--resume", action="store_true", help="keep what an earlier run of this commit measured")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where (%(default)s)")
    add("--smoke", action="store_true", help="tiny sizes: it runs, and its numbers mean nothing")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/run.py: torch sees no GPU; --device cpu --smoke shows that it runs", file=sys.stderr)
        return 2
    ranks = Ranks.join(given.device)
    try:
        return _run(ranks, given)
    finally:
        ranks.leave()


def _run(ranks: Ranks, given: argparse.Namespace) -> int:
    environment = facts(ranks, given.commit)
    settings = {"seconds": given.seconds, "slot": given.slot, "smoke": given.smoke, "rounds": given.rounds}
    name = file_name(environment["device"] + (" smoke" if given.smoke else ""), ranks.size)
    record = Record(given.out / name if ranks.rank == 0 else None, environment, settings, resume=given.resume)
    backends = given.backends or (["triton", "cupy"] if given.device == "cuda" else ["torch"])
    slot, rounds = (0.002, 2) if given.smoke else (given.slot, given.rounds)
    bench = Bench(ranks, record, SMOKE if given.smoke else GPU, backends, slot, rounds, given.without)
    sound = verify(bench, full=given.full)
    for part in given.parts:
        PARTS[part](bench)
        ranks.say(f"{part}: done, {bench.left():.0f} s left")
    ranks.say(f"wrote {given.out / name}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
