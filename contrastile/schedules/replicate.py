"""The replicated schedule: every rank gathers all features and computes the whole loss, as a process alone does.

One message in the forward pass, none in the backward pass: each rank takes its own rows of the whole gradient. Every
rank computes all pairs, so it is for problems that take less time than the messages of a gather or a ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contrastile.backends.arrays import library_of
from contrastile.backends.contract import Array
from contrastile.comm import buffers
from contrastile.schedules import scalars
from contrastile.schedules.placement import Placement
from contrastile.schedules.schedule import phase


class ReplicateError(Exception):
    """No error: the ranks have met, and what they compute is the whole loss, of arguments that ``collect`` gives.

    Attributes:
        placement: of this rank's part.
        backend: its name, the same on every rank.
    """

    def __init__(self, placement: Placement, backend: str) -> None:
        super().__init__("the ranks are to compute the whole loss")
        self.placement, self.backend = placement, backend


def sizes(placement: Placement, count: int, names: Sequence[str]) -> list[tuple[int, ...]]:
    """How many rows of each per-sample argument each rank holds.

    Args:
        placement: of a loss of one block of columns.
        count: how many positional ones there are.
        names: of those given by name.
    """
    rows, widths = placement.shards.rows, placement.shards.widths
    if placement.loss == "nt_xent":
        # a rank's rows are both views of its samples
        rows = widths = tuple(m // 2 for m in rows)
    return [*(rows, widths)[:count], *(widths if name == "column_ids" else rows for name in names)]


def collect(
    placement: Placement, own: Sequence[Array], counts: Sequence[Sequence[int]], numbers: Mapping[str, Array]
) -> tuple[list[Array], dict[str, Array]]:
    """All ranks' arrays, each joined in the order of the ranks, and the numbers, compared: see ``scalars.checked``.

    One message for all.

    Args:
        placement: of the problem.
        own: this rank's arrays of one library.
        counts: for each of them, its rows on each rank.
        numbers: scale and bias where they lie on a device, of one element each, by name.

    Raises:
        ExchangeError: a rank did not answer within the deadline.
    """
    arrays, n = library_of(own[0]), placement.size
    own = [*own, *(arrays.cast(x, "float64").reshape((1,)) for x in numbers.values())]
    counts = [*counts, *[(1,) * n] * len(numbers)]
    wholes = [arrays.empty((sum(each), *x.shape[1:]), arrays.dtype(x), x) for x, each in zip(own, counts, strict=True)]
    parts = [buffers.split(whole, each) for whole, each in zip(wholes, counts, strict=True)]
    leaving = [arrays.contiguous(x) for x in own]
    arriving: dict[int, list[Any]] = {r: [part[r] for part in parts] for r in range(n)}
    with phase(placement):
        placement.communicator.exchange(dict.fromkeys(range(n), leaving), arriving).wait()
    count = len(own) - len(numbers)
    return wholes[:count], scalars.checked(placement, arrays, numbers, wholes[count:])
