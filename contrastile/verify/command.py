"""``contrastile verify``: options, what they select, and the exit code."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from contrastile.backends import registry
from contrastile.backends.arrays import FLOATS
from contrastile.backends.contract import PRECISIONS
from contrastile.verify import cases, launched, report, sharded, strategies, worker
from contrastile.verify.distributed import DISTRIBUTED
from contrastile.verify.files import why_not_writable
from contrastile.verify.isolation import DEADLINE, Isolated
from contrastile.verify.properties import PROPERTIES, Property
from contrastile.verify.runner import DTYPES, Failure, Row, Run
from contrastile.verify.worker import CannotRunError, Task
from contrastile.verify.worlds import Threads, World, WorldError

PASS, FAIL, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130
INSTALL = "pip install 'contrastile[verify]'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``contrastile verify``."""
    add = parser.add_argument
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "NAME"}
    add("--backend", **several, help="a backend's name, or module:attribute of anybody's (default: all available)")
    add("--case", **several, help="a case's name; see --list (default: all)")
    add("--property", **several, help="a property's name; see --list (default: all)")
    add("--dtype", action="extend", nargs="+", choices=FLOATS, help="dtypes of the features (default: all it takes)")
    add("--precision", action="extend", nargs="+", choices=PRECISIONS, help="of float32 products (default: all it has)")
    add("--workspace", type=int, metavar="MIB", help="for G, of triton and cupy (default: CONTRASTILE_WORKSPACE_MIB)")
    add("--keep", type=int, metavar="MIB", help="of exponentials kept, of cupy (default: CONTRASTILE_KEEP_MIB)")
    add("--device", default="cpu", choices=["cpu", "cuda"], help="where to run (default: cpu)")
    add("--world", metavar="N", help="as 1..8 ranks in this process, or under a launcher as mpi or torch")
    add("--examples", type=int, default=100, metavar="N", help="problems drawn a backend and dtype (default: 100)")
    add("--deadline", type=float, metavar="SECONDS", help="that one check may take (default: 120, on a GPU 600)")
    add("--seed", type=int, default=0, metavar="S", help="of everything random (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write the verdict, the environment and every row to FILE")
    add("--fail-fast", action="store_true", help="stop at the first failure")
    add("--list", action="store_true", help="list backends, cases and properties, and run nothing")
    add("--quiet", action="store_true", help="print the failures and the verdict only")


def main(args: argparse.Namespace) -> int:
    """Run ``contrastile verify``.

    Returns:
        0 when all that the backends claim was tested and passed, 1 when something failed, 2 when it could not be run or
        too much was left untested (the last lines say why), 130 when it was interrupted.
    """
    try:
        if args.list:
            print(listing())
            return PASS
        with launched.opened(args.world, args.device) as world:
            _require_writable(args, world)
            return _alone(args, world) if world is None or isinstance(world, Threads) else _together(args, world)
    except (CannotRunError, WorldError) as error:
        return _cannot_run(error)
    except KeyboardInterrupt:
        print("contrastile verify: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def _cannot_run(error: Exception) -> int:
    print(f"contrastile verify: {error}", file=sys.stderr, flush=True)
    return COULD_NOT_RUN


def listing() -> str:
    """Every backend, dtype, case and property there is, one a line."""
    lines = ["backends"]
    for name, missing in registry.available().items():
        lines.append(f"  {name:22}{'available' if missing is None else missing}")
    lines += ["dtypes", *(f"  {dtype}" for dtype in DTYPES), "cases"]
    lines += [f"  {name:22}{cases.build(name, 'float32').about}" for name in cases.names()]
    lines += [f"  {p.case:22}{p.name}: {p.about}" for p in PROPERTIES.values() if p.case is not None]
    lines += ["properties", *(f"  {p.name:22}{p.about}" for p in PROPERTIES.values())]
    lines += ["properties of a --world", *(f"  {p.name:22}{p.about}" for p in DISTRIBUTED.values())]
    return "\n".join(lines)


def _require_writable(args: argparse.Namespace, world: World | None) -> None:
    # the leader writes, and all of them must know
    reason = why_not_writable(args.json) if world is None or world.leads else None
    reason = reason if world is None else world.share(reason)
    if reason is not None:
        raise CannotRunError(reason)


def _alone(args: argparse.Namespace, world: Threads | None) -> int:
    """Run it in a process of its own, which no backend can take along."""
    task = _task(args, world)
    deadline = DEADLINE[args.device] if args.deadline is None else args.deadline
    if not 0 < deadline < math.inf:
        raise CannotRunError(f"--deadline must be a number of seconds above 0, got {args.deadline:g}")
    rows: list[Row] = []
    with report.progress(shown=not args.quiet) as advance:
        run = Isolated(task, deadline, advance)
        try:
            rows.extend(_until_failure(run.rows()) if args.fail_fast else run.rows())
        except KeyboardInterrupt:
            run.interrupted = True
    if not run.interrupted:
        return _verdict(args, rows, run.failures)
    left = f"interrupted after {run.done} of {run.total or '?'} checks"
    rows.append(worker.whole("the rest", "untested", left))
    _verdict(args, rows, run.failures)
    print(f"contrastile verify: {left}", file=sys.stderr, flush=True)
    return INTERRUPTED


def _together(args: argparse.Namespace, world: World) -> int:
    """Run it in every process of a launcher: the leader prints, and all come to its exit code."""
    try:
        code = _in_this_process(args, world)
    except CannotRunError as error:
        code = _cannot_run(error) if world.leads else COULD_NOT_RUN
    # only now: a launcher that sees one process fail may end the others in the middle of a line
    return world.share(code)


def _in_this_process(args: argparse.Namespace, world: World) -> int:
    task = _task(args, world)
    worker.require_device(task.device)
    loaded = dict(worker.load(task.backends))
    rows = [worker.absent(name, reason, world.size) for name, reason in loaded.items() if isinstance(reason, str)]
    backends = {name: backend for name, backend in loaded.items() if not isinstance(backend, str)}
    with report.progress(shown=world.leads and not args.quiet) as advance:
        run = Run(replace(task.selection(backends), world=world), advance)
        rows += _until_failure(run.rows()) if args.fail_fast else run.rows()
    return _verdict(args, rows, run.failures, leads=world.leads)


def _task(args: argparse.Namespace, world: World | None) -> Task:
    known = PROPERTIES if world is None else DISTRIBUTED
    task = Task(
        backends=args.backend,
        cases=_known("case", args.case, _case_names(known)),
        properties=_known("property", args.property, list(known)),
        dtypes=tuple(args.dtype or DTYPES),
        precisions=args.precision,
        workspace=None if args.workspace is None else _at_least("workspace", args.workspace, 0),
        keep=None if args.keep is None else _at_least("keep", args.keep, 0),
        device=args.device,
        examples=_at_least("examples", args.examples, 1),
        seed=_at_least("seed", args.seed, 0),
        ranks=None if world is None else world.size,
    )
    _require(task, quiet=args.quiet)
    return task


def _verdict(args: argparse.Namespace, rows: list[Row], failures: list[Failure], *, leads: bool = True) -> int:
    """Show what was found, and give the exit code."""
    if all(row["status"] in ("skip", "refused") for row in rows):
        raise CannotRunError(f"nothing ran: {rows[0]['reason'] if rows else 'no property has such a case'}")
    if leads and args.json is not None:
        try:
            report.write_json(args.json, rows)
        except OSError as error:
            raise CannotRunError(f"cannot write {args.json}: {error.strerror}") from error
    if leads:
        report.show(rows, failures, quiet=args.quiet)
    return {"pass": PASS, "fail": FAIL, "incomplete": COULD_NOT_RUN}[report.verdict(rows)]


def _until_failure(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows up to the first that failed. The ranks of a world come to the same verdicts, so all stop there."""
    for row in rows:
        yield row
        if row["status"] == "fail":
            return


def _case_names(known: dict[str, Property]) -> list[str]:
    return [*cases.names(), *dict.fromkeys(p.case for p in known.values() if p.case is not None)]


_RECIPES: dict[str, Callable[[str], object]] = {
    strategies.CASE: strategies.Recipe.parse,
    sharded.CASE: sharded.Shared.parse,
}


def _known(what: str, given: list[str] | None, names: list[str]) -> list[str] | None:
    """The given names, each checked; a case "drawn:..." is a recipe, "wordnet" stands for every "wordnet@..."."""
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


def _at_least(what: str, given: int, least: int) -> int:
    if given < least:
        raise CannotRunError(f"--{what} must be at least {least}, got {given}")
    return given


def _require(task: Task, *, quiet: bool) -> None:
    """Refuse to start what would stop for a missing package."""
    needed, selection = [] if quiet else ["rich"], task.selection({})
    drawn = strategies.CASE, sharded.CASE
    if any(case in selection.own_cases(each) for each in selection.chosen() for case in drawn):
        needed.append("hypothesis")
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        raise CannotRunError(f"{' and '.join(lacking)} cannot be imported; run: {INSTALL}")
