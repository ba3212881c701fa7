"""What to verify: the options, of the command as of pytest, and the checks that they select."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from contrastile.backends import registry
from contrastile.backends.arrays import FLOATS
from contrastile.backends.contract import PRECISIONS, Backend, BackendUnavailableError
from contrastile.environment import finds_a_gpu
from contrastile.reporting import CannotRunError, one_line, require_packages, within
from contrastile.verify import cases, launched, public, sizes, strategies
from contrastile.verify.comparison import Comparisons, wrong
from contrastile.verify.distributed import DISTRIBUTED, SHARDED
from contrastile.verify.execution import DTYPES
from contrastile.verify.losses.claims import OBJECTIVES
from contrastile.verify.losses.selection import ABOUT, CASES, LossSelection
from contrastile.verify.losses.subject import Loss
from contrastile.verify.properties import PROPERTIES
from contrastile.verify.runner import Check
from contrastile.verify.selection import Selection
from contrastile.verify.trial import skipped
from contrastile.verify.worlds import World

QUICK_CASES = (
    *cases.FEW,
    *("batch-doubling", "peak-memory", "drawn", "front-door", "mistakes", "sharded"),
    *(f"public-losses:{interface}, calls" for interface in ("the function", "value_and_grad", "nn", "cached_step")),
)
QUICK_LOSS_CASES = (
    *("smoke", "ragged", "wide", "hot", "certain", "opposite", "labels", "nan", "calls"),
    *("many-tokens", "masked", "masked@opposite"),
)
QUICK_DTYPES = ("float32", "bfloat16")
QUICK_EXAMPLES = 20
"""What ``--quick`` runs where the command says nothing else."""

EXAMPLES, RANKS_EXAMPLES = 100, 25
"""Problems drawn for a backend and dtype; by the ranks of a launcher, which take these dtypes where none is given."""

_SEVERAL: dict[str, Any] = {"action": "extend", "nargs": "+"}
_NAMES: dict[str, Any] = {**_SEVERAL, "metavar": "NAME"}
OPTIONS: dict[str, dict[str, Any]] = {
    "backend": {**_NAMES, "help": "a backend's name, or module:attribute (default: all available)"},
    "loss": {**_NAMES, "help": "a loss of yours, module:attribute, instead of a backend"},
    "objective": {"choices": OBJECTIVES, "help": "what --loss computes (default: what it claims, else clip_loss)"},
    "case": {**_NAMES, "help": "a case's name; see --list (default: all)"},
    "property": {**_NAMES, "help": "a property's name; see --list (default: all)"},
    "dtype": {**_SEVERAL, "choices": FLOATS, "help": "of the features (default: all the backend takes)"},
    "precision": {**_SEVERAL, "choices": PRECISIONS, "help": "of float32 products (default: all the backend has)"},
    "workspace": {
        "type": int,
        "metavar": "MIB",
        "help": "for G, of triton and cupy (default: CONTRASTILE_WORKSPACE_MIB)",
    },
    "keep": {
        "type": int,
        "metavar": "MIB",
        "help": "of exponentials kept, of cupy and torch (default: CONTRASTILE_KEEP_MIB)",
    },
    "device": {
        "default": "auto",
        "choices": ["auto", "cpu", "cuda"],
        "help": "where to run (default: auto, the GPU for every backend that runs on one, else the CPU)",
    },
    "world": {"metavar": "N", "help": "as 1..8 ranks in this process, or under a launcher as mpi or torch"},
    "per_host": {
        "type": int,
        "metavar": "N",
        "help": "ranks of the world that stand for those of one host (default: 2; mpi, torch: as they are)",
    },
    "examples": {
        "type": int,
        "metavar": "N",
        "help": "problems to draw per backend and dtype (default: 100; mpi, torch: 25)",
    },
    "quick": {
        "action": "store_true",
        "help": "a few cases in float32 and bfloat16, in seconds, where none are given",
    },
    "deadline": {
        "type": float,
        "metavar": "SECONDS",
        "help": "time limit of one check (default: 300, on a GPU 600)",
    },
    "seed": {"type": int, "default": 0, "metavar": "S", "help": "seed of everything random (default: 0)"},
}
"""The options that the command and pytest have, each as argparse takes it."""


def settle(options: argparse.Namespace) -> list[str]:
    """Check the options, and fill in what they leave open.

    Returns:
        What ``--quick``, or a launcher's ranks, leave untested.

    Raises:
        CannotRunError: one of them is wrong, or needs a package that is missing.
    """
    given, ranks = options, options.world in ("mpi", "torch")
    known = PROPERTIES if given.world is None else DISTRIBUTED
    every = [*cases.CASES, *dict.fromkeys(p.case for p in known.values() if p.case is not None)]
    properties = list(known)
    if given.loss:
        if given.backend or given.world is not None:
            raise CannotRunError("--loss must be given without --backend and --world: run them apart")
        every, properties = list(CASES), list(ABOUT)
    elif given.objective:
        raise CannotRunError(f"--objective must be given with --loss, got {given.objective} alone")
    left_out = []
    if given.quick and given.case is None:
        chosen = QUICK_LOSS_CASES if given.loss else QUICK_CASES
        given.case = [name for name in chosen if name.partition(":")[0] in every]
        left_out.append(f"{len({*every} - {*given.case})} cases")
    if (given.quick or ranks) and given.dtype is None:
        given.dtype = list(QUICK_DTYPES)
        left_out += [dtype for dtype in DTYPES if dtype not in QUICK_DTYPES]
    if given.examples is None:
        given.examples = QUICK_EXAMPLES if given.quick else RANKS_EXAMPLES if ranks else EXAMPLES
    for name, least in (("examples", 1), ("seed", 0), ("workspace", 0), ("keep", 0)):
        within(name, getattr(given, name) or 0, least)
    if given.per_host is not None:
        within("per-host", given.per_host, 1)
        if given.world is None:
            raise CannotRunError(f"--per-host must be given with --world, got {given.per_host} alone")
    if given.deadline is not None and not 0 < given.deadline < float("inf"):
        raise CannotRunError(f"--deadline must be a number of seconds above 0, got {given.deadline:g}")
    given.case, given.property = _known("case", given.case, every), _known("property", given.property, properties)
    if not given.loss:
        require_packages("hypothesis")
    return [f"{', '.join(left_out)} ({'--quick' if given.quick else 'give --dtype'})"] if left_out else []


_PARTS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys((strategies.CASE, SHARDED), strategies.numbered),
    **dict.fromkeys((public.CASE, public.RANKS_CASE, sizes.CASE, "ranks"), str),
}


def _known(what: str, given: list[str] | None, names: list[str]) -> list[str] | None:
    """The given names, checked. A case "drawn:17" is one problem; "wordnet" selects every "wordnet@...".

    What "public-losses:", "front-door:", "sizes:" and "ranks:" are followed by selects labels that begin with it.
    """
    if given is None:
        return None
    chosen: list[str] = []
    for name in given:
        family = name.partition(":")[0]
        if what == "case" and ":" in name and family in _PARTS:
            try:
                _PARTS[family](name)
            except ValueError as error:
                raise CannotRunError(str(error)) from error
            chosen.append(name)
            continue
        variants = [known for known in names if known.partition("@")[0] == name]
        if name not in names and not variants:
            near = difflib.get_close_matches(name, names, 1, 0.7)
            known = f"did you mean {near[0]}?" if near else f"known are {', '.join(names)}"
            raise CannotRunError(f"no {what} is called {name!r}; {known}")
        chosen += [name] if name in names else variants
    return chosen


def _selection(options: argparse.Namespace, backends: dict[str, Backend], world: World | None) -> Selection:
    may = options.device != "cpu" and any("cuda" in backend.devices for backend in backends.values())
    return Selection(
        backends,
        options.case,
        options.property,
        tuple(options.dtype or DTYPES),
        options.device,
        # looking for a GPU imports torch, which takes longer than many a check
        may and launched.on_gpus(options.world, options.device),
        options.examples,
        options.seed,
        options.precision,
        options.workspace,
        options.keep,
        world,
    )


def _of_losses(options: argparse.Namespace) -> LossSelection:
    losses = []
    for name in options.loss:
        try:
            losses.append(Loss.of(name, objective=options.objective))
            _ = losses[-1].arrays
        except (TypeError, ValueError, ImportError) as error:
            raise CannotRunError(f"loss {name!r}: {error}") from error
    device = options.device
    if device == "auto":
        everywhere = all("cuda" in loss.claims.devices for loss in losses)
        device = "cuda" if everywhere and finds_a_gpu() else "cpu"
    return LossSelection(losses, options.case, options.property, tuple(options.dtype or DTYPES), device, options.seed)


def selected(
    options: argparse.Namespace, world: World | None = None, printed: Callable[[], str] = str
) -> Iterator[Check]:
    """The checks that options select, as ``settle`` leaves them, in a fixed order.

    The backends or the losses are loaded first; ``printed`` returns what has been printed since the last call.

    Yields:
        One check for each backend that cannot run or has printed, then all others.

    Raises:
        CannotRunError: what was asked for cannot be had.
    """
    if options.device == "cuda" and not finds_a_gpu():
        raise CannotRunError(
            "--device cuda needs a GPU that torch or CuPy can use, and neither finds one; use --device cpu"
        )
    if options.loss:
        losses = _of_losses(options)
        # what a module prints when it is imported is no check's
        printed()
        yield from losses
        return
    ranks, backends = 1 if world is None else world.size, {}
    for name in dict.fromkeys(options.backend or registry.names()):
        try:
            backends[name] = registry.load(name)
        except BackendUnavailableError as error:
            if options.backend:
                raise CannotRunError(str(error)) from error
            yield whole(name, partial(skipped, str(error)), ranks)
        except (Exception, SystemExit) as error:
            # importing other people's code may raise anything
            ours = str(error).startswith("backend ")
            raise CannotRunError(str(error) if ours else f"backend {name!r} raised {one_line(error)}") from error
        if said := printed():
            found = wrong(f"printed to stdout when it was imported: {said!r}")
            yield whole(name, partial(iter, [("", found)]), ranks)
    yield from _selection(options, backends, world)


def whole(name: str, compare: Callable[[], Comparisons], ranks: int = 1) -> Check:
    return Check(name, "all", "all", "all", compare, {"backend": name}, device="all", world=ranks)
