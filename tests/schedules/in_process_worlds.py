"""Worlds of one process for the tests of the exchange: trials, and what properties say of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from contrastile.backends.registry import load
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules.placement import Placement
from contrastile.verify import cases
from contrastile.verify.runner import Row, Run
from contrastile.verify.selection import Selection
from contrastile.verify.shards import Cut
from contrastile.verify.worlds import Threads

WORLDS = (1, 2, 3, 4, 5, 8)


def rows(
    n: int,
    properties: Sequence[str],
    case_names: Sequence[str],
    *,
    backend: str = "numpy",
    dtypes: Sequence[str] = ("float64",),
    examples: int = 20,
) -> list[Row]:
    """What ``contrastile verify --world n`` says."""
    chosen = Selection({backend: load(backend)}, case_names, properties, dtypes, examples=examples, world=Threads(n))
    return list(Run(chosen).rows())


def failing(found: Iterable[Row]) -> set[str]:
    """The properties that some row of theirs fails."""
    return {row["property"] for row in found if row["status"] == "fail"}


def cut(case: str, row_weights: Sequence[int], column_weights: Sequence[int], dtype: str = "float64") -> Cut:
    """A named case in parts."""
    return Cut.of(cases.build(case, dtype).problem, row_weights, column_weights)


def placement(comm: InProcess, parts: Cut, exchange: str = "ring") -> Placement:
    """A rank's place in it."""
    return Placement(comm, exchange, "mean", parts.shards)  # type: ignore[arg-type]


def group(n: int, *, late: bool = False) -> InProcessGroup[object]:
    """Ranks of one process."""
    return InProcessGroup(n, late=late)
