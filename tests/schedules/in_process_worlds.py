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
    """A communicator that writes down its messages of features and vectors, and which have been waited for.

    Attributes:
        log: a line for each.
        events: of each post, by receiver, bytes of features, of vectors and of numbers; of each wait the post's number.
    """

    def __init__(self, home: InProcess) -> None:
        self.home, self.log, self.events = home, list[str](), list[Any]()

    @property
    def count(self) -> Counter[str]:
        """How many there were of each kind."""
        return Counter(line.removeprefix("post ") for line in self.log if line.startswith("post "))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.home, name)

    def exchange(self, outgoing: Any, incoming: Any) -> Waited:
        """See ``Communicator``."""
        others = {rank: xs for rank, xs in outgoing.items() if rank != self.home.rank}
        # statistics are pairs, narrower than any features here
        kinds = [
            ["features" if x.ndim == 2 and x.shape[1] > 2 else "number" if x.shape == (1,) else str(x.ndim) for x in xs]
            for xs in others.values()
        ]
        sent = {rank: Counter[str]() for rank in others}
        for rank, names in zip(others, kinds, strict=True):
            for name, x in zip(names, others[rank], strict=True):
                sent[rank][name if len(name) > 1 else "vector"] += x.nbytes
        number, label = sum(isinstance(x, dict) for x in self.events), " ".join(next(iter(kinds), ()))
        self.log.append(f"post {label}")
        self.events.append(sent)

        def waited() -> None:
            self.log.append(f"have {label}")
            self.events.append(number)

        return Waited(self.home.exchange(outgoing, incoming), waited)


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
