"""The options of the command and of the pytest plugin, and the checks that they select."""

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
    *("smoke", "ragged", "wide", "hot", "certain", "opposite", "labels", "nan", "nan@second", "calls"),
    *("many-tokens", "masked", "masked@opposite"),
)
QUICK_DTYPES = ("float32", "bfloat16")
QUICK_EXAMPLES = 20
"""The defaults of ``--quick``."""

EXAMPLES, RANKS_EXAMPLES = 100, 25
"""Problems drawn per backend and dtype: in one process, and by a launcher's ranks, whose dtypes are QUICK_DTYPES."""

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
"""The options of the command and of pytest: for each, the arguments of argparse."""


def settle(options: argparse.Namespace) -> list[str]:
    """Check the options, and set defaults in place.

    Returns:
        The cases and dtypes that ``--quick``, or a launcher's defaults, leave untested.

    Raises:
        CannotRunError: an option is wrong, or needs a package that is missing.
    """
    is_launched = options.world in ("mpi", "torch")
    known = PROPERTIES if options.world is None else DISTRIBUTED
    every_case = [*cases.CASES, *dict.fromkeys(p.case for p in known.values() if p.case is not None)]
    properties = list(known)
    if options.loss:
        if options.backend or options.world is not None:
            raise CannotRunError("--loss must be given without --backend and --world: run them apart")
        every_case, properties = list(CASES), list(ABOUT)
    elif options.objective:
        raise CannotRunError(f"--objective must be given with --loss, got {options.objective} alone")
    left_out = []
    if options.quick and options.case is None:
        quick_cases = QUICK_LOSS_CASES if options.loss else QUICK_CASES
        options.case = [name for name in quick_cases if name.partition(":")[0] in every_case]
        left_out.append(f"{len({*every_case} - {*options.case})} cases")
    if (options.quick or is_launched) and options.dtype is None:
        options.dtype = list(QUICK_DTYPES)
        left_out += [dtype for dtype in DTYPES if dtype not in QUICK_DTYPES]
    if options.examples is None:
        options.examples = QUICK_EXAMPLES if options.quick else RANKS_EXAMPLES if is_launched else EXAMPLES
    for name, minimum in (("examples", 1), ("seed", 0), ("workspace", 0), ("keep", 0)):
        within(name, getattr(options, name) or 0, minimum)
    if options.per_host is not None:
        within("per-host", options.per_host, 1)
        if options.world is None:
            raise CannotRunError(f"--per-host must be given with --world, got {options.per_host} alone")
    if options.deadline is not None and not 0 < options.deadline < float("inf"):
        raise CannotRunError(f"--deadline must be a number of seconds above 0, got {options.deadline:g}")
    options.case = _known("case", options.case, every_case)
    options.property = _known("property", options.property, properties)
    if not options.loss:
        require_packages("hypothesis")
    return [f"{', '.join(left_out)} ({'--quick' if options.quick else 'give --dtype'})"] if left_out else []


_PARTS: dict[str, Callable[[str], object]] = {
    **dict.fromkeys((strategies.CASE, SHARDED), strategies.numbered),
    **dict.fromkeys((public.CASE, public.RANKS_CASE, sizes.CASE, "ranks"), str),
}


def _known(what: str, requested: list[str] | None, names: list[str]) -> list[str] | None:
    """Check the given names, and expand them: "wordnet" selects every "wordnet@...". "drawn:17" is one problem.

    A prefix after "public-losses:", "front-door:", "sizes:" or "ranks:" selects the labels that begin with it.
    """
    if requested is None:
        return None
    selected_names: list[str] = []
    for name in requested:
        family = name.partition(":")[0]
        if what == "case" and ":" in name and family in _PARTS:
            try:
                _PARTS[family](name)
            except ValueError as error:
                raise CannotRunError(str(error)) from error
            selected_names.append(name)
            continue
        variants = [hint for hint in names if hint.partition("@")[0] == name]
        if name not in names and not variants:
            close = difflib.get_close_matches(name, names, 1, 0.7)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(names)}"
            raise CannotRunError(f"no {what} is called {name!r}; {hint}")
        selected_names += [name] if name in names else variants
    return selected_names


def _selection(options: argparse.Namespace, backends: dict[str, Backend], world: World | None) -> Selection:
    may_use_gpu = options.device != "cpu" and any("cuda" in backend.devices for backend in backends.values())
    return Selection(
        backends,
        options.case,
        options.property,
        tuple(options.dtype or DTYPES),
        options.device,
        # only then look for a GPU: it imports torch, which takes longer than many checks
        may_use_gpu and launched.on_gpus(options.world, options.device),
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
        all_run_on_cuda = all("cuda" in loss.claims.devices for loss in losses)
        device = "cuda" if all_run_on_cuda and finds_a_gpu() else "cpu"
    return LossSelection(losses, options.case, options.property, tuple(options.dtype or DTYPES), device, options.seed)


def selected(
    options: argparse.Namespace, world: World | None = None, printed: Callable[[], str] = str
) -> Iterator[Check]:
    """The checks that the settled options select, in a fixed order.

    The backends or the losses are loaded first; ``printed`` returns the text printed since its last call.

    Yields:
        One check for each backend that cannot run or has printed, then all others.

    Raises:
        CannotRunError: a requested backend, loss or device is not available.
    """
    if options.device == "cuda" and not finds_a_gpu():
        raise CannotRunError(
            "--device cuda needs a GPU that torch or CuPy can use, and neither finds one; use --device cpu"
        )
    if options.loss:
        losses = _of_losses(options)
        # discard the text that a module prints when it is imported: no check printed it
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
            is_ours = str(error).startswith("backend ")
            raise CannotRunError(str(error) if is_ours else f"backend {name!r} raised {one_line(error)}") from error
        if text := printed():
            failure = wrong(f"printed to stdout when it was imported: {text!r}")
            yield whole(name, partial(iter, [("", failure)]), ranks)
    yield from _selection(options, backends, world)


def whole(name: str, compare: Callable[[], Comparisons], ranks: int = 1) -> Check:
    return Check(name, "all", "all", "all", compare, {"backend": name}, device="all", world=ranks)
