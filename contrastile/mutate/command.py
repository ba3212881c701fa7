"""``contrastile mutate``: options, what they select, and the exit code."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contrastile.backends import registry as backends
from contrastile.backends.contract import BackendUnavailableError
from contrastile.mutate import report
from contrastile.mutate.registry import CONTRACT, ROOMS, Mutant, PatchError, every
from contrastile.mutate.run import Run, Subject
from contrastile.verify.report import progress

PASS, FAIL, COULD_NOT_RUN = 0, 1, 2


class CannotRunError(Exception):
    """The message is the one line to print."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``contrastile mutate``."""
    add = parser.add_argument
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "NAME"}
    add("--mutant", **several, help="a mutant's name; see --list (default: all)")
    add("--room", **several, help=f"where mutants live: {', '.join(ROOMS)} (default: all)")
    add(
        "--backend",
        metavar="NAME",
        help="only this backend's mutants and the contract's around it; or anybody's module:attribute",
    )
    add("--device", default="cpu", choices=["cpu", "cuda"], help="where to run what can (default: cpu)")
    add("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), metavar="N", help="mutants at a time")
    add("--deadline", type=float, default=600.0, metavar="S", help="seconds until a mutant is given up (default: 600)")
    add("--json", type=Path, metavar="FILE", help="write the verdict, the environment and every mutant to FILE")
    add("--list", action="store_true", help="list the mutants, and run none")
    add("--quiet", action="store_true", help="print what was missed and the verdict only")


def main(args: argparse.Namespace) -> int:
    """Run ``contrastile mutate``.

    Returns:
        0 when every mutant that ran was caught, but for equivalent ones; 1 when one was missed or does not fit the code
        it is planted in; 2 when nothing could be run, or not to the end: one line on stderr says why.
    """
    try:
        return _run(args)
    except (CannotRunError, PatchError) as error:
        print(f"contrastile mutate: {error}", file=sys.stderr, flush=True)
        return COULD_NOT_RUN


def _run(args: argparse.Namespace) -> int:
    subject = Subject(_backend(args.backend), args.device, _at_least("deadline", args.deadline, 1))
    mutants = _selected(args, list(every()))
    if args.list:
        for mutant in mutants:
            print(f"{mutant.name:50}{mutant.about}{'' if mutant.equivalent is None else ' (equivalent)'}")
        return PASS
    _require(args)
    with progress(shown=not args.quiet) as advance:
        run = Run(subject, mutants, int(_at_least("jobs", args.jobs, 1)), advance)
        try:
            run.all()
        except KeyboardInterrupt:
            report.show(run.results, quiet=True)
            raise CannotRunError(f"interrupted after {len(run.results)} of {len(mutants)} mutants") from None
    if all(result["status"] == "not run" for result in run.results):
        raise CannotRunError(f"nothing ran: {run.results[0]['reason'] if run.results else 'no mutant is selected'}")
    if args.json is not None:
        report.write_json(args.json, run.results)
    report.show(run.results, quiet=args.quiet)
    return PASS if report.passed(run.results) else FAIL


def _selected(args: argparse.Namespace, mutants: Sequence[Mutant]) -> list[Mutant]:
    """The mutants that are named, or all of the rooms that are."""
    rooms, names = args.room or ROOMS, args.mutant or [mutant.name for mutant in mutants]
    for what, given, known in (("room", rooms, ROOMS), ("mutant", names, [mutant.name for mutant in mutants])):
        for name in given:
            if name not in known:
                raise CannotRunError(f"{what} must be one that contrastile mutate --list names, got {name!r}")
    if args.backend is not None and args.room is None:
        rooms = [CONTRACT, args.backend]
    return [mutant for mutant in mutants if mutant.room in rooms and mutant.name in names]


def _backend(name: str | None) -> str | None:
    """The name of a backend that loads."""
    if name is None:
        return None
    try:
        backends.load(name)
    except (BackendUnavailableError, ValueError, TypeError) as error:
        raise CannotRunError(str(error)) from error
    return name


def _at_least(what: str, given: float, least: int) -> float:
    if given < least:
        raise CannotRunError(f"--{what} must be at least {least}, got {given:g}")
    return given


def _require(args: argparse.Namespace) -> None:
    """Refuse to start what would stop for a missing package, or could not be written."""
    needed = ["hypothesis"] if args.quiet else ["hypothesis", "rich"]
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        raise CannotRunError(f"{' and '.join(lacking)} cannot be imported; run: pip install 'contrastile[verify]'")
    if args.json is not None:
        try:
            args.json.touch()
        except OSError as error:
            raise CannotRunError(f"cannot write {args.json}: {error.strerror}") from error
