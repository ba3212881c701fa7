"""Every mutant that needs neither a GPU nor a process of its own is caught by the check that caught it in the record.

``contrastile mutate`` runs each on a copy of the package, for minutes in all. Here the functions of the changed file
have the code of the changed source, for the time of one test.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
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
from contrastile.verify.command import add_arguments
from contrastile.verify.comparison import Comparisons
from contrastile.verify.runner import Row, Run
from contrastile.verify.selection import Selection
from contrastile.verify.worlds import Threads

RECORD = Path(__file__).resolve().parents[2] / "docs" / "results" / "mutants.json"
OF_A_PROCESS = (
    *("hangs", "exits-with-0", "leaves-with-0", "dies-by-a-signal", "prints", "all-but-32-rows-refused"),
    *("relative-by-default", "model-of-the-smallest-shard", "freed-group-taken"),
    *("later-deadline-ignored", "duplicate-not-freed", "mpi-ranks-of-the-group", "answered-and-blamed"),
    *("mpi-ranks-among-themselves", "connected-each-time", "margin-strategy-passed-over"),
    *("too-long-is-lost", "notice-to-the-end", "freed-twice"),
)
"""Caught by the process that started theirs, by the verdict on all rows, in a default, which is no code of a function,
in what an earlier call has kept, or in a module that a check runs by its path."""
MUTANTS = [
    each
    for each in every()
    if each.component not in ("triton", "cupy") and each.equivalent is None and each.defect not in OF_A_PROCESS
    # which changes the process, of these tests too
    if "autograd, settings" not in " ".join(each.checks)
]
CAUGHT_BY = {each["name"]: each for each in json.loads(RECORD.read_text(encoding="utf-8"))["mutants"]}

# what a defect computes may overflow
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def torch_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU: these tests may have Triton's interpreter, which takes seconds."""
    if find_spec("torch") is not None:
        monkeypatch.setattr("contrastile.retrieval.unusable", lambda *_: "interpreted")


@pytest.fixture(autouse=True)
def precision_put_back() -> Iterator[None]:
    """A defect that sets it leaves it so."""
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
    for function, code in functions(compile(mutant.applied(), mutant.file, "exec"), import_module(name)):
        monkeypatch.setattr(function, "__code__", code)


def functions(code: CodeType, place: Any) -> Iterator[tuple[Any, CodeType]]:
    """The functions and methods of a module or class, each with its code in a changed source."""
    for inner in code.co_consts:
        found = inspect.getattr_static(place, inner.co_name, None) if isinstance(inner, CodeType) else None
        if inspect.isclass(found):
            yield from functions(inner, found)
        elif found is not None:
            yield bare(found, inner.co_name), inner


def bare(found: Any, name: str) -> Any:
    """The function of this name in a property, a class method, an operator, or a decorator's wrapper."""
    while getattr(found, "__code__", None) is None or found.__code__.co_name != name:
        inside = (getattr(found, each, None) for each in ("__wrapped__", "__func__", "fget", "func", "_init_fn"))
        cells = (cell.cell_contents for cell in getattr(found, "__closure__", None) or ())
        found = next(each for each in (*inside, *cells) if callable(each))
    return found


def recorded(mutant: Mutant) -> Iterator[Row]:
    """What verify says in the check that caught a mutant."""
    case, prop, dtype = (CAUGHT_BY[mutant.name][key] for key in ("case", "property", "dtype"))
    dtype, _, precision = dtype.partition("/")
    return checked(mutant, cases=[case], properties=[prop], dtypes=[dtype], precisions=[precision or "ieee"])


def checked(mutant: Mutant, **chosen: Any) -> Iterator[Row]:
    """What verify says, in the world of a mutant's component; by the mutant's own checks where none are chosen."""
    skip_where_missing(mutant)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    own = parser.parse_args([*world(mutant), *mutant.checks])
    chosen = chosen or {"cases": own.case, "properties": own.property, "dtypes": own.dtype or ["float32"]}
    ranks = None if own.world is None else Threads(int(own.world), per_host=own.per_host)
    selection = Selection({mutant.backend: load(mutant.backend)}, world=ranks, device="cpu", **chosen)
    return Run(replace(check, compare=partial(up_to_a_failure, check.compare)) for check in selection).rows()


def up_to_a_failure(compare: Any) -> Comparisons:
    """Comparisons, of which none is made after one that failed."""
    for label, worst in compare():
        yield label, worst
        if not worst.ratio < 1:
            return


# one for each check with ranks, or of a part of a case: the rest are all in a run of verify
WITH_ITS_CHECK = {
    each.checks or (CAUGHT_BY[each.name]["case"], CAUGHT_BY[each.name]["property"], CAUGHT_BY[each.name]["dtype"]): each
    for each in MUTANTS
    if each.component == EXCHANGE or re.search("--world|:", " ".join(each.checks))
    if each.checks or each.name in CAUGHT_BY
}.values()


# what needs a package of make test-slow alone is slow
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(each, marks=[pytest.mark.slow] * bool(each.package), id=each.name) for each in MUTANTS],
)
def test_a_mutant_is_caught_by_what_the_correct_code_passes(
    mutant: Mutant, monkeypatch: pytest.MonkeyPatch, forget_calls: Callable[[], None]
) -> None:
    skip_where_missing(mutant)
    # the record may be older than the mutant, or than the check
    first = recorded if mutant.name in CAUGHT_BY and not mutant.checks else checked
    if mutant in WITH_ITS_CHECK:
        found = {row["status"] for row in first(mutant)}
        assert "pass" in found
        assert found <= {"pass", "skip"}
        forget_calls()
    plant(mutant, monkeypatch)
    for row in chain(first(mutant), checked(mutant)):
        # a patch that no longer fits the code around it fails by itself
        assert not re.search("raised (Type|Attribute|Name)Error", row["reason"]), row
        if row["status"] == "fail":
            return
    pytest.fail("not caught")
