"""``contrastile verify``: options, what they select, and the exit code."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from contrastile.backends import registry
from contrastile.backends.arrays import FLOATS
from contrastile.backends.contract import PRECISIONS
from contrastile.environment import environment
from contrastile.reporting import (
    COULD_NOT_RUN,
    CannotRunError,
    at_least,
    at_most,
    cannot_run,
    progress,
    require_packages,
    why_not_writable,
    write_json,
    write_text,
)
from contrastile.verify import cases, launched, page, public, report, sharded, strategies, worker
from contrastile.verify.distributed import DISTRIBUTED
from contrastile.verify.execution import DTYPES
from contrastile.verify.isolation import Isolated
from contrastile.verify.losses import names
from contrastile.verify.losses.claims import OBJECTIVES
from contrastile.verify.properties import PROPERTIES
from contrastile.verify.runner import Failure, Row, Run
from contrastile.verify.trial import Property
from contrastile.verify.worker import Task
from contrastile.verify.worlds import Threads, World, WorldError

PASS, FAIL, INTERRUPTED = 0, 1, 130

QUICK_CASES = (
    *("smoke", "ragged", "hot", "all-negative", "ids-drop@far", "labels", "blocks", "sigmoid-ids"),
    *("aliases", "batch-doubling", "peak-memory", "drawn", "front-door", "mistakes", "sharded"),
)
QUICK_DTYPES = ("float32", "bfloat16")
QUICK_EXAMPLES = 20
"""What ``--quick`` runs where the command says nothing else."""

EXAMPLES, RANKS_EXAMPLES = 100, 25
"""Problems drawn for a backend and dtype; by the ranks of a launcher, which take these dtypes where none is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "NAME"}
    add("--backend", **several, help="a backend's name, or module:attribute (default: all available)")
    add("--loss", **several, help="a loss of yours, module:attribute, instead of a backend")
    add("--objective", choices=OBJECTIVES, help="what --loss computes (default: what it claims, else clip_loss)")
    add("--case", **several, help="a case's name; see --list (default: all)")
    add("--property", **several, help="a property's name; see --list (default: all)")
    add(
        "--dtype",
        action="extend",
        nargs="+",
        choices=FLOATS,
        help="of the features (default: all the backend takes)",
    )
    add(
        "--precision",
        action="extend",
        nargs="+",
        choices=PRECISIONS,
        help="of float32 products (default: all the backend has)",
    )
    add("--workspace", type=int, metavar="MIB", help="for G, of triton and cupy (default: CONTRASTILE_WORKSPACE_MIB)")
    add(
        "--keep",
        type=int,
        metavar="MIB",
        help="of exponentials kept, of cupy and torch (default: CONTRASTILE_KEEP_MIB)",
    )
    add(
        "--device",
        default="auto",
        choices=["auto", "cpu", "cuda"],
        help="where to run (default: auto, the GPU for every backend that runs on one, else the CPU)",
    )
    add("--world", metavar="N", help="as 1..8 ranks in this process, or under a launcher as mpi or torch")
    add(
        "--examples",
        type=int,
        metavar="N",
        help="problems to draw per backend and dtype (default: 100; mpi, torch: 25)",
    )
    add("--quick", action="store_true", help="a few cases in float32 and bfloat16, in seconds, where none are given")
    add("--deadline", type=float, metavar="SECONDS", help="time limit of one check (default: 120, on a GPU 600)")
    add(
        "--jobs",
        type=int,
        metavar="N",
        help="processes at a time (default: 2 for all cases on 2 cores or more, else 1)",
    )
    add("--seed", type=int, default=0, metavar="S", help="seed of everything random (default: 0)")
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
        0 when everything that the backends claim was tested and passed, 1 when something failed, 2 when nothing could
        be run or too much was left untested (the last lines say why), 130 when it was interrupted.
    """
    args.started = time.monotonic()
    try:
        if args.list:
            print(listing())
            return PASS
        args.left_out = _select(args)
        with launched.opened(args.world, args.device) as world:
            _require_writable(args, world)
            return _isolated(args, world) if world is None or isinstance(world, Threads) else _launched(args, world)
    except (CannotRunError, WorldError) as error:
        return cannot_run("verify", error)
    except KeyboardInterrupt:
        return _interrupted("interrupted")


def _select(args: argparse.Namespace) -> list[str]:
    """Fill in what the command leaves open. Returns what ``--quick``, or a launcher's ranks, leave untested."""
    ranks = args.world in ("mpi", "torch")
    every = list(names.CASES) if args.loss else _case_names(PROPERTIES if args.world is None else DISTRIBUTED)
    left_out = []
    if args.quick and args.case is None:
        args.case = [name for name in QUICK_CASES if name in every]
        left_out.append(f"{len(every) - len(args.case)} cases")
    if (args.quick or ranks) and args.dtype is None:
        args.dtype = list(QUICK_DTYPES)
        left_out += [dtype for dtype in DTYPES if dtype not in QUICK_DTYPES]
    if args.examples is None:
        args.examples = QUICK_EXAMPLES if args.quick else RANKS_EXAMPLES if ranks else EXAMPLES
    return [f"{', '.join(left_out)} ({'--quick' if args.quick else 'give --dtype'})"] if left_out else []


def _interrupted(line: str) -> int:
    print(f"contrastile verify: {line}", file=sys.stderr, flush=True)
    return INTERRUPTED


def listing() -> str:
    lines = ["backends"]
    for name, missing in registry.available().items():
        lines.append(f"  {name:24}{'available' if missing is None else missing}")
    lines += ["dtypes", *(f"  {dtype}" for dtype in DTYPES), "cases"]
    lines += [f"  {name:24}{cases.build(name, 'float32').about}" for name in cases.names()]
    lines += [f"  {p.case:24}{p.name}: {p.about}" for p in PROPERTIES.values() if p.case is not None]
    lines += ["properties", *(f"  {p.name:24}{p.about}" for p in PROPERTIES.values())]
    lines += ["properties of a --world", *(f"  {p.name:24}{p.about}" for p in DISTRIBUTED.values())]
    lines += ["cases of a --loss", *(f"  {name:24}{about}" for name, about in names.CASES.items())]
    lines += ["properties of a --loss", *(f"  {name:24}{about}" for name, about in names.PROPERTIES.items())]
    return "\n".join(lines)


def _require_writable(args: argparse.Namespace, world: World | None) -> None:
    # the leader writes; every rank must know whether it can
    reason = why_not_writable(args.json, args.report) if world is None or world.leads else None
    reason = reason if world is None else world.share(reason)
    if reason is not None:
        raise CannotRunError(reason)


def _isolated(args: argparse.Namespace, world: Threads | None) -> int:
    """Run in a child process, so that a backend that crashes ends the child alone."""
    task = _task(args, world)
    if args.deadline is not None and not 0 < args.deadline < math.inf:
        raise CannotRunError(f"--deadline must be a number of seconds above 0, got {args.deadline:g}")
    rows: list[Row] = []
    with progress(shown=not args.quiet) as advance:
        run = Isolated(task, args.deadline, advance, _jobs(args))
        try:
            rows.extend(_until_failure(run.rows()) if args.fail_fast else run.rows())
        except KeyboardInterrupt:
            run.interrupted = True
    if not run.interrupted:
        return _verdict(args, rows, run.failures)
    line = f"interrupted after {run.done} of {run.total or '?'} checks"
    rows.append(worker.whole("the rest", "untested", line))
    _verdict(args, rows, run.failures)
    return _interrupted(line)


def _jobs(args: argparse.Namespace) -> int:
    if args.jobs is not None:
        at_least("jobs", args.jobs, 1)
        at_most("jobs", args.jobs, 4 * environment()["cores"])
        return int(args.jobs)
    # few checks are done before a second process has loaded its backends
    return 2 if (args.case is None or args.quick) and not args.loss and environment()["cores"] > 1 else 1


def _launched(args: argparse.Namespace, world: World) -> int:
    """Run in every process of a launcher: the leader prints, and all return its exit code."""
    try:
        code = _in_this_process(args, world)
    except CannotRunError as error:
        code = cannot_run("verify", error) if world.leads else COULD_NOT_RUN
    # exit together: a launcher that sees one process fail may end the others in the middle of a line
    return world.share(code)


def _in_this_process(args: argparse.Namespace, world: World) -> int:
    task = _task(args, world)
    worker.require_device(task.device)
    loaded = dict(worker.load(task.backends))
    rows = [
        worker.whole(name, "skip", reason, world.size) for name, reason in loaded.items() if isinstance(reason, str)
    ]
    backends = {name: backend for name, backend in loaded.items() if not isinstance(backend, str)}
    with progress(shown=world.leads and not args.quiet) as advance:
        run = Run(
            replace(task.selection(backends, gpu=launched.on_gpus(args.world, args.device)), world=world), advance
        )
        rows += _until_failure(run.rows()) if args.fail_fast else run.rows()
    return _verdict(args, rows, run.failures, leads=world.leads)


def _task(args: argparse.Namespace, world: World | None) -> Task:
    at_least("examples", args.examples, 1)
    at_least("seed", args.seed, 0)
    at_least("workspace", args.workspace or 0, 0)
    at_least("keep", args.keep or 0, 0)
    known = PROPERTIES if world is None else DISTRIBUTED
    case_names, property_names = _case_names(known), list(known)
    if args.loss:
        if args.backend or world is not None:
            raise CannotRunError("--loss must be given without --backend and --world: run them apart")
        case_names, property_names = list(names.CASES), list(names.PROPERTIES)
    elif args.objective:
        raise CannotRunError(f"--objective must be given with --loss, got {args.objective} alone")
    task = Task(
        backends=args.backend,
        losses=args.loss,
        objective=args.objective,
        cases=_known("case", args.case, case_names),
        properties=_known("property", args.property, property_names),
        dtypes=tuple(args.dtype or DTYPES),
        precisions=args.precision,
        workspace=args.workspace,
        keep=args.keep,
        device=args.device,
        examples=args.examples,
        seed=args.seed,
        ranks=None if world is None else world.size,
    )
    _require(task, quiet=args.quiet)
    return task


def _verdict(args: argparse.Namespace, rows: list[Row], failures: list[Failure], *, leads: bool = True) -> int:
    if all(row["status"] in ("skip", "refused", "unclaimed") for row in rows):
        why = rows[0]["reason"] if rows else "no property has such a case"
        unclaimed = bool(rows) and rows[0]["status"] == "unclaimed"
        raise CannotRunError(f"nothing ran: {'the loss does not claim ' if unclaimed else ''}{why}")
    if leads and args.json is not None:
        write_json(args.json, report.as_json(rows))
    seconds = time.monotonic() - args.started
    if leads and args.report is not None:
        words = ["contrastile", *getattr(args, "words", ["verify"])]
        write_text(args.report, page.page(rows, failures, words, seconds, args.left_out))
    if leads:
        report.show(rows, failures, quiet=args.quiet, seconds=seconds, left_out=args.left_out)
    return {"pass": PASS, "fail": FAIL, "incomplete": COULD_NOT_RUN}[report.verdict(rows)]


def _until_failure(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows up to the first failure. All ranks of a world reach the same verdicts, so all stop there."""
    for row in rows:
        yield row
        if row["status"] == "fail":
            return


def _case_names(known: dict[str, Property]) -> list[str]:
    return [*cases.names(), *dict.fromkeys(p.case for p in known.values() if p.case is not None)]


_RECIPES: dict[str, Callable[[str], object]] = {
    strategies.CASE: strategies.Recipe.parse,
    sharded.CASE: sharded.ShardedRecipe.parse,
    **dict.fromkeys((public.CASE, public.RANKS_CASE, "ranks"), str),
}


def _known(what: str, given: list[str] | None, names: list[str]) -> list[str] | None:
    """The given names, checked. A case "drawn:..." is a recipe; "wordnet" selects every "wordnet@...".

    What "public-losses:", "front-door:" and "ranks:" are followed by selects the labels that begin with it.
    """
    if given is None:
        return None
    chosen: list[str] = []
    for name in given:
        family = name.partition(":")[0]
        if what == "case" and ":" in name and family in _RECIPES:
            try:
                _RECIPES[family](name)
            except ValueError as error:
                raise CannotRunError(str(error)) from error
            chosen.append(name)
            continue
        variants = [known for known in names if known.partition("@")[0] == name]
        if name not in names and not variants:
            raise CannotRunError(f"{what} must be one of {', '.join(names)}, got {name!r}")
        chosen += [name] if name in names else variants
    return chosen


def _require(task: Task, *, quiet: bool) -> None:
    """Raise before the work begins where it would need a missing package."""
    needed, selection = [] if quiet else ["rich"], task.selection({})
    drawn = strategies.CASE, sharded.CASE
    if task.losses is None and any(case in selection.own_cases(each) for each in selection.chosen() for case in drawn):
        needed.append("hypothesis")
    require_packages(*needed)
