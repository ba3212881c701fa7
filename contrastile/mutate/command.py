"""``contrastile mutate``: the options, the mutants that they select, the report, and the exit code."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contrastile.environment import environment
from contrastile.mutate.registry import COMPONENTS, Mutant, every
from contrastile.mutate.run import MutationRun, Result, Status
from contrastile.reporting import (
    CannotRunError,
    StoppedError,
    progress,
    require_packages,
    show_table,
    why_not_writable,
    within,
    write_json,
)

PASS, FAIL = 0, 1
STATUSES: tuple[Status, ...] = ("caught", "missed", "equivalent", "broken", "not run")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "NAME"}
    add("--mutant", **several, help="a mutant's name; see --list (default: all)")
    add(
        "--component",
        **several,
        help=f"the part of the code that has the defect: {', '.join(COMPONENTS)} (default: all)",
    )
    add("--device", default="cpu", choices=["cpu", "cuda"], help="where to run what can (default: cpu)")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), metavar="N", help="mutants that run at a time")
    add("--deadline", type=float, default=600.0, metavar="S", help="time limit of one mutant (default: 600)")
    add("--json", type=Path, metavar="FILE", help="write the verdict, the environment and every mutant to FILE")
    add("--list", action="store_true", help="list the mutants, and run none")
    add("--quiet", action="store_true", help="print only what was missed and the verdict")


def main(args: argparse.Namespace) -> int:
    """Run ``contrastile mutate``.

    Returns:
        0 if every mutant that ran was caught, except equivalent ones; 1 if one was missed or does not fit the code.

    Raises:
        CannotRunError: nothing could be run, or it was interrupted.
    """
    within("deadline", args.deadline, 1)
    within("jobs", args.jobs, 1, 4 * (os.cpu_count() or 1))
    mutants = _select(args, list(every()))
    if args.list:
        for mutant in mutants:
            print(f"{mutant.name:55} {mutant.about}{'' if mutant.equivalent is None else ' (equivalent)'}")
        return PASS
    if not args.quiet:
        require_packages("rich")
    reason = why_not_writable(args.json)
    if reason is not None:
        raise CannotRunError(reason)
    with progress(shown=not args.quiet) as advance:
        run = MutationRun(mutants, args.device, args.deadline, args.jobs, advance)
        complete = True
        try:
            run.all()
        except KeyboardInterrupt:
            complete = False
    if complete and all(result.status == "not run" for result in run.results):
        raise CannotRunError(f"nothing ran: {run.results[0].reason if run.results else 'no mutant is selected'}")
    if args.json is not None:
        write_json(args.json, as_json(run.results, complete=complete))
    show(run.results, quiet=args.quiet or not complete, complete=complete)
    if not complete:
        raise StoppedError(f"interrupted after {len(run.results)} of {len(mutants)} mutants")
    return PASS if verdict(run.results) == "pass" else FAIL


def _select(args: argparse.Namespace, mutants: Sequence[Mutant]) -> list[Mutant]:
    components, names = args.component or COMPONENTS, args.mutant or [mutant.name for mutant in mutants]
    for kind, chosen, known in (
        ("component", components, COMPONENTS),
        ("mutant", names, [mutant.name for mutant in mutants]),
    ):
        for name in chosen:
            if name not in known:
                raise CannotRunError(f"{kind} must be one that contrastile mutate --list names, got {name!r}")
    return [mutant for mutant in mutants if mutant.component in components and mutant.name in names]


def verdict(results: Sequence[Result], *, complete: bool = True) -> str:
    """The verdict on a run: it passes if at least one mutant was caught, and none was missed or broken."""
    count = Counter(result.status for result in results)
    if not count["caught"] or count["missed"] or count["broken"]:
        return "fail"
    # An interrupted run has not caught the remaining mutants.
    return "pass" if complete else "interrupted"


def as_json(results: Sequence[Result], *, complete: bool = True) -> dict[str, Any]:
    """``{"verdict", "environment", "counts", "mutants"}``."""
    count = Counter(result.status for result in results)
    return {
        "verdict": verdict(results, complete=complete),
        "environment": environment(),
        "counts": {status: count[status] for status in STATUSES},
        "mutants": list(map(asdict, results)),
    }


def summary(results: Sequence[Result], *, complete: bool = True) -> str:
    count = Counter(result.status for result in results)
    words = [f"{count['caught']} of {count['caught'] + count['missed']} mutants caught"]
    words += [f"{count[status]} {status}" for status in STATUSES[2:] if count[status]]
    return f"{verdict(results, complete=complete).upper()}: {', '.join(words)}"


def show(results: Sequence[Result], *, quiet: bool, complete: bool = True) -> None:
    """Print the table of the components, every mutant that was missed or does not fit, and the verdict."""
    if not quiet:
        _show_components(results)
    reasons = Counter((result.backend, result.reason) for result in results if result.status == "not run")
    for (backend, reason), count in reasons.items():
        print(f"not run: {count} of {backend}: {reason}")
    for result in results:
        if result.status in ("missed", "broken"):
            print(f"{result.status.upper()} {result.name} ({result.backend})")
            print(f"  {result.about}: {result.reason}")
    print(summary(results, complete=complete), flush=True)


def _show_components(results: Sequence[Result]) -> None:
    rows = []
    for component in COMPONENTS:
        selected = [result for result in results if result.name.partition(":")[0] == component]
        if not selected:
            continue
        count = Counter(result.status for result in selected)
        caught = [result for result in selected if result.status == "caught"]
        problems = max((result.problems for result in caught), default=0)
        seconds = max((result.seconds for result in caught), default=0.0)
        rows.append([component, *(str(count[status]) for status in STATUSES), str(problems), f"{seconds:.1f}"])
    headings = ["component", *STATUSES, "cases", "s"]
    caption = "cases and s: the most until one mutant was caught"
    show_table("mutants", headings, rows, right=range(1, len(headings)), caption=caption)
