# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""CUDA graphs for small problems, whose kernels take longer to launch than to run.

A call signature (shapes, dtypes, settings, stream) that repeats is captured, and replayed from then on: inputs are
copied to where the graph reads them, outputs to the caller's memory. The kernels and their order are the same, and so
are the bits. ``replayed`` does so for the primitives of a backend, which ranks call between their messages;
``contrastile.autograd.steps`` for the whole steps of a process alone.

Graphs of one stream share the memory between their kernels; it stays reserved, as do the inputs and outputs of each
graph: O(b d) bytes. At most ``MOST`` signatures are held, and CONTRASTILE_GRAPHS=0 has none captured.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache, wraps
from typing import Any, Generic, TypeVar

import torch

from contrastile.backends.arrays import ArrayLibrary, TorchArrays, transfer, working_for
from contrastile.backends.contract import (
    Array,
    Backend,
    Block,
    ColumnForm,
    Finished,
    Options,
    Pairs,
    SideStatistics,
    SideWeights,
    Statistics,
    Weights,
)
from contrastile.backends.settings import VARIABLES

Tensors = Sequence[Any]
"""Tensors on one GPU; None stays None."""

Where = tuple[int, int]
"""A device and a stream."""

WORK, FEATURES = 1 << 38, 1 << 26
"""Largest problem that is replayed: rows x columns x width, and numbers in its features."""

SETTING = "CONTRASTILE_GRAPHS"
"""The environment variable that turns graphs off: 0."""

MOST = 8
"""Signatures held; the least recently used is evicted first."""

WORTH = 4
"""A signature that is evicted before this many replays is never captured again: otherwise more signatures in turn than
are held would be captured for ever."""

_BEFORE = 2
"""Launched calls of a signature before one is captured."""

_KNOWN = 64
"""Call signatures that are counted."""

_log = logging.getLogger(__name__)
_sides: dict[int, Any] = {}


def is_plain() -> bool:
    """Whether this call on a GPU is neither under capture nor in inference mode."""
    return (
        not torch.is_inference_mode_enabled()
        and not torch.cuda.is_current_stream_capturing()
        and hasattr(torch._C, "_cuda_getCurrentRawStream")
    )


def may_be_captured() -> bool:
    """``is_plain``, and graphs are not turned off."""
    return os.environ.get(SETTING, "1") != "0" and is_plain()


def can_capture(x: Any) -> bool:
    """``may_be_captured``, and the tensor is on the current GPU."""
    return x.get_device() >= 0 and may_be_captured() and x.get_device() == torch.cuda.current_device()


def fits(rows: Any, columns: int) -> bool:
    """Whether a problem of these rows and so many columns is small enough to be replayed."""
    m, d = rows.shape
    return bool(rows.is_cuda) and 0 < m * columns * d <= WORK and (m + columns) * d <= FEATURES


_LARGE = 2**18
"""Elements from which a tensor is copied by itself: one launch for several gives few blocks to each."""


class Copies:
    """Copies into tensors, or of them: one launch for all small ones of a dtype."""

    def __init__(self, into: Sequence[Any]) -> None:
        kinds: dict[Any, list[int]] = {}
        self._alone: list[int] = []
        for i, x in enumerate(into):
            if x.numel() >= _LARGE:
                self._alone.append(i)
            elif x.numel():
                kinds.setdefault(x.dtype, []).append(i)
        self._groups = list(kinds.values())
        self.into = into

    def __call__(self, sources: Sequence[Any], into: Sequence[Any] | None = None) -> None:
        """Copy ``sources`` into the tensors, or into others like them."""
        targets = self.into if into is None else into
        for i in self._alone:
            targets[i].copy_(sources[i])
        for group in self._groups:
            torch._foreach_copy_([targets[i] for i in group], [sources[i] for i in group])

    def copied(self) -> list[Any]:
        """The tensors in memory of the caller's."""
        mine = [torch.empty_like(x) for x in self.into]
        self(self.into, mine)
        return mine


def record(where: Where, actions: Sequence[Callable[[], Tensors]], pool: Any = None) -> tuple[list[Any], list[Tensors]]:
    """Capture each action in a graph of its own; the graphs share memory.

    Every action runs once before, so that nothing is loaded or compiled under capture.

    Args:
        where: device and stream. Graphs of one stream run one after the other, so they share temporary memory.
        actions: each queues kernels on the current stream and gives tensors, which stay where they are.
        pool: a graph's of the same stream that shares its memory too, or None.

    Returns:
        The graphs, and what the captured actions gave.

    Raises:
        RuntimeError: something that was queued cannot be captured.
    """
    device, _ = where
    side = _sides.get(device)
    if side is None:
        side = _sides[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graphs: list[Any] = []
    found: list[Tensors] = []
    current = torch.cuda.current_stream(device)
    side.wait_stream(current)
    try:
        with torch.cuda.stream(side):
            for action in actions:
                action()
            for action in actions:
                graph: Any = torch.cuda.CUDAGraph()
                shared = {} if pool is None else {"pool": pool}
                # other threads may go on allocating and synchronising
                graph.capture_begin(**shared, capture_error_mode="thread_local")
                try:
                    found.append(action())
                finally:
                    graph.capture_end()
                graphs.append(graph)
                pool = graph.pool()
    finally:
        current.wait_stream(side)
    return graphs, found


class Captured:
    """The graphs of a call signature.

    Attributes:
        where: the device and the stream on which it is replayed.
        pool: of its graphs' memory.
        replays: how many there were.
    """

    pool: Any

    def __init__(self, where: Where) -> None:
        self.where, self.replays = where, 0


C = TypeVar("C", bound=Captured)


class Signatures(Generic[C]):
    """The call signatures that have been seen.

    Attributes:
        seen: how often each was called before it was captured; None where a capture failed or did not pay.
        captured: by call signature, the most recently used last.
    """

    def __init__(self) -> None:
        self.seen: dict[Hashable, int | None] = {}
        self.captured: dict[Hashable, C] = {}
        self._counts = threading.Lock()

    def find(self, key: Hashable) -> tuple[C | None, bool]:
        """Its captured graphs, or None and whether they are due; counts this call."""
        with self._counts:
            found = self.captured.pop(key, None)
            if found is not None:
                self.captured[key] = found
                return found, False
            count = self.seen.pop(key, 0)
            if count is not None and count >= _BEFORE:
                return None, True
            self.seen[key] = None if count is None else count + 1
            if len(self.seen) > _KNOWN:
                del self.seen[next(iter(self.seen))]
            return None, False

    def refuse(self, key: Hashable) -> None:
        """Launch it from now on."""
        with self._counts:
            self.seen[key] = None

    def capture(self, key: Hashable, where: Where, make: Callable[[Any], C]) -> C | None:
        """The graphs that ``make(pool or None)`` captures; None where it raises."""
        with self._counts:
            if len(self.captured) >= MOST:
                oldest = next(iter(self.captured))
                if self.captured.pop(oldest).replays < WORTH:
                    self.seen[oldest] = None
            # a pool is gone with the last graph that has it
            beside = next((x for x in self.captured.values() if x.where == where), None)
        try:
            found = make(None if beside is None else beside.pool)
        except RuntimeError as error:
            _log.debug("a call is not replayed: %s", error)
            self.refuse(key)
            return None
        with self._counts:
            self.captured[key] = found
        return found


class _Computation(Captured):
    """A graph of a function of some tensors."""

    def __init__(self, where: Where, pool: Any, kinds: list[Any], given: list[Any], compute: Any) -> None:
        super().__init__(where)
        self.places = Copies([torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given])
        self.places(given)
        into = self.places.into
        inputs = [None if kind is None else into[kind[0]] for kind in kinds]
        (self.graph,), (self._found,) = record(where, [lambda: compute(inputs)], pool)
        self.pool = self.graph.pool()
        self._out = Copies([x for x in self._found if x is not None])

    def replay(self, given: list[Any]) -> list[Any]:
        """Its results for these tensors, in memory of the caller's."""
        self.places(given)
        self.graph.replay()
        self.replays += 1
        mine = iter(self._out.copied())
        return [None if x is None else next(mine) for x in self._found]


class Graphs(Signatures[_Computation]):
    """Functions of tensors, captured."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def call(self, what: Hashable, arrays: Tensors, compute: Callable[[Tensors], Tensors]) -> Tensors:
        """``compute(arrays)``.

        Args:
            what: all else that the result depends on.
            arrays: what it is computed from, the first one on the current device.
            compute: queues kernels on the current stream, reads nothing else, and gives tensors of its own.
        """
        device = arrays[0].get_device()
        where = device, torch._C._cuda_getCurrentRawStream(device)
        places: dict[int, int] = {}
        kinds: list[Any] = []
        given: list[Any] = []
        for x in arrays:
            if x is None:
                kinds.append(None)
            else:
                place = places.setdefault(id(x), len(given))
                if place == len(given):
                    given.append(x)
                kinds.append((place, x.dtype, x.shape))
        key = what, *where, *map(os.environ.get, VARIABLES), *kinds
        # the copies and the replay of one call follow each other on the stream
        with self._lock:
            captured, due = self.find(key)
            if due:
                captured = self.capture(key, where, lambda pool: _Computation(where, pool, kinds, given, compute))
            if captured is not None:
                return captured.replay(given)
        return compute(arrays)


GRAPHS = Graphs()


ARRAYS = 12
"""How many arrays a block has."""


def _arrays_of(block: Block) -> list[Any]:
    """The arrays of a block, in the order of ``_rebuilt``."""
    pairs = block.pairs
    return [
        *(block.rows, block.columns, block.scale, block.bias),
        *(pairs.positives, pairs.excluded, pairs.row_ids, pairs.column_ids, pairs.row_limits, pairs.column_limits),
        *(pairs.row_guide, pairs.column_guide),
    ]


def _rebuilt(arrays: Tensors, block: Block) -> Block:
    """The block with other arrays."""
    rows, columns, scale, bias, positives, excluded, row_ids, column_ids, *of_limits = arrays[:ARRAYS]
    pairs = Pairs(positives, excluded, row_ids, column_ids, block.pairs.match, *of_limits)
    return replace(block, rows=rows, columns=columns, scale=scale, bias=bias, pairs=pairs)


def _crossing(primitive: Callable[..., Any], ours: ArrayLibrary, theirs: ArrayLibrary) -> Callable[..., Any]:
    """The primitive, of arrays of ``theirs``, as one of ``ours``; it writes to the same memory."""

    @wraps(primitive)
    def crossed(block: Block, *more: Any) -> Any:
        with working_for(ours, theirs, block.rows):
            found = primitive(*_moved((block, *more), lambda x: transfer(x, ours, theirs)))
            return _moved(found, lambda x: transfer(x, theirs, ours))

    return crossed


def _moved(x: Any, move: Callable[[Array], Array]) -> Any:
    """A primitive's arguments or results, with each array moved."""
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if is_dataclass(x):
        return replace(x, **{each.name: _moved(getattr(x, each.name), move) for each in fields(x)})  # type: ignore[type-var]
    if isinstance(x, tuple):
        moved = [_moved(each, move) for each in x]
        return type(x)(*moved) if hasattr(x, "_fields") else tuple(moved)
    return move(x)


class _Crossed(TorchArrays):
    """``TorchArrays`` whose loss another library computes, in fewer launches."""

    def __init__(self, theirs: ArrayLibrary) -> None:
        super().__init__(torch)
        self._theirs = theirs

    def loss(self, dtype: str, *sides: Sequence[Array]) -> Array:
        """See ``ArrayLibrary.loss``."""
        with working_for(self, self._theirs, sides[0][0]):
            given = _moved(tuple(sides), lambda x: transfer(x, self, self._theirs))
            return transfer(self._theirs.loss(dtype, *given), self._theirs, self)


def _over_torch(backend: Backend) -> Backend:
    """The backend as one of torch's tensors, whose memory crosses at each primitive: graphs hold no other arrays."""
    theirs = backend.arrays
    if theirs.name == "torch":
        return backend
    ours = _Crossed(theirs)
    names = "lse", "keeping", "gradients", "finished", "sigmoid"
    crossed: dict[str, Any] = {name: getattr(backend, name) for name in names}
    for name, primitive in crossed.items():
        crossed[name] = primitive and _crossing(primitive, ours, theirs)
    return replace(backend, arrays=ours, **crossed)


@cache
def replayed(backend: Backend) -> Backend:
    """The backend as one of torch tensors, whose ``lse`` and ``finished`` of small blocks come from graphs."""
    backend = _over_torch(backend)

    def small(block: Block) -> bool:
        return fits(block.rows, block.columns.shape[0]) and can_capture(block.rows)

    def lse(block: Block, columns: bool, options: Options) -> Statistics:
        if not small(block):
            return backend.lse(block, columns, options)

        def compute(arrays: Tensors) -> Tensors:
            found = backend.lse(_rebuilt(arrays, block), columns, options)
            return [*found.rows, *(found.columns or ())]

        what = backend.name, "lse", columns, options, block.pairs.match, block.symmetric
        n, p, s, *of_columns = GRAPHS.call(what, _arrays_of(block), compute)
        return Statistics(SideStatistics(n, p, s), SideStatistics(*of_columns) if of_columns else None)

    def keeping(block: Block, columns: bool, options: Options) -> Statistics:
        assert backend.keeping is not None
        # what one graph leaves another would write over
        return lse(block, columns, options) if small(block) else backend.keeping(block, columns, options)

    def finished(
        block: Block, weights: Weights, upstream: Array | None, columns: ColumnForm | None, options: Options
    ) -> Finished:
        assert backend.finished is not None
        # a loss with bars is launched
        if weights.kept is not None or weights.rows.bars is not None or not small(block):
            return backend.finished(block, weights, upstream, columns, options)

        def compute(arrays: Tensors) -> Tensors:
            assert backend.finished is not None
            factor, of_rows, of_columns = arrays[ARRAYS], arrays[ARRAYS + 1 : ARRAYS + 5], arrays[ARRAYS + 5 :]
            known = Weights(SideWeights(*of_rows), SideWeights(*of_columns) if of_columns else None)
            found = backend.finished(_rebuilt(arrays, block), known, factor, columns, options)
            return [found.rows, found.columns, found.inner]

        what = backend.name, "finished", columns, options, block.pairs.match, block.symmetric
        arrays = *_arrays_of(block), upstream, *weights.rows[:4], *(weights.columns or ())[:4]
        return Finished(*GRAPHS.call(what, arrays, compute))

    return replace(
        backend,
        lse=lse,
        keeping=None if backend.keeping is None else keeping,
        finished=None if backend.finished is None else finished,
    )
