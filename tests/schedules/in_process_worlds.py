"""Worlds of one process for the tests of the exchange: trials, and what properties say of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contrastile.backends.contract import Backend, Block
from contrastile.comm.inprocess import InProcess, InProcessGroup
from contrastile.verify.wrapped import around


@dataclass
class Waited:
    """A message whose wait is written down."""

    pending: Any
    note: Callable[[], None]

    def wait(self) -> None:
        self.pending.wait()
        self.note()


class Counting:
    """A communicator that writes down its messages of features and vectors, and which have been waited for."""

    def __init__(self, home: InProcess) -> None:
        self.home, self.log = home, list[str]()

    @property
    def count(self) -> Counter[str]:
        """How many there were of each kind."""
        return Counter(line.removeprefix("post ") for line in self.log if line.startswith("post "))

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
            # statistics are pairs, narrower than any features here
            wide = ("features" if x.ndim == 2 and x.shape[1] > 2 else str(x.ndim) for x in what)
            kinds = ("number" if x.shape == (1,) else kind for x, kind in zip(what, wide, strict=True))
            label = f"{name} {' '.join(kinds)}"
            self.log.append(f"post {label}")
            return Waited(found(*call), lambda: self.log.append(f"have {label}"))

        return counted


def errors(n: int, *calls: Callable[[Any], Any]) -> list[list[str]]:
    """What each rank's calls raised, one after the other; "" where nothing. No feature may have moved by then."""

    def program(comm: InProcess) -> list[str]:
        found = []
        for call in calls:
            guarded = Counting(comm)
            try:
                call(guarded)
            except Exception as error:
                assert not guarded.count
                found.append(f"{type(error).__name__}: {error}")
            else:
                found.append("")
        return found

    return InProcessGroup[list[str]](n).run(program)


def measured(backend: Backend) -> tuple[Backend, list[int]]:
    """A backend that adds up the areas of the blocks of its forward and of its backward."""
    areas = [0, 0]

    def call(primitive: Any, block: Block, *rest: Any) -> Any:
        areas[primitive is backend.gradients] += block.rows.shape[0] * block.columns.shape[0]
        return primitive(block, *rest)

    return around(backend, call, "lse", "gradients"), areas
