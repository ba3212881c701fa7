"""The agreement of the ranks before features travel: one small message of numbers, and text only if they differ."""

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
from contrastile.schedules.sums import all_reduce
from contrastile.schedules.timing import choose_exchange

T = TypeVar("T")

_log = logging.getLogger(__name__)
_MAX_BLOCKS = 8
_OK, _FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Agreement:
    """The numbers of rows and of columns of all ranks, the index of this rank's first column, and its placement."""

    rows: int
    columns: int
    start: int
    placement: Placement | None


@dataclass(slots=True)
class Handshake:
    """The agreement of the ranks on one call of a loss. Without a group nothing is sent and nothing can disagree.

    Attributes:
        communicator: the group's communicator; None for this process alone.
        exchange: the exchange that the caller asked for.
        reduction: see ``Placement``.
        settings: the values that must be the same on every rank, by name.
        placement: this rank's placement, after ``meet``; None in a process alone.
        known: the facts that earlier calls of the same signature have found: see ``contrastile.validation.Known``.
    """

    communicator: Communicator | None = None
    exchange: Exchange = "auto"
    reduction: Reduction = "mean"
    settings: dict[str, Any] = field(default_factory=dict)
    placement: Placement | None = None
    known: Any = None
    _has_met: bool = False
    _serial: int = 0

    @staticmethod
    def of(group: Any, exchange: str, reduction: str, **settings: Any) -> Handshake:
        """The handshake of a group, or of this process alone if the group is None.

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
        # ``build`` raises for an unknown setting, because every rank must raise
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
    ) -> Agreement:
        """Agree with the other ranks on everything that must be the same, and learn the sizes of their parts.

        Args:
            arrays: the features' library.
            rows: (m, d), this rank's; m may be 0.
            columns: this rank's column blocks.
            *numbers: scale and bias, each as the caller gave it and as a 0-d array. Those on a device are compared
                there, when the features travel: see ``scalars``.
            may_be_empty: whether the ranks together may hold no row or no column.
            **settings: other values that must be the same on every rank; JSON must be able to hold them.

        Raises:
            MismatchError: the ranks differ, or the scale or bias of an earlier call differed, or the ranks together
                hold no row or no column; on every rank, with the same message.
            ExchangeError: a rank did not answer within the deadline.
        """
        if self.communicator is None:
            # no ``int``: a tracer keeps sizes symbolic
            return Agreement(rows.shape[0], sum(x.shape[0] for x in columns), 0, None)
        own_counts = rows.shape[0], tuple(int(x.shape[0]) for x in columns)
        comm = self.communicator
        scalars.check(comm)
        dtype, device = arrays.dtype(rows), arrays.device(rows)
        if device not in comm.devices:
            raise ValueError(f"the group carries no arrays on {device}; move them to {' or '.join(comm.devices)}")
        if len(columns) > _MAX_BLOCKS:
            raise ValueError(
                f"the columns must be at most {_MAX_BLOCKS} blocks with a group, got {len(columns)}; join some"
            )
        # all ranks must want the same gradients: otherwise some would wait for messages that the others never send
        flags = tuple(bool(getattr(x, "requires_grad", False)) for x in (rows, *columns, *(x for _, x in numbers)))
        agreed = {"width": int(rows.shape[1]), "dtype": dtype, "device": device, "column blocks": len(columns)}
        # only torch has autograd, which records nothing inside no_grad
        is_recording = arrays.name == "torch" and bool(sys.modules["torch"].is_grad_enabled())
        agreed |= settings | self.settings | {"gradients wanted": flags if is_recording else ()}
        backend = self.settings.get("backend", "auto")
        if backend == "auto":
            # the ranks may have different packages installed
            precision, guide = self.settings.get("precision", "auto"), settings.get("guide") is not None
            backend = choose(arrays.name, arrays.place(rows), dtype, precision, guide=guide)
            agreed["the backend that 'auto' takes (name one that every rank has)"] = backend
        locations = tuple(arrays.device(x) if arrays.owns(x) else "a number" for x, _ in numbers)
        agreed["where scale and bias are"] = locations
        # read no number on a device, because the host would wait for it
        raw: list[Any] = [x if at in scalars.READABLE else 0.0 for (x, _), at in zip(numbers, locations, strict=True)]
        values = [float(x.item() if hasattr(x, "item") else x) for x in raw]
        record = self._record(agreed, _OK, [own_counts[0], *own_counts[1]], values)
        label = self._label(str(settings.get("loss", "")))
        records = comm.agree(record, label)
        self._has_met = True
        all_values = records[:, -len(scalars.NAMES) :].view("float64")
        if (records[:, :2] != record[:2]).any() or not scalars.alike(all_values):
            self._raise_mismatch(json.dumps(agreed | dict(zip(scalars.words(label.loss), values, strict=False))))
        sizes = records[:, 2 : 3 + len(columns)].tobytes()
        shards = _shards(sizes, len(records), 0 if may_be_empty else 1 + settings.get("in_batch", True))
        exchange = self._resolve_exchange(comm, shards, int(rows.shape[1]), dtype, device)
        is_unread = not scalars.READABLE.issuperset(locations) and scalars.due(label.serial, exchange) and comm.size > 1
        self.placement = Placement(comm, exchange, self.reduction, shards, label, is_unread)
        return Agreement(sum(shards.rows), sum(shards.widths), self.placement.start, self.placement)

    def _resolve_exchange(self, communicator: Communicator, shards: Shards, width: int, dtype: str, device: str) -> Any:
        if self.exchange == "local" and len(shards.rows) > 1:
            raise MismatchError(
                f"exchange='local' is for a world of one, got {len(shards.rows)} ranks; drop group= for a loss of each "
                "rank's own part, or use 'auto'"
            )
        if self.exchange == "two-level" and len(communicator.hosts) == 1:
            return "gather"
        if self.exchange in SCHEDULES:
            return self.exchange
        choice = choose_exchange(shards, width, ITEMSIZE[dtype], on_gpus=device == "cuda", hosts=communicator.hosts)
        _log.debug("exchange='auto' is %s: %s", choice.exchange, choice.reason)
        return choice.exchange

    def build(self, build: Callable[..., T], *args: Any) -> T:
        """``build(*args, self)``. If it raises before the ranks have met, every rank raises.

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
            if not self._has_met:
                self._withdraw(str(error), error)
            raise

    def confirm(self, reason: str | None) -> None:
        """Raise on every rank if any rank gives a reason; for checks that need the values.

        Raises:
            MismatchError: some rank gave a reason.
        """
        if self.communicator is None or self.communicator.size == 1:
            if reason is not None:
                raise ValueError(reason)
            return
        records = self.communicator.agree(self._record({}, _OK if reason is None else _FAILED, []))
        if (records[:, 1] != _OK).any():
            self._raise_mismatch(json.dumps({"error": reason} if reason else {}))

    def count_in(self, arrays: ArrayLibrary, needles: Array, haystack: Array, *, of_rows: bool = True) -> Array:
        """The number of elements of all ranks' haystacks that equal each needle of this rank; the haystacks travel.

        Each rank's haystack is sorted in rising order, and has one element for each of its rows, or of its columns.
        """
        if self.placement is None:
            return arrays.count_in(needles, haystack)
        count = None
        for _, rank_haystack in self._visit(self.placement, arrays, haystack, of_rows=of_rows):
            rank_count = arrays.count_in(needles, rank_haystack)
            count = rank_count if count is None else count + rank_count
        return count

    def dots_at(self, arrays: ArrayLibrary, rows: Array, columns: Sequence[Array], indices: Array, dtype: str) -> Array:
        """Each row's dot product with the column at its index among all ranks' columns, (m,); the columns travel.

        The result has no gradient. It is undefined for an index of no column.
        """
        dots, placement = arrays.full((rows.shape[0],), 0.0, dtype, rows), self.placement
        parts: Iterable[tuple[int, Array]]
        if placement is None:
            parts = zip(accumulate((x.shape[0] for x in columns), initial=0), columns, strict=False)
        else:
            own_columns = arrays.detached(arrays.concat(list(columns)))
            rank_columns = self._visit(placement, arrays, own_columns, of_rows=False)
            parts = ((placement.shards.start(rank), x) for rank, x in rank_columns)
        for start, x in parts:
            if x.shape[0]:
                local_indices = indices - start
                is_inside = (local_indices >= 0) & (local_indices < x.shape[0])
                rank_dots = arrays.row_dots(rows, arrays.take(x, arrays.where(is_inside, local_indices, 0)), dtype)
                dots = arrays.where(is_inside, rank_dots, dots)
        return dots

    @staticmethod
    def _visit(placement: Placement, arrays: ArrayLibrary, own: Array, *, of_rows: bool) -> Iterator[tuple[int, Array]]:
        """Each rank and its array, which has an element for each of the rank's rows, or columns."""
        from contrastile.schedules.hosts import visits

        counts = placement.shards.rows if of_rows else placement.shards.widths

        def sizes(rank: int) -> tuple[int]:
            return (counts[rank],)

        for _, runs in visits(placement, arrays, [arrays.contiguous(own)], sizes):
            for run in runs:
                yield from ((owner, x) for owner, (x,) in run.parted(sizes).items())

    def total(self, arrays: ArrayLibrary, x: Array) -> Array:
        """The sum of a 0-d array over the ranks, in their order: the same bits on each."""
        return x if self.placement is None else all_reduce(self.placement, arrays, x)[0]

    def _label(self, loss: str = "") -> Label:
        """The label of this call's forward pass."""
        assert self.communicator is not None
        self._serial = self._serial or self.communicator.calls.begin()
        return Label(self._serial, "forward", loss)

    def _record(self, agreed: dict[str, Any], state: int, sizes: Sequence[int], numbers: Sequence[float] = ()) -> Any:
        import numpy as np

        count = len(scalars.NAMES)
        fields = _digest(tuple(agreed.items())), state, *sizes, *[0] * (1 + _MAX_BLOCKS - len(sizes) + count)
        record = np.array(fields, dtype=np.int64)
        record[-count:][: len(numbers)].view("float64")[:] = numbers
        return record

    def _withdraw(self, reason: str, cause: Exception) -> None:
        """Tell the other ranks that this one cannot take part, and raise the same error as they do."""
        assert self.communicator is not None
        self._has_met = True
        if self.communicator.size == 1:
            raise cause
        self.communicator.agree(self._record({}, _FAILED, []), self._label())
        try:
            # a mismatch concerns all ranks, so its message names no single rank
            self._raise_mismatch(json.dumps({"mismatch" if isinstance(cause, MismatchError) else "error": reason}))
        except MismatchError as error:
            raise error from cause

    def _raise_mismatch(self, text: str) -> None:
        """Raise the same MismatchError on every rank."""
        assert self.communicator is not None
        # numbers of earlier calls arrive at different times on the ranks, which all raise this error now instead
        self.communicator.calls.unread.clear()
        answers = [json.loads(answer) for answer in self.communicator.tell(text)]
        raise MismatchError(_describe_difference(answers, self.communicator.global_ranks))


@lru_cache(maxsize=64)
def _digest(agreed: tuple[tuple[str, Any], ...]) -> int:
    digest = hashlib.sha256(json.dumps(dict(agreed), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


@lru_cache(maxsize=64)
def _shards(sizes: bytes, ranks: int, needed: int) -> Shards:
    """The shards of all ranks, from their sizes; the ranks must hold a row if ``needed`` is 1, and a column too if 2.

    Raises:
        MismatchError: the ranks hold none.
    """
    counts: Any = memoryview(sizes).cast("q", (ranks, len(sizes) // (8 * ranks))).tolist()
    shards = Shards(tuple(c[0] for c in counts), tuple(tuple(c[1:]) for c in counts))
    for noun, number in (("row", sum(shards.rows)), ("column", sum(shards.widths)))[:needed]:
        if number == 0:
            raise MismatchError(f"the ranks must hold at least one {noun} together, got none; skip empty batches")
    return shards


def _describe_difference(answers: list[dict[str, Any]], global_ranks: Sequence[int]) -> str:
    """A sentence on the first difference between the ranks."""
    for rank, answer in zip(global_ranks, answers, strict=True):
        if "mismatch" in answer:
            return str(answer["mismatch"])
        if "error" in answer:
            return f"rank {rank}: {answer['error']}"
    for name in dict.fromkeys(name for answer in answers for name in answer):
        values = [json.dumps(answer.get(name)) for answer in answers]
        if len(set(values)) > 1:
            held = calls.held(values, global_ranks)
            return f"{name} must be the same on every rank, got {held}; make the same call on every rank"
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
