"""What the ranks agree on before features travel: one small message of numbers, and text only where they differ."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar, cast

from contrastile.backends.arrays import ITEMSIZE, ArrayLibrary
from contrastile.backends.choice import choose
from contrastile.backends.contract import Array
from contrastile.comm import calls
from contrastile.comm.calls import Label
from contrastile.comm.communicator import Communicator, ExchangeError, MismatchError
from contrastile.comm.connect import connect
from contrastile.schedules import scalars
from contrastile.schedules.placement import SCHEDULES, Exchange, Placement, Reduction, Shards
from contrastile.schedules.sums import summed
from contrastile.schedules.timing import choose_exchange

T = TypeVar("T")

_log = logging.getLogger(__name__)
_BLOCKS = 8
_WELL, _FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Met:
    """What a rank learns from the others: all ranks' rows and columns, and the number of its own first column."""

    rows: int
    columns: int
    start: int
    placement: Placement | None


@dataclass(slots=True)
class Handshake:
    """The agreement of the ranks on one call of a loss. Without a group nothing is sent and nothing can disagree.

    Attributes:
        communicator: None for this process alone.
        exchange: what was asked for.
        reduction: see ``Placement``.
        settings: what must be the same on every rank, by name.
        placement: where this rank's part lies, once the ranks have met; None in a process alone.
        known: what has been found of the call's signature before: see ``contrastile.validation.Known``.
    """

    communicator: Communicator | None = None
    exchange: Exchange = "auto"
    reduction: Reduction = "mean"
    settings: dict[str, Any] = field(default_factory=dict)
    placement: Placement | None = None
    known: Any = None
    _met: bool = False
    _serial: int = 0

    @staticmethod
    def of(group: Any, exchange: str, reduction: str, **settings: Any) -> Handshake:
        """The handshake of a group; of None, of this process alone.

        Raises:
            ValueError, TypeError: ``group`` is not a group; without one, ``exchange`` or ``reduction`` is unknown.
            MismatchError, ExchangeError: see ``connect``.
        """
        if group is None:
            _check_settings(exchange, reduction)
            if exchange in SCHEDULES:
                raise ValueError(
                    f"group must be given with exchange={exchange!r}, got None; pass group='world', or drop exchange="
                )
            return ALONE
        # every rank must hear of an unknown setting: ``build`` raises
        agreed = {"exchange": exchange, "parameter_reduction": reduction} | settings
        return Handshake(connect(group), cast("Exchange", exchange), cast("Reduction", reduction), agreed)

    @property
    def alone(self) -> bool:
        """Whether there is no group."""
        return self.communicator is None

    def meet(
        self,
        arrays: ArrayLibrary,
        rows: Array,
        columns: Sequence[Array],
        *numbers: tuple[Any, Array],
        may_be_empty: bool = False,
        **settings: Any,
    ) -> Met:
        """Agree with the other ranks on everything that must be the same, and learn what each of them holds.

        Args:
            arrays: the features' library.
            rows: (m, d), this rank's; m may be 0.
            columns: this rank's column blocks.
            *numbers: scale and bias, each as the caller gave it and as a 0-d array. What lies on a device is compared
                there, when the features travel: see ``scalars``.
            may_be_empty: whether there may be no row or column at all.
            **settings: what else must be the same on every rank; anything that JSON can hold.

        Raises:
            MismatchError: the ranks differ, or did in the scale or bias of an earlier call, or there is no row or
                column at all; on every rank, with the same message.
            ExchangeError: a rank did not answer within the deadline.
        """
        if self.communicator is None:
            # sizes that vary stay so for a tracer
            return Met(rows.shape[0], sum(x.shape[0] for x in columns), 0, None)
        own = rows.shape[0], tuple(int(x.shape[0]) for x in columns)
        comm = self.communicator
        scalars.check(comm)
        dtype, device = arrays.dtype(rows), arrays.device(rows)
        if device not in comm.devices:
            raise ValueError(f"the group carries no arrays on {device}; move them to {' or '.join(comm.devices)}")
        if len(columns) > _BLOCKS:
            raise ValueError(
                f"the columns must be at most {_BLOCKS} blocks with a group, got {len(columns)}; join some"
            )
        # if only some ranks wanted a gradient, the others would wait for its messages
        wants = tuple(bool(getattr(x, "requires_grad", False)) for x in (rows, *columns, *(x for _, x in numbers)))
        agreed = {"width": int(rows.shape[1]), "dtype": dtype, "device": device, "column blocks": len(columns)}
        # torch alone has autograd, which records nothing inside of no_grad
        recorded = arrays.name == "torch" and bool(sys.modules["torch"].is_grad_enabled())
        agreed |= settings | self.settings | {"gradients wanted": wants if recorded else ()}
        backend = self.settings.get("backend", "auto")
        if backend == "auto":
            # what is installed may differ
            precision, guide = self.settings.get("precision", "auto"), settings.get("guide") is not None
            backend = choose(arrays.name, arrays.place(rows), dtype, precision, guide=guide)
            agreed["the backend that 'auto' takes (name one that every rank has)"] = backend
        places = tuple(arrays.device(x) if arrays.owns(x) else "a number" for x, _ in numbers)
        agreed["where scale and bias are"] = places
        # without waiting for a device
        given: list[Any] = [x if at in scalars.READABLE else 0.0 for (x, _), at in zip(numbers, places, strict=True)]
        values = [float(x.item() if hasattr(x, "item") else x) for x in given]
        record = self._record(agreed, _WELL, [own[0], *own[1]], values)
        label = self._label(str(settings.get("loss", "")))
        everyone = comm.agree(record, label)
        self._met = True
        held = everyone[:, -len(scalars.NAMES) :].view("float64")
        if (everyone[:, :2] != record[:2]).any() or not scalars.alike(held):
            self._explain(json.dumps(agreed | dict(zip(scalars.NAMES, values, strict=False))))
        sizes = everyone[:, 2 : 3 + len(columns)].tobytes()
        shards = _shards(sizes, len(everyone), 0 if may_be_empty else 1 + settings.get("in_batch", True))
        exchange = self._chosen(comm, shards, int(rows.shape[1]), dtype, device)
        unread = not scalars.READABLE.issuperset(places) and scalars.due(label.serial, exchange) and comm.size > 1
        self.placement = Placement(comm, exchange, self.reduction, shards, label, unread)
        return Met(sum(shards.rows), sum(shards.widths), self.placement.start, self.placement)

    def _chosen(self, comm: Communicator, shards: Shards, width: int, dtype: str, device: str) -> Any:
        if self.exchange == "local" and len(shards.rows) > 1:
            raise MismatchError(
                f"exchange='local' is for a world of one, got {len(shards.rows)} ranks; drop group= for a loss of each "
                "rank's own part, or use 'auto'"
            )
        if self.exchange == "two-level" and len(comm.hosts) == 1:
            return "gather"
        if self.exchange in SCHEDULES:
            return self.exchange
        choice = choose_exchange(shards, width, ITEMSIZE[dtype], on_gpus=device == "cuda", hosts=comm.hosts)
        _log.debug("exchange='auto' is %s: %s", choice.exchange, choice.reason)
        return choice.exchange

    def build(self, build: Callable[..., T], *args: Any) -> T:
        """``build(*args, self)``; what it raises before the ranks have met, they all raise.

        Raises:
            MismatchError: another rank could not build its part.
        """
        if self.communicator is None:
            return build(*args, self)
        try:
            _check_settings(self.exchange, self.reduction)
            return build(*args, self)
        except ExchangeError:
            raise
        except Exception as error:
            if not self._met:
                self._refuse(str(error), error)
            raise

    def confirm(self, reason: str | None) -> None:
        """Raise on every rank if any has a reason to; for checks that need the values.

        Raises:
            MismatchError: some rank has.
        """
        if self.communicator is None or self.communicator.size == 1:
            if reason is not None:
                raise ValueError(reason)
            return
        everyone = self.communicator.agree(self._record({}, _WELL if reason is None else _FAILED, []))
        if (everyone[:, 1] != _WELL).any():
            self._explain(json.dumps({"error": reason} if reason else {}))

    def count_in(self, arrays: ArrayLibrary, needles: Array, haystack: Array, *, of_rows: bool = True) -> Array:
        """How many elements of all ranks' haystacks equal each needle of this rank; the haystacks travel.

        Each rank's haystack is in rising order, and has one element for each of its rows, or of its columns.
        """
        if self.placement is None:
            return arrays.count_in(needles, haystack)
        found = None
        for _, part in self._every(self.placement, arrays, haystack, of_rows=of_rows):
            here = arrays.count_in(needles, part)
            found = here if found is None else found + here
        return found

    def dots_at(self, arrays: ArrayLibrary, rows: Array, columns: Sequence[Array], where: Array, dtype: str) -> Array:
        """Each row's dot product with the column of its number among all ranks', (m,); the columns travel.

        Without a gradient. A number that is no column's gives any.
        """
        found, placement = arrays.full((rows.shape[0],), 0.0, dtype, rows), self.placement
        parts: Iterable[tuple[int, Array]]
        if placement is None:
            parts = zip(accumulate((x.shape[0] for x in columns), initial=0), columns, strict=False)
        else:
            own = arrays.detached(arrays.concat(list(columns)))
            every = self._every(placement, arrays, own, of_rows=False)
            parts = ((placement.shards.start(rank), x) for rank, x in every)
        for start, x in parts:
            if x.shape[0]:
                at = where - start
                here = (at >= 0) & (at < x.shape[0])
                dots = arrays.row_dots(rows, arrays.take(x, arrays.where(here, at, 0)), dtype)
                found = arrays.where(here, dots, found)
        return found

    @staticmethod
    def _every(placement: Placement, arrays: ArrayLibrary, own: Array, *, of_rows: bool) -> Iterator[tuple[int, Array]]:
        """Every rank's array, with its number; each has an element for each of its rank's rows, or columns."""
        from contrastile.schedules.hosts import visits

        counts = placement.shards.rows if of_rows else placement.shards.widths

        def sizes(rank: int) -> tuple[int]:
            return (counts[rank],)

        for _, runs in visits(placement, arrays, [arrays.contiguous(own)], sizes):
            for run in runs:
                yield from ((owner, x) for owner, (x,) in run.parted(sizes).items())

    def total(self, arrays: ArrayLibrary, x: Array) -> Array:
        """The sum of a 0-d array over the ranks, in their order: the same bits on each."""
        return x if self.placement is None else summed(self.placement, arrays, x)[0]

    def _label(self, loss: str = "") -> Label:
        """Of this call's forward."""
        assert self.communicator is not None
        self._serial = self._serial or self.communicator.calls.begin()
        return Label(self._serial, "forward", loss)

    def _record(self, agreed: dict[str, Any], state: int, sizes: Sequence[int], numbers: Sequence[float] = ()) -> Any:
        import numpy as np

        room = len(scalars.NAMES)
        found = _digest(tuple(agreed.items())), state, *sizes, *[0] * (1 + _BLOCKS - len(sizes) + room)
        record = np.array(found, dtype=np.int64)
        record[-room:][: len(numbers)].view("float64")[:] = numbers
        return record

    def _refuse(self, reason: str, cause: Exception) -> None:
        """Tell the other ranks that this one cannot take part, and raise what they raise."""
        assert self.communicator is not None
        self._met = True
        if self.communicator.size == 1:
            raise cause
        self.communicator.agree(self._record({}, _FAILED, []), self._label())
        try:
            # what is no rank's alone is not said of one
            self._explain(json.dumps({"mismatch" if isinstance(cause, MismatchError) else "error": reason}))
        except MismatchError as error:
            raise error from cause

    def _explain(self, text: str) -> None:
        """Raise the same MismatchError on every rank."""
        assert self.communicator is not None
        # the ranks learn of a mismatch at different times, and hear of it now
        self.communicator.calls.unread.clear()
        told = [json.loads(each) for each in self.communicator.tell(text)]
        raise MismatchError(_difference(told, self.communicator.global_ranks))


@lru_cache(maxsize=64)
def _digest(agreed: tuple[tuple[str, Any], ...]) -> int:
    digest = hashlib.sha256(json.dumps(dict(agreed), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@lru_cache(maxsize=64)
def _shards(sizes: bytes, ranks: int, needed: int) -> Shards:
    """Who holds how much, from every rank's sizes; somebody must hold a row if 1 is needed, and a column too if 2.

    Raises:
        MismatchError: nobody does.
    """
    counts: Any = memoryview(sizes).cast("q", (ranks, len(sizes) // (8 * ranks))).tolist()
    shards = Shards(tuple(c[0] for c in counts), tuple(tuple(c[1:]) for c in counts))
    for what, number in (("row", sum(shards.rows)), ("column", sum(shards.widths)))[:needed]:
        if number == 0:
            raise MismatchError(f"the ranks must hold at least one {what} together, got none; skip empty batches")
    return shards


def _difference(parts: list[dict[str, Any]], global_ranks: Sequence[int]) -> str:
    """The first thing in which the ranks differ, in words."""
    for rank, part in zip(global_ranks, parts, strict=True):
        if "mismatch" in part:
            return str(part["mismatch"])
        if "error" in part:
            return f"rank {rank}: {part['error']}"
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [json.dumps(part.get(name)) for part in parts]
        if len(set(values)) > 1:
            got = calls.held(values, global_ranks)
            return f"{name} must be the same on every rank, got {got}; make the same call on every rank"
    return "the ranks differ in what they were asked to do; make the same call on every rank"


ALONE = Handshake()
"""A process alone. It never changes."""


def _check_settings(exchange: Any, reduction: Any) -> None:
    for name, value, known in (
        ("exchange", exchange, ("auto", *SCHEDULES, "local")),
        ("parameter_reduction", reduction, ("mean", "sum")),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}; see contrastile.plan.Settings")
