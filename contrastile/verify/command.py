"""``contrastile verify``: options, what they select, and the exit code."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contrastile.backends import registry
from contrastile.backends.arrays import FLOATS
from contrastile.backends.contract import PRECISIONS, Backend, BackendUnavailableError
from contrastile.verify import cases, report, sharded, strategies, worlds
from contrastile.verify.distributed import DISTRIBUTED
from contrastile.verify.properties import PROPERTIES, Property
from contrastile.verify.runner import DTYPES, Row, Run, Selection
from contrastile.verify.worlds import World, WorldError

PASS, FAIL, COULD_NOT_RUN = 0, 1, 2
INSTALL = "pip install 'contrastile[verify]'"


class CannotRunError(Exception):
    """The message is the one line to print."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``contrastile verify``."""
    add = parser.add_argument
    several: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "NAME"}
    add("--backend", **several, help="a backend's name, or module:attribute of anybody's (default: all available)")
    add("--case", **several, help="a case's name; see --list (default: all)")
    add("--property", **several, help="a property's name; see --list (default: all)")
    add("--dtype", action="extend", nargs="+", choices=FLOATS, help="dtypes of the features (default: all it takes)")
    add("--precision", action="extend", nargs="+", choices=PRECISIONS, help="of float32 products (default: all it has)")
    add("--device", default="cpu", choices=["cpu", "cuda"], help="where to run (default: cpu)")
    add("--world", metavar="N", help="as 1..8 ranks in this process, or under a launcher as mpi or torch")
    add("--examples", type=int, default=100, metavar="N", help="problems drawn a backend and dtype (default: 100)")
    add("--seed", type=int, default=0, metavar="S", help="of everything random (default: 0)")
    add("--json", type=Path, metavar="FILE", help="write the verdict, the environment and every row to FILE")
    add("--fail-fast", action="store_true", help="stop at the first failure")
    add("--list", action="store_true", help="list backends, cases and properties, and run nothing")
    add("--quiet", action="store_true", help="print the failures and the verdict only")


def main(args: argparse.Namespace) -> int:
    """Run ``contrastile verify``.

    Returns:
        0 when nothing failed, 1 when something did, 2 when it could not be run: one line on stderr says why.
    """
    try:
        if args.list:
            print(listing())
            return PASS
        with worlds.opened(args.world, args.device) as world:
            return _run(args) if world is None else _together(args, world)
    except (CannotRunError, WorldError) as error:
        return _cannot_run(error)


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


def _together(args: argparse.Namespace, world: World) -> int:
    """``_run`` on every process of a world: the leader prints, and all come to its exit code."""
    try:
        code = _run(args, world)
    except CannotRunError as error:
        code = _cannot_run(error) if world.leads else COULD_NOT_RUN
    # only now: a launcher that sees one process fail may end the others in the middle of a line
    return world.share(code)


def _run(args: argparse.Namespace, world: World | None = None) -> int:
    backends, absent = _backends(args.backend, 1 if world is None else world.size)
    known = PROPERTIES if world is None else DISTRIBUTED
    selection = Selection(
        backends=backends,
        cases=_known("case", args.case, _case_names(known)),
        properties=_known("property", args.property, list(known)),
        dtypes=tuple(args.dtype or DTYPES),
        precisions=args.precision,
        device=_device(args.device),
        examples=_at_least("examples", args.examples, 1),
        seed=_at_least("seed", args.seed, 0),
        world=world,
    )
    _require(selection, quiet=args.quiet)
    leads = world is None or world.leads
    with report.progress(shown=leads and not args.quiet) as advance:
        run = Run(selection, advance)
        rows = absent + list(_until_failure(run.rows()) if args.fail_fast else run.rows())
    if all(row["status"] == "skip" for row in rows):
        raise CannotRunError(f"nothing ran: {rows[0]['reason'] if rows else 'no property has such a case'}")
    if not leads:
        return FAIL if run.failures else PASS
    if args.json is not None:
        try:
            report.write_json(args.json, rows)
        except OSError as error:
            raise CannotRunError(f"cannot write {args.json}: {error.strerror}") from error
    report.show(rows, run.failures, quiet=args.quiet)
    return FAIL if run.failures else PASS


def _until_failure(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows up to the first that failed. The ranks of a world come to the same verdicts, so all stop there."""
    for row in rows:
        yield row
        if row["status"] == "fail":
            return


def _backends(named: list[str] | None, ranks: int) -> tuple[dict[str, Backend], list[Row]]:
    """The backends to run, and a skipped row for each that is not available and was not asked for by name."""
    found: dict[str, Backend] = {}
    absent: list[Row] = []
    for name in dict.fromkeys(named or registry.names()):
        try:
            found[name] = registry.load(name)
        except BackendUnavailableError as error:
            if named:
                raise CannotRunError(str(error)) from error
            absent.append(_absent(name, str(error), ranks))
        except Exception as error:
            # importing other people's code may raise anything
            text = " ".join(str(error).split())
            ours = isinstance(error, ValueError | TypeError)
            raise CannotRunError(text if ours else f"backend {name!r} raised {type(error).__name__}: {text}") from error
    return found, absent


def _absent(name: str, reason: str, ranks: int) -> Row:
    return Row(
        backend=name, property="all", case="all", dtype="all", world=ranks, ratio=None, status="skip", reason=reason
    )


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


def _device(name: str) -> str:
    if name == "cuda" and not _torch_finds_a_gpu() and not _cupy_finds_a_gpu():
        raise CannotRunError(
            "--device cuda needs a GPU that torch or CuPy can use, and neither finds one; use --device cpu"
        )
    return name


def _torch_finds_a_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _cupy_finds_a_gpu() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    from contrastile.backends.cupy.devices import gpus

    return bool(gpus())


def _at_least(what: str, given: int, least: int) -> int:
    if given < least:
        raise CannotRunError(f"--{what} must be at least {least}, got {given}")
    return given


def _require(selection: Selection, *, quiet: bool) -> None:
    """Refuse to start what would stop for a missing package."""
    needed = [] if quiet else ["rich"]
    drawn = strategies.CASE, sharded.CASE
    if any(case in selection.own_cases(each) for each in selection.chosen() for case in drawn):
        needed.append("hypothesis")
    lacking = [name for name in needed if importlib.util.find_spec(name) is None]
    if lacking:
        raise CannotRunError(f"{' and '.join(lacking)} cannot be imported; run: {INSTALL}")
