"""``contrastile bench``: arguments in, table, JSON and PNG out, verdict by exit code."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from contrastile.backends.contract import BackendUnavailableError
from contrastile.backends.registry import available
from contrastile.backends.settings import KEEP, WORKSPACE
from contrastile.bench import report, sweep
from contrastile.bench.cases import VARIANTS
from contrastile.bench.display import progress
from contrastile.bench.results import Settings, Sweep
from contrastile.verify.files import why_not_writable

QUICK: dict[str, Any] = {"batch": [256, 512], "width": [64], "repeat": 3}
USUAL: dict[str, Any] = {"batch": [4096, 8192], "width": [512], "repeat": 5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to a parser."""
    add = parser.add_argument
    add("--backend", nargs="+", metavar="NAME", help="backends, or module:attribute (all that are available here)")
    add("--batch", nargs="+", type=positive, metavar="B", help="numbers of pairs (4096 8192)")
    add("--width", nargs="+", type=positive, metavar="D", help="numbers of features (512)")
    add("--variant", nargs="+", choices=VARIANTS, default=["aligned"], help="ragged: b-1, d-3; ids: false negatives")
    add("--dtype", choices=sorted(sweep.ITEMSIZE), default="float32", help="of the features (%(default)s)")
    add("--scale", type=float, default=100.0, help="multiplies the dot products (%(default)s)")
    add("--workspace", type=whole, metavar="MIB", help="for G, of triton and cupy (CONTRASTILE_WORKSPACE_MIB)")
    add("--keep", type=whole, metavar="MIB", help="of exponentials kept, of cupy (CONTRASTILE_KEEP_MIB)")
    add("--repeat", type=positive, metavar="N", help="rounds; each times every implementation once (5)")
    add("--threads", type=positive, metavar="N", help="threads of torch (its own choice)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to measure (%(default)s)")
    add("--budget", type=float, default=300.0, metavar="SECONDS", help="skip what is predicted to take longer in all")
    add("--no-memory", action="store_true", help="time only")
    add("--quick", action="store_true", help="small sizes, to see that it works: its speeds mean little")
    add("--json", type=Path, metavar="FILE", help="write the measurements")
    add("--plot", type=Path, metavar="FILE.png", help="draw time and memory against the batch")


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def whole(text: str) -> int:
    """An integer of at least 0, for argparse."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def main(args: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
        0 when something was measured and nothing disagreed, 1 when an implementation disagreed with the oracle, 2 when
        nothing could be measured, a file could not be written, or the sweep was interrupted.
    """
    reason = why_not_writable(args.json, args.plot)
    if reason is not None:
        return _cannot(reason)
    if args.plot and not report.can_plot():
        return _cannot(report.PLOT_NEEDS)
    if args.device == "cuda" and not _sees_cuda():
        return _cannot("--device cuda needs a torch that sees a GPU; run: contrastile doctor")
    chosen = settings(args)
    # the processes that measure memory inherit it
    for variable, mib in ((WORKSPACE, chosen.workspace), (KEEP, chosen.keep)):
        if mib is not None:
            os.environ[variable] = str(mib)
    try:
        with progress(sweep.steps(chosen)) as advance:
            found = sweep.run(chosen, advance)
    except (ValueError, TypeError, BackendUnavailableError) as error:
        return _cannot(str(error))
    report.show(found)
    reason = _written(found, args.json, args.plot)
    if reason is not None:
        return _cannot(reason)
    if found.interrupted:
        return _cannot("interrupted; this is what was found until then")
    if any(each.ratio is not None and not each.agrees for each in found.agreements):
        return 1
    return 0 if any(row.seconds for row in found.rows) else 2


def _written(found: Sweep, data: Path | None, picture: Path | None) -> str | None:
    """Writes the files; why one cannot be written, or None."""
    path = data
    try:
        if data:
            data.write_text(json.dumps(report.as_json(found), indent=2) + "\n", encoding="utf-8")
        path = picture
        if picture and any(row.seconds for row in found.rows):
            report.plot(found, picture)
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return None


def settings(args: argparse.Namespace) -> Settings:
    """The settings that the arguments ask for; ``--quick`` fills in what was not given."""
    usual = QUICK if args.quick else USUAL
    backends = args.backend or [name for name, missing in available().items() if missing is None]
    return Settings(
        backends=tuple(dict.fromkeys(backends)),
        batches=tuple(dict.fromkeys(args.batch or usual["batch"])),
        widths=tuple(dict.fromkeys(args.width or usual["width"])),
        variants=tuple(dict.fromkeys(args.variant)),
        dtype=args.dtype,
        scale=args.scale,
        repeat=args.repeat or usual["repeat"],
        device=args.device,
        workspace=args.workspace,
        keep=args.keep,
        threads=args.threads,
        budget=args.budget,
        memory=not args.no_memory,
    )


def _sees_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def _cannot(reason: str) -> int:
    sys.stdout.flush()
    print(f"contrastile bench: {reason}", file=sys.stderr)
    return 2
