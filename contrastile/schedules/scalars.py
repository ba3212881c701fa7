"""Scale and bias, which every rank must hold alike: on a device the ranks compare them there, and no host waits for it.

Where ranks hold different ones, each of them takes NaN in their place: the loss and every gradient are NaN on all
ranks. The host has the values some time later, and the next call of the group raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array
from contrastile.comm import buffers, calls
from contrastile.comm.communicator import Communicator, MismatchError
from contrastile.schedules.placement import Placement, Schedule
from contrastile.schedules.problem import Problem
from contrastile.schedules.sums import gathered, placed

NAMES = "scale", "bias"
READABLE = frozenset(("cpu", "a number"))
"""Where the host can read one at once, and the handshake compares it."""
OFTEN = 16
"""Of calls so small that each rank computes all, the first ones compare, and then one of so many: beside those a
comparison takes time, and ranks that differ go on to differ."""
# a processor may round a rank's exp in another way
_SAME = 2.0**-20


def alike(values: Array) -> Array:
    """Whether each rank's value, along the first axis, is the first rank's but for a rounding; NaN is like nothing."""
    return (abs(values - values[0]) <= _SAME * abs(values[0])).all()


def due(serial: int, exchange: Schedule) -> bool:
    """Whether a call of this number compares its scale and bias; every rank comes to the same answer."""
    return exchange != "replicate" or serial <= OFTEN or serial % OFTEN == 0


def _numbers(problem: Problem) -> dict[str, Array]:
    """The scale and the bias of a problem, by name, where they lie on a device and this call is to compare them."""
    if problem.placement is None or not problem.placement.unread:
        return {}
    return {name: x for name in NAMES if (x := getattr(problem, name)) is not None}


def compared(problem: Problem, arrays: ArrayLibrary) -> Problem:
    """``checked``, by one small message of its own where there is anything to compare.

    Raises:
        ExchangeError: a rank did not answer within the deadline.
    """
    own = parts(problem, arrays)
    return checked(problem, arrays, gathered(placed(problem), arrays, *own)) if own else problem


def parts(problem: Problem, arrays: ArrayLibrary) -> list[tuple[Array, Sequence[int]]]:
    """What is to be compared, as ``sums.gathered`` takes it, with others or alone; ``checked`` takes what it gives."""
    ones = () if problem.placement is None else (1,) * problem.placement.size
    return [(arrays.cast(x, "float64").reshape((1,)), ones) for x in _numbers(problem).values()]


def checked(problem: Problem, arrays: ArrayLibrary, whole: Sequence[Array]) -> Problem:
    """The problem, with NaN for a scale or a bias that the ranks do not hold alike; ``check`` says so later.

    ``whole``: every rank's, (ranks,) for each; empty where nothing was compared.
    """
    if not whole:
        return problem
    numbers, placement = _numbers(problem), placed(problem)
    read(placement, dict(zip(numbers, whole, strict=True)))
    pairs = zip(numbers.items(), whole, strict=True)
    own = {name: arrays.where(alike(every), x, float("nan")) for (name, x), every in pairs}
    return replace(problem, placement=replace(placement, unread=False), **own)


def read(placement: Placement, every: Mapping[str, Array]) -> None:
    """Start to copy every rank's numbers, by name, to the host, for ``check``. Of a graph, who replays it does."""
    reads = {name: buffers.read_later(x) for name, x in every.items()}
    calls = placement.communicator.calls
    if None in reads.values():
        calls.captured = every
    elif reads:
        calls.unread.append((placement.call, reads))


def check(communicator: Communicator) -> None:
    """Raise if the ranks are known by now to have held different numbers in an earlier call.

    Raises:
        MismatchError: they have; it is not said again.
    """
    unread = communicator.calls.unread
    while unread:
        label, reads = unread[0]
        found = {name: read() for name, read in reads.items()}
        if any(values is None for values in found.values()):
            return
        unread.pop(0)
        for name, values in found.items():
            # what is NaN everywhere is the caller's
            if not alike(values) and not (values != values).all():
                got = calls.held([*map(str, values.tolist())], communicator.global_ranks)
                raise MismatchError(
                    f"{name} must be the same on every rank, got {got} in call {label.serial} "
                    f"({label.loss}), whose loss and gradients are NaN for that; start every rank from "
                    f"one {name}, and average its gradient as DDP does"
                )
