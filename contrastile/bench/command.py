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
    add("--width", "--dim", nargs="+", type=int, metavar="D", help="numbers of features (512)")
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
        0 if at least one implementation was measured and all agreed with the oracle, 1 if one disagreed, 2 if none
        could be measured.

    Raises:
        CannotRunError: an option is wrong, a file cannot be written, or the sweep was interrupted.
    """
    for name, minimum in {"batch": 1, "width": 1, "repeat": 1}.items():
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [minimum if values is None else values]:
            within(name, value, minimum)
    reason = why_not_writable(args.json, args.plot)
    if reason is not None:
        raise CannotRunError(reason)
    if args.plot:
        require_packages("matplotlib")
        if args.plot.suffix not in report.PICTURES:
            raise CannotRunError(f"--plot must end in {', '.join(report.PICTURES)}, got {args.plot.name!r}")
    has_gpu = args.device != "cpu" and torch_gpus() > 0
    if args.device == "cuda" and not has_gpu:
        raise CannotRunError("--device cuda needs a torch that sees a GPU; run: contrastile doctor")
    sweep_settings = settings(args, "cuda" if has_gpu else "cpu")
    done, total = 0, sweep.steps(sweep_settings)
    with progress(lines=True) as update:

        def advance(label: str, steps: int) -> None:
            nonlocal done
            done += steps
            update(done, total, label)

        try:
            result = sweep.run(sweep_settings, advance)
        except (ValueError, TypeError, BackendUnavailableError) as error:
            raise CannotRunError(error) from error
    record = result.record()
    report.show(record)
    if args.json:
        write_json(args.json, record)
    if args.plot and any(row.seconds for row in result.rows.values()):
        try:
            report.plot(record, args.plot)
        except OSError as error:
            raise CannotRunError(f"cannot write {args.plot}: {error.strerror}") from error
    if result.interrupted:
        measured = sum(bool(row.seconds) for row in result.rows.values())
        sizes = len(sweep_settings.batches) * len(sweep_settings.widths) * len(sweep_settings.variants)
        raise StoppedError(f"interrupted after {measured} of {(len(sweep_settings.backends) + 1) * sizes} measurements")
    if any(x.ratio is not None and not x.agrees for x in result.agreements):
        return 1
    return 0 if any(row.seconds for row in result.rows.values()) else 2


def _runs_on(name: str, device: str) -> bool:
    try:
        return device in load(name).devices
    except BackendUnavailableError:
        return False
    except (Exception, SystemExit):
        # Importing a third-party backend may raise any exception, which the sweep reports.
        return True


def settings(args: argparse.Namespace, device: str = "cpu") -> SweepSettings:
    """The settings from the arguments, on this device. ``--quick`` changes the defaults of missing options."""
    if not math.isfinite(args.scale):
        raise CannotRunError(f"--scale must be finite, got {args.scale}; leave it out for 100")
    defaults = QUICK if args.quick else USUAL
    # The numpy backend is a float64 reference. Choose it only if there is no other.
    available_names = [name for name, reason in available().items() if reason is None and name != "numpy"]
    backends = args.backend or [name for name in available_names if _runs_on(name, device)] or ["numpy"]
    return SweepSettings(
        backends=tuple(dict.fromkeys(backends)),
        batches=tuple(dict.fromkeys(args.batch or defaults["batch"])),
        widths=tuple(dict.fromkeys(args.width or defaults["width"])),
        variants=tuple(dict.fromkeys(args.variant)),
        dtype=args.dtype,
        scale=args.scale,
        repeat=args.repeat or defaults["repeat"],
        # More rounds follow while the times vary.
        most=args.repeat or 6 * defaults["repeat"],
        device=device,
        budget=args.budget,
        memory=not args.no_memory,
    )
