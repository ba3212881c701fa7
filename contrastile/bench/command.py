"""``contrastile bench``: options, table, JSON, picture and exit code."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from contrastile.backends.arrays import FLOATS
from contrastile.backends.contract import BackendUnavailableError
from contrastile.backends.registry import available, load
from contrastile.bench import report, sweep
from contrastile.bench.peers import VARIANTS
from contrastile.bench.sweep import SweepSettings
from contrastile.environment import torch_gpus
from contrastile.reporting import (
    CannotRunError,
    StoppedError,
    progress,
    require_packages,
    why_not_writable,
    within,
    write_json,
)

QUICK: dict[str, Any] = {"batch": [256, 512], "width": [64], "repeat": 3}
USUAL: dict[str, Any] = {"batch": [4096, 8192], "width": [512], "repeat": 5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--backend", nargs="+", metavar="NAME", help="backends, or module:attribute (the fast ones that run here)")
    add("--batch", nargs="+", type=int, metavar="B", help="numbers of pairs (4096 8192)")
    add("--width", nargs="+", type=int, metavar="D", help="numbers of features (512)")
    add("--variant", nargs="+", choices=VARIANTS, default=["aligned"], help="ragged: b-1, d-3; ids: false negatives")
    add("--dtype", choices=sorted(FLOATS), default="float32", help="of the features (%(default)s)")
    add("--scale", type=float, default=100.0, help="multiplies the dot products (%(default)s)")
    add("--repeat", type=int, metavar="N", help="rounds (5, and up to 30 while times vary by 10 %%)")
    add(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to measure (the GPU if torch sees one)"
    )
    add("--budget", type=float, default=300.0, metavar="SECONDS", help="skip what is predicted to take longer in all")
    add("--no-memory", action="store_true", help="time only")
    add("--quick", action="store_true", help="small sizes, to see that it works: its speeds mean little")
    add("--json", type=Path, metavar="FILE", help="write the measurements")
    add("--plot", type=Path, metavar="FILE", help="draw time and memory against the batch: .png, .pdf or .svg")


def main(args: argparse.Namespace) -> int:
    """Run ``contrastile bench``.

    Returns:
        0 when something was measured and nothing disagreed, 1 when an implementation disagreed with the oracle, 2 when
        nothing could be measured.

    Raises:
        CannotRunError: an option is wrong, a file cannot be written, or the sweep was interrupted.
    """
    for name, least in {"batch": 1, "width": 1, "repeat": 1}.items():
        given = getattr(args, name)
        for each in given if isinstance(given, list) else [least if given is None else given]:
            within(name, each, least)
    reason = why_not_writable(args.json, args.plot)
    if reason is not None:
        raise CannotRunError(reason)
    if args.plot:
        require_packages("matplotlib")
        if args.plot.suffix not in report.PICTURES:
            raise CannotRunError(f"--plot must end in {', '.join(report.PICTURES)}, got {args.plot.name!r}")
    gpu = args.device != "cpu" and torch_gpus() > 0
    if args.device == "cuda" and not gpu:
        raise CannotRunError("--device cuda needs a torch that sees a GPU; run: contrastile doctor")
    chosen = settings(args, "cuda" if gpu else "cpu")
    done, total = 0, sweep.steps(chosen)
    with progress(lines=True) as show:

        def advance(what: str, steps: int) -> None:
            nonlocal done
            done += steps
            show(done, total, what)

        try:
            found = sweep.run(chosen, advance)
        except (ValueError, TypeError, BackendUnavailableError) as error:
            raise CannotRunError(error) from error
    record = found.record()
    report.show(record)
    if args.json:
        write_json(args.json, record)
    if args.plot and any(row.seconds for row in found.rows.values()):
        try:
            report.plot(record, args.plot)
        except OSError as error:
            raise CannotRunError(f"cannot write {args.plot}: {error.strerror}") from error
    if found.interrupted:
        measured = sum(bool(row.seconds) for row in found.rows.values())
        sizes = len(chosen.batches) * len(chosen.widths) * len(chosen.variants)
        raise StoppedError(f"interrupted after {measured} of {(len(chosen.backends) + 1) * sizes} measurements")
    if any(each.ratio is not None and not each.agrees for each in found.agreements):
        return 1
    return 0 if any(row.seconds for row in found.rows.values()) else 2


def _runs(name: str, device: str) -> bool:
    try:
        return device in load(name).devices
    except BackendUnavailableError:
        return False
    except (Exception, SystemExit):
        # a third-party backend may raise anything when it is imported: the sweep says what
        return True


def settings(args: argparse.Namespace, device: str = "cpu") -> SweepSettings:
    """The settings that the arguments ask for, on this device; ``--quick`` fills in what was not given."""
    if not math.isfinite(args.scale):
        raise CannotRunError(f"--scale must be finite, got {args.scale}; leave it out for 100")
    usual = QUICK if args.quick else USUAL
    # numpy, which is float64 and for reference, only where there is no other
    here = [name for name, missing in available().items() if missing is None and name != "numpy"]
    backends = args.backend or [name for name in here if _runs(name, device)] or ["numpy"]
    return SweepSettings(
        backends=tuple(dict.fromkeys(backends)),
        batches=tuple(dict.fromkeys(args.batch or usual["batch"])),
        widths=tuple(dict.fromkeys(args.width or usual["width"])),
        variants=tuple(dict.fromkeys(args.variant)),
        dtype=args.dtype,
        scale=args.scale,
        repeat=args.repeat or usual["repeat"],
        # where times vary
        most=args.repeat or 6 * usual["repeat"],
        device=device,
        budget=args.budget,
        memory=not args.no_memory,
    )
