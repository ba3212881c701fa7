"""Scale and bias, which must be equal on all ranks: those on a device are compared there, and no host waits for it.

If a value differs between the ranks, each rank replaces it by NaN, so that the loss and every gradient are NaN on all
ranks. The host receives the values some time later, and the group's next call raises.
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
"""The fields of a problem that are compared."""
READABLE = frozenset(("cpu", "a number"))
"""Where a number lies that the host can read at once, so that the handshake compares it."""
PERIOD = 16
"""Replicated calls compare in the first PERIOD calls, and then in one of PERIOD: beside so small a call a comparison
takes long, and a difference between ranks persists."""
# processors may round exp differently
_TOLERANCE = 2.0**-20


def words(loss: str) -> tuple[str, str]:
    """The words for ``NAMES`` in the messages of a loss: only the sigmoid loss has a bias."""
    return "scale", "bias" if loss == "sigmoid_loss" else "teacher[2]"


def alike(values: Array) -> Array:
    """Whether all ranks' values, along the first axis, equal the first one's up to rounding; NaN equals no value."""
    return (abs(values - values[0]) <= _TOLERANCE * abs(values[0])).all()


def due(serial: int, exchange: Schedule) -> bool:
    """Whether the call with this serial number compares its scale and bias; the same on every rank."""
    return exchange != "replicate" or serial <= PERIOD or serial % PERIOD == 0


def _numbers(problem: Problem) -> dict[str, Array]:
    """The scale and the bias of a problem, by name, if they lie on a device and this call compares them."""
    if problem.placement is None or not problem.placement.unread:
        return {}
    return {name: x for name in NAMES if (x := getattr(problem, name)) is not None}


def compared(problem: Problem, arrays: ArrayLibrary) -> Problem:
    """``checked``, after one small message if there is anything to compare.

    Raises:
        ExchangeError: a rank did not answer within the deadline.
    """
    sent = parts(problem, arrays)
    return checked(problem, arrays, gathered(placed(problem), arrays, *sent)) if sent else problem


def parts(problem: Problem, arrays: ArrayLibrary) -> list[tuple[Array, Sequence[int]]]:
    """The parts for ``sums.gathered`` of the numbers to compare; ``checked`` takes the gathered arrays."""
    counts = () if problem.placement is None else (1,) * problem.placement.size
    return [(arrays.cast(x, "float64").reshape((1,)), counts) for x in _numbers(problem).values()]


def checked(problem: Problem, arrays: ArrayLibrary, gathered_numbers: Sequence[Array]) -> Problem:
    """The problem, with NaN for a scale or a bias that differs between ranks; ``check`` raises later.

    ``gathered_numbers`` has all ranks' values, (ranks,), of each number; it is empty if nothing was compared.
    """
    if not gathered_numbers:
        return problem
    numbers, placement = _numbers(problem), placed(problem)
    read(placement, dict(zip(numbers, gathered_numbers, strict=True)))
    pairs = zip(numbers.items(), gathered_numbers, strict=True)
    replacements = {name: arrays.where(alike(values), x, float("nan")) for (name, x), values in pairs}
    return replace(problem, placement=replace(placement, unread=False), **replacements)


def read(placement: Placement, values: Mapping[str, Array]) -> None:
    """Start to copy all ranks' numbers, by name, to the host, for ``check``. A graph's replay starts its copies."""
    reads = {name: buffers.read_later(x) for name, x in values.items()}
    calls = placement.communicator.calls
    if None in reads.values():
        calls.captured = values
    elif reads:
        calls.unread.append((placement.call, reads))


def check(communicator: Communicator) -> None:
    """Raise if a number of an earlier call has reached the host and differs between ranks.

    Raises:
        MismatchError: a number differs; each call's numbers are reported once.
    """
    unread = communicator.calls.unread
    while unread:
        label, reads = unread[0]
        word: dict[str, str] = dict(zip(NAMES, words(label.loss), strict=True))
        numbers = {word[name]: read() for name, read in reads.items()}
        if any(values is None for values in numbers.values()):
            return
        unread.pop(0)
        for name, values in numbers.items():
            # NaN on all ranks is the caller's own value
            if not alike(values) and not (values != values).all():
                held = calls.held([*map(str, values.tolist())], communicator.global_ranks)
                raise MismatchError(
                    f"{name} must be the same on every rank, got {held} in call {label.serial} "
                    f"({label.loss}), whose loss and gradients are NaN for that; start every rank from "
                    f"one {name}, and average its gradient as DDP does"
                )
