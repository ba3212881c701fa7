"""The check that caught a mutant in the record catches it here, if it needs neither a GPU nor a process of its own.

``contrastile mutate`` runs each mutant on a copy of the package, which takes minutes. Here the functions of the patched
file get the code of the patched source, for one test.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from contrastile.backends.registry import load
from contrastile.mutate.registry import EXCHANGE, PACKAGE, Mutant, every
from contrastile.mutate.run import missing, world
from contrastile.verify import calls
from contrastile.verify.command import add_arguments
from contrastile.verify.comparison import Comparisons
from contrastile.verify.public import CASE
from contrastile.verify.runner import Row, Run
from contrastile.verify.selection import Selection
from contrastile.verify.worlds import Threads

RECORD = Path(__file__).resolve().parents[2] / "docs" / "results" / "mutants.json"
PROCESS_MUTANTS = (
    *("hangs", "exits-with-0", "leaves-with-0", "dies-by-a-signal", "prints", "all-but-32-rows-refused"),
    *("relative-by-default", "model-of-the-smallest-shard", "freed-group-taken"),
    *("later-deadline-ignored", "duplicate-not-freed", "mpi-ranks-of-the-group", "answered-and-blamed"),
    *("mpi-ranks-among-themselves", "connected-each-time", "margin-strategy-passed-over"),
    *("too-long-is-lost", "notice-to-the-end", "freed-twice"),
)
"""Mutants that the parent process or the verdict on all rows catches, or that change a default, which is no code of a
function, or the state of earlier calls, or a module that a check runs by its path."""
MUTANTS = [
    mutant
    for mutant in every()
    if mutant.component not in ("triton", "cupy") and mutant.equivalent is None and mutant.defect not in PROCESS_MUTANTS
    # these checks would change the process of the tests
    if "autograd, settings" not in " ".join(mutant.checks)
]
CAUGHT_BY = {row["name"]: row for row in json.loads(RECORD.read_text(encoding="utf-8"))["mutants"]}

# the computations of a defect may overflow
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def search_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search with torch: Triton's kernels would run in its interpreter, which takes seconds."""
    if find_spec("torch") is not None:
        monkeypatch.setattr("contrastile.retrieval.unusable", lambda *_: "interpreted")


@pytest.fixture(autouse=True)
def restore_precision() -> Iterator[None]:
    """Restore torch's float32 precision, which a defect may set."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_float32_matmul_precision("highest")


def skip_where_missing(mutant: Mutant) -> None:
    """Skip the test of a mutant whose package is not installed."""
    reason = missing(mutant, "cpu")
    if reason is not None:
        pytest.skip(reason)


def plant(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every function of the patched file its code in the patched source."""
    name = ".".join([PACKAGE.name, *Path(mutant.file).with_suffix("").parts]).removesuffix(".__init__")
    module_code = compile(mutant.applied(), mutant.file, "exec")
    for function, code in functions(module_code, import_module(name)):
        monkeypatch.setattr(function, "__code__", code)
    run_path = runpy.run_path

    def run_patched(path: str) -> dict[str, Any]:
        """The names of a file; the patched file runs as it is patched."""
        if Path(path) != PACKAGE / mutant.file:
            return run_path(path)
        names: dict[str, Any] = {"__name__": "<run_path>"}
        exec(module_code, names)
        return names

    monkeypatch.setattr("runpy.run_path", run_patched)


def functions(code: CodeType, owner: Any) -> Iterator[tuple[Any, CodeType]]:
    """The functions and methods of a module or class, each with its code in the patched source."""
    for inner in code.co_consts:
        member = inspect.getattr_static(owner, inner.co_name, None) if isinstance(inner, CodeType) else None
        if inspect.isclass(member):
            yield from functions(inner, member)
        elif member is not None:
            yield unwrapped(member, inner.co_name), inner


def unwrapped(wrapper: Any, name: str) -> Any:
    """The function of this name in a property, a class method, an operator, or a decorator's wrapper."""
    while getattr(wrapper, "__code__", None) is None or wrapper.__code__.co_name != name:
        attributes = (getattr(wrapper, key, None) for key in ("__wrapped__", "__func__", "fget", "func", "_init_fn"))
        cells = (cell.cell_contents for cell in getattr(wrapper, "__closure__", None) or ())
        wrapper = next(inner for inner in (*attributes, *cells) if callable(inner))
    return wrapper


def recorded_check(mutant: Mutant) -> Iterator[Row]:
    """The rows of verify for the check that caught a mutant."""
    case, prop, dtype = (CAUGHT_BY[mutant.name][key] for key in ("case", "property", "dtype"))
    dtype, _, precision = dtype.partition("/")
    return verify_rows(mutant, cases=[case], properties=[prop], dtypes=[dtype], precisions=[precision or "ieee"])


def recorded_call(mutant: Mutant) -> Iterator[Row]:
    """The rows of verify for the call that failed in the record; none if it was no call, or is no longer stated."""
    reason = CAUGHT_BY.get(mutant.name, {}).get("reason", "")
    for label, _ in calls.labelled():
        if reason.startswith(f"{label}, "):
            yield from verify_rows(mutant, cases=[f"{CASE}:{label}"], properties=["public-calls"], dtypes=["float32"])


def verify_rows(mutant: Mutant, **selected: Any) -> Iterator[Row]:
    """The rows of verify in the world of the mutant's component, for a selection or else the mutant's own checks."""
    skip_where_missing(mutant)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    own = parser.parse_args([*world(mutant), *mutant.checks])
    selected = selected or {"cases": own.case, "properties": own.property, "dtypes": own.dtype or ["float32"]}
    threads = None if own.world is None else Threads(int(own.world), per_host=own.per_host)
    selection = Selection({mutant.backend: load(mutant.backend)}, world=threads, device="cpu", **selected)
    return Run(replace(check, compare=partial(stop_at_failure, check.compare)) for check in selection).rows()


def stop_at_failure(compare: Any) -> Comparisons:
    """Comparisons up to the first failure."""
    for label, worst in compare():
        yield label, worst
        if not worst.ratio < 1:
            return


# one mutant for each check with ranks or of a part of a case; a run of verify has all other checks
CHECKED_UNPATCHED = {
    x.checks or (CAUGHT_BY[x.name]["case"], CAUGHT_BY[x.name]["property"], CAUGHT_BY[x.name]["dtype"]): x
    for x in MUTANTS
    if x.component == EXCHANGE or re.search("--world|:", " ".join(x.checks))
    if x.checks or x.name in CAUGHT_BY
}.values()


# mutants that need a package of make test-slow are slow
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(x, marks=[pytest.mark.slow] * bool(x.package), id=x.name) for x in MUTANTS],
)
def test_a_mutant_fails_a_check_that_the_correct_code_passes(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, forget_calls: Callable[[], None]
) -> None:
    skip_where_missing(mutant)
    # the record may be older than the mutant, or than the check
    first_rows = recorded_check if mutant.name in CAUGHT_BY and not mutant.checks else verify_rows
    if mutant in CHECKED_UNPATCHED:
        statuses = {row["status"] for row in first_rows(mutant)}
        assert "pass" in statuses
        assert statuses <= {"pass", "skip"}
        forget_calls()
    plant(mutant, monkeypatch)
    for row in chain(recorded_call(mutant), first_rows(mutant), verify_rows(mutant)):
        # these errors mean that the patch no longer fits the code around it
        assert not re.search("raised (Type|Attribute|Name)Error", row["reason"]), row
        if row["status"] == "fail":
            return
    pytest.fail("not caught")
