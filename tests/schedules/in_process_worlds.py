"""Worlds of one process for the tests of the exchange: trials, and what properties say of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.schedules.placement import Placement
from contrastile.verify import cases
from contrastile.verify.shards import Cut


class Counting:
    """A communicator that counts its messages of features and vectors."""

    def __init__(self, home: InProcess) -> None:
        self.home, self.count = home, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.home, name)
        if name not in ("all_gather", "all_to_all", "exchange", "shift"):
            return found

        def counted(*call: Any) -> Any:
            what = call[0]
            if name == "exchange":
                # what goes to another rank
                what = next(xs for rank, xs in what.items() if rank != self.home.rank)
            elif name != "shift":
                what = [what[0] if name == "all_to_all" else what]
            kinds = ("number" if x.shape == (1,) else str(x.ndim) for x in what)
            self.count[f"{name} {' '.join(kinds)}"] += 1
            return found(*call)

        return counted


def cut(case: str, row_weights: Sequence[int], column_weights: Sequence[int], dtype: str = "float64") -> Cut:
    """A named case in parts."""
    return Cut.of(cases.build(case, dtype), row_weights, column_weights)


def placement(comm: InProcess, parts: Cut, exchange: str = "ring") -> Placement:
    """A rank's place in it."""
    return Placement(comm, exchange, "mean", parts.shards)  # type: ignore[arg-type]


def group(n: int, *, late: bool = False) -> InProcessGroup[object]:
    """Ranks of one process."""
    return InProcessGroup(n, late=late)
