"""Measures the losses on the GPUs of one host: verified first, then timed beside cuBLAS and public alternatives.

``torchrun --nproc-per-node N benchmarks/ring.py [--parts ...] [--seconds S] [--out DIR] [--commit HASH] [--resume]``;
without GPUs ``--device cpu --smoke`` shows that it runs. The record is written after every measurement;
``benchmarks/ring_report.py`` makes the page of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from gpu_run.record import Record  # noqa: E402
from ring_run import checks, headline, overlap, peers, scaling  # noqa: E402
from ring_run.bench import Bench  # noqa: E402
from ring_run.machine import facts, file_name  # noqa: E402
from ring_run.plan import GPU, SMOKE  # noqa: E402
from ring_run.ranks import Ranks  # noqa: E402

PARTS: dict[str, Callable[[Bench, Any], None]] = {
    "scaling": lambda bench, given: scaling.scaling(bench),
    "shards": lambda bench, given: scaling.shards(bench),
    "hidden": lambda bench, given: scaling.hidden(bench),
    "overlap": lambda bench, given: overlap.overlap(bench),
    "peers": lambda bench, given: peers.peers(bench, tuple(given.without)),
    "headline": lambda bench, given: headline.headline(bench, given.pairs, given.headline_seconds),
}
RECORDED = ("checks", "times", "headline")


USUAL = ("NCCL_NVLS_ENABLE", "NCCL_VERSION")
"""Variables of NCCL that say nothing of how its messages travel here."""


def setting(given: argparse.Namespace) -> str:
    """What was set for this run's messages: the label, how kernels are launched, and NCCL's variables."""
    told = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")]
    launched = f"waves={given.waves} spare={given.spare}" if (given.waves, given.spare) != (1, 0) else ""
    return " ".join(filter(None, (given.label, launched, *(x for x in told if not x.startswith(USUAL)))))


def main(arguments: list[str] | None = None) -> int:
    """Run the command on this rank.

    Returns:
        0; 1 when the check failed, after which nothing is timed; 2 without GPUs.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=("verify", *PARTS), default=list(PARTS), help="in this order; verify is first")
    add("--seconds", type=float, default=300.0, help="skip what no longer fits in this time (%(default)s)")
    add("--brief", action="store_true", help="verify one small batch only: the rest is in the record that is resumed")
    add("--slot", type=float, default=0.25, help="seconds of a sample, and of the ceiling beside it (%(default)s)")
    add("--pairs", type=int, default=0, help="of the headline's batch")
    add("--headline-seconds", type=float, default=0.0, help="the headline's batch is what fits in them (what is left)")
    add("--backend", help="triton on GPUs, torch elsewhere")
    add("--without", nargs="+", default=[], metavar="WORD", help="leave out peers that have this in their name")
    add("--waves", type=int, default=1, help="times as many programs of the triton backend's persistent kernels")
    add("--spare", type=int, default=0, help="multiprocessors that these leave alone")
    add("--label", default="", help="for the rows of this run, beside NCCL's variables")
    add("--out", type=Path, default=HERE.parent / "docs" / "results", metavar="DIR", help="where the record goes")
    add("--commit", help="what the record says was measured, where there is no checkout")
    add("--resume", action="store_true", help="keep what an earlier run of this commit measured")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="where (%(default)s)")
    add("--crowded", action="store_true", help="ranks may share a GPU: it runs, and its times mean nothing")
    add("--smoke", action="store_true", help="tiny sizes: it runs, and its numbers mean nothing")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks/ring.py: torch sees no GPU; --device cpu --smoke shows that it runs", file=sys.stderr)
        return 2
    ranks = Ranks.join(given.device, crowded=given.crowded)
    try:
        with overlap.launching(given.waves, given.spare):
            return _run(ranks, given)
    finally:
        ranks.leave()


def _run(ranks: Ranks, given: argparse.Namespace) -> int:
    environment, record = facts(ranks, given.commit), None
    if ranks.rank == 0:
        settings = {"seconds": given.seconds, "slot": given.slot, "smoke": given.smoke}
        kind = " smoke" if given.smoke else " crowded" if given.crowded else ""
        path = given.out / file_name(environment["device"] + kind, ranks.size)
        record = Record(path, environment, settings, resume=given.resume, parts=RECORDED)
    plan, backend = SMOKE if given.smoke else GPU, given.backend or ("triton" if given.device == "cuda" else "torch")
    bench = Bench(ranks, record, plan, backend, 0.002 if given.smoke else given.slot, setting(given))
    if not checks.verify(bench, brief=given.brief):
        ranks.say("verify failed: nothing is timed")
        return 1
    for part in (part for part in given.parts if part in PARTS):
        PARTS[part](bench, given)
        ranks.say(f"{part}: done, {bench.left():.0f} s left")
    if record is not None:
        print(f"wrote {record.path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
