"""``contrastile verify``: options, what they select, and the exit code."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path

from contrastile.backends import registry
from contrastile.environment import NVIDIA, environment, has_a_gpu
from contrastile.reporting import (
    COULD_NOT_RUN,
    CannotRunError,
    StoppedError,
    cannot_run,
    progress,
    require_packages,
    why_not_writable,
    within,
    write_json,
    write_text,
)
from contrastile.verify import cases, launched, page, report
from contrastile.verify.distributed import DISTRIBUTED
from contrastile.verify.execution import DTYPES
from contrastile.verify.losses import selection as losses
from contrastile.verify.options import OPTIONS, selected, settle, whole
from contrastile.verify.properties import PROPERTIES
from contrastile.verify.runner import Failure, Row, Run
from contrastile.verify.worlds import Threads, World

PASS, FAIL = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, arguments in OPTIONS.items():
        add(f"--{name.replace('_', '-')}", **arguments)
    add(
        "--jobs",
        type=int,
        metavar="N",
        help="processes at a time (default: 2 for all cases on 2 cores or more, else 1)",
    )
    add("--json", type=Path, metavar="FILE", help="write the verdict, the environment and every row to FILE")
    add(
        "--report",
        type=Path,
        metavar="FILE.html",
        help="write it all as one page: verdict, heat map, plots, environment",
    )
    add("-x", "--fail-fast", action="store_true", help="stop at the first failure")
    add("--list", action="store_true", help="list backends, cases and properties, and run nothing")
    add("--quiet", action="store_true", help="print only the failures and the verdict")


def main(args: argparse.Namespace) -> int:
    """Run ``contrastile verify``.

    Returns:
        0 when everything that the backends claim was tested and passed, 1 when something failed, 2 when too much was
        left untested (the last lines say why).

    Raises:
        CannotRunError: nothing could be run, or it was interrupted.
    """
    args.started = time.monotonic()
    if args.list:
        print(listing())
        return PASS
    with launched.opened(args.world, args.device, args.per_host) as world:
        return _isolated(args, world) if world is None or isinstance(world, Threads) else _launched(args, world)


def listing() -> str:
    lines = ["backends"]
    for name, missing in registry.available().items():
        status = "no device: needs an NVIDIA GPU" if name in NVIDIA and not has_a_gpu() else "installed"
        lines.append(f"  {name:24}{status if missing is None else f'missing: {missing}'}")
    lines += ["dtypes", *(f"  {dtype}" for dtype in DTYPES), "cases"]
    lines += [f"  {name:24}{about}" for name, about in cases.ABOUT.items()]
    lines += [f"  {prop.case:24}{prop.name}: {prop.about}" for prop in PROPERTIES.values() if prop.case is not None]
    lines += ["properties", *(f"  {prop.name:24}{prop.about}" for prop in PROPERTIES.values())]
    lines += ["properties of a --world", *(f"  {prop.name:24}{prop.about}" for prop in DISTRIBUTED.values())]
    lines += ["cases of a --loss", *(f"  {name:24}{about}" for name, about in losses.CASES.items())]
    lines += ["properties of a --loss", *(f"  {name:24}{about}" for name, about in losses.ABOUT.items())]
    return "\n".join(lines)


def _prepare(args: argparse.Namespace, world: World | None) -> None:
    args.left_out = settle(args)
    require_packages(*["rich"] * (not args.quiet), *["matplotlib"] * (args.report is not None))
    # only the leader writes, but every rank must know whether it can
    error = why_not_writable(args.json, args.report) if world is None or world.leads else None
    error = error if world is None else world.share(error)
    if error is not None:
        raise CannotRunError(error)


def _isolated(args: argparse.Namespace, world: Threads | None) -> int:
    """Run on workers of pytest, so that a backend that crashes ends only its worker."""
    _prepare(args, world)
    require_packages("pytest", "xdist")
    from contrastile.verify.session import Session

    with progress(shown=not args.quiet) as advance:
        session = Session(args, _jobs(args), advance)
        rows, failures = session.run(fail_fast=args.fail_fast)
    if not session.interrupted:
        return _verdict(args, rows, failures)
    message = f"interrupted after {len(rows)} of {session.total or '?'} checks"
    rest = whole("the rest", lambda: iter(()), 1 if world is None else world.size)
    rows.append(rest.row("untested", reason=message))
    _verdict(args, rows, failures)
    raise StoppedError(message)


def _jobs(args: argparse.Namespace) -> int:
    if args.jobs is not None:
        within("jobs", args.jobs, 1, 4 * environment()["cores"])
        return int(args.jobs)
    # a second process takes longer to load its backends than a few checks take
    return 2 if (args.case is None or args.quick) and not args.loss and environment()["cores"] > 1 else 1


def _launched(args: argparse.Namespace, world: World) -> int:
    """Run in every process of a launcher: the leader prints, and all return its exit code.

    All ranks of a world reach the same verdicts, so all stop at the same failure.
    """
    try:
        _prepare(args, world)
        with progress(shown=world.leads and not args.quiet) as advance:
            run = Run(selected(args, world), advance, fail_fast=args.fail_fast)
            rows = list(run.rows())
        code = _verdict(args, rows, run.failures, leads=world.leads)
    except CannotRunError as error:
        code = cannot_run("verify", error) if world.leads else COULD_NOT_RUN
    # exit together: a launcher that sees one process fail may end the others in the middle of a line
    return world.share(code)


def _verdict(args: argparse.Namespace, rows: list[Row], failures: list[Failure], *, leads: bool = True) -> int:
    if all(row["status"] in ("skip", "refused", "unclaimed") for row in rows):
        reason = rows[0]["reason"] if rows else "no property has such a case"
        is_unclaimed = bool(rows) and rows[0]["status"] == "unclaimed"
        raise CannotRunError(f"nothing ran: {'the loss does not claim ' if is_unclaimed else ''}{reason}")
    seconds, words = time.monotonic() - args.started, ["contrastile", *getattr(args, "words", ["verify"])]
    if leads and args.json is not None:
        run_facts = {"command": shlex.join(words), "seed": args.seed}
        write_json(args.json, report.as_json(rows, **run_facts))
    if leads and args.report is not None:
        write_text(args.report, page.page(rows, failures, words, seconds, args.left_out, args.seed))
    if leads:
        report.show(rows, failures, quiet=args.quiet, seconds=seconds, left_out=args.left_out)
    return {"pass": PASS, "fail": FAIL, "incomplete": COULD_NOT_RUN}[report.verdict(rows)]
