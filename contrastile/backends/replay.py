# pyright: reportPrivateImportUsage=false, reportArgumentType=false
"""CUDA graphs for small problems, whose kernels take longer to launch than to run.

A call signature (shapes, dtypes, settings, stream) that repeats is captured, and replayed from then on: inputs are
copied to where the graph reads them, outputs to the caller's memory. The kernels and their order are the same, and so
are the bits.

Graphs of one stream share the memory between their kernels; it stays reserved, as do the inputs and outputs of each
graph: O(b d) bytes. At most ``MOST`` graphs are held, and CONTRASTILE_GRAPHS=0 has none made.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from contrastile.backends import eager
from contrastile.backends.contract import Block, Pairs
from contrastile.backends.settings import VARIABLES

Tensors = Sequence[Any]
"""Tensors on one GPU; None stays None."""

WORK, FEATURES = 1 << 38, 1 << 26
"""Rows x columns x width, and the numbers of the features, up to which a problem is replayed."""

SETTING = "CONTRASTILE_GRAPHS"
"""The environment variable that turns graphs off: 0."""

MOST = 8
"""Graphs held; the least recently used goes first."""

WORTH = 4
"""Replays that pay for a capture: what goes with fewer of them is launched from then on, or more call
signatures than graphs are held, one after the other, would be captured for ever."""

_BEFORE = 2
"""Calls before the one that is captured."""

_KNOWN = 64
"""Call signatures that are counted."""

_log = logging.getLogger(__name__)


def fits(rows: Any, columns: int) -> bool:
    """Whether so many columns against these rows may be replayed: few, and nobody captures or infers around them."""
    m, d = rows.shape
    return (
        rows.is_cuda
        and m * columns * d <= WORK
        and (m + columns) * d <= FEATURES
        and hasattr(torch._C, "_cuda_getCurrentRawStream")
        and not torch.is_inference_mode_enabled()
        and not torch.cuda.is_current_stream_capturing()
        and os.environ.get(SETTING, "1") != "0"
    )


def arrays_of(block: Block) -> list[Any]:
    """The arrays of a block, which ``rebuilt`` puts together."""
    pairs = block.pairs
    return [
        *(block.rows, block.columns, block.scale, block.bias),
        *(pairs.positives, pairs.excluded, pairs.row_ids, pairs.column_ids),
    ]


def rebuilt(arrays: Tensors, block: Block) -> Block:
    """The block with other arrays."""
    rows, columns, scale, bias, positives, excluded, row_ids, column_ids = arrays[:8]
    return Block(rows, columns, scale, bias, Pairs(positives, excluded, row_ids, column_ids, block.pairs.match))


class _Packed:
    """Vectors of one dtype that lie side by side, each where 16 bytes begin, so that one copy takes them all."""

    def __init__(self, vectors: Sequence[Any]) -> None:
        self.lengths = [x.shape[0] for x in vectors]
        step = 16 // vectors[0].itemsize
        self.sizes = [-(-length // step) * step for length in self.lengths]
        self.whole = vectors[0].new_empty(sum(self.sizes))
        torch._foreach_copy_(self.parts(self.whole), list(vectors))

    def parts(self, whole: Any) -> list[Any]:
        """The vectors, as views."""
        parts = whole.split(self.sizes)
        return [x if x.shape[0] == length else x[:length] for x, length in zip(parts, self.lengths, strict=True)]


class _Copy:
    """Copies into tensors, those of one dtype in one launch: of several dtypes each tensor would take one."""

    def __init__(self, into: Sequence[Any]) -> None:
        kinds: dict[Any, list[int]] = {}
        for i, x in enumerate(into):
            if x.numel():
                kinds.setdefault(x.dtype, []).append(i)
        self._places = list(kinds.values())
        self.into = into

    def __call__(self, sources: Sequence[Any], into: Sequence[Any] | None = None) -> None:
        """Copy ``sources`` into the tensors, or into others like them."""
        targets = self.into if into is None else into
        for places in self._places:
            torch._foreach_copy_([targets[i] for i in places], [sources[i] for i in places])


class _Captured:
    """A graph, the places that its inputs are copied to, and what it finds.

    Attributes:
        where: the device and the stream on which it is replayed.
        places: copies to where the inputs are read, in their order.
        constants: what the graph reads where it lies.
        graph: of the kernels.
        replays: how many there were.
    """

    def __init__(self, where: tuple[int, int], places: _Copy, constants: list[Any]) -> None:
        self.where, self.places, self.constants = where, places, constants
        self.graph: Any = torch.cuda.CUDAGraph()
        self.replays = 0

    def hold(self, found: Tensors) -> None:
        """Take what the graph's kernels find; called while they are captured."""
        self._found, self._packed = list(found), None
        packed = [x is not None and x.ndim == 1 and x.numel() > 0 for x in found]
        vectors = [x for x, pack in zip(found, packed, strict=True) if pack]
        if len(vectors) > 1 and len({x.dtype for x in vectors}) == 1:
            self._packed = _Packed(vectors)
            self._found = [self._packed if pack else x for x, pack in zip(found, packed, strict=True)]
        self._there: list[Any] = [x for x in self._found if x is not None and x is not self._packed]
        if self._packed is not None:
            self._there.append(self._packed.whole)
        self._out = _Copy(self._there)

    def replay(self, given: list[Any]) -> list[Any]:
        """What it finds of these, in memory of the caller's."""
        self.places(given)
        self.graph.replay()
        self.replays += 1
        # an empty tensor has nothing that a later replay could change
        mine = [torch.empty_like(x) if x.numel() else x for x in self._there]
        self._out(self._there, mine)
        vectors = iter([] if self._packed is None else self._packed.parts(mine.pop()))
        others = iter(mine)
        return [None if x is None else next(vectors if x is self._packed else others) for x in self._found]


@dataclass(slots=True)
class Graphs:
    """The graphs of this process.

    Attributes:
        seen: how often each call signature has come, until it is captured; None where that failed or was not worth it.
        captured: by call signature, the one that was asked for last at the end.
    """

    seen: dict[Hashable, int | None] = field(default_factory=dict)
    captured: dict[Hashable, _Captured] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _sides: dict[int, Any] = field(default_factory=dict)

    def call(
        self,
        what: Hashable,
        arrays: Tensors,
        compute: Callable[[Tensors], Tensors],
        unless: Callable[[Tensors], bool] = lambda found: False,
    ) -> Tensors:
        """``compute(arrays)``.

        Args:
            what: all else that the result depends on.
            arrays: what it is computed from, the first one on the current device.
            compute: queues kernels on the current stream, reads nothing else, and gives tensors of its own.
            unless: whether what it gave says that such a call is not to be replayed.
        """
        device = arrays[0].get_device()
        stream = torch._C._cuda_getCurrentRawStream(device)
        places: dict[int, int] = {}
        kinds: list[Any] = []
        given: list[Any] = []
        for x in arrays:
            if x is None:
                kinds.append(None)
            elif eager.constant(x):
                # the graph reads it where it lies
                kinds.append(id(x))
            else:
                place = places.setdefault(id(x), len(given))
                if place == len(given):
                    given.append(x)
                kinds.append((place, x.dtype, x.shape))
        key = what, device, stream, *map(os.environ.get, VARIABLES), *kinds
        # the copies and the replay of one call follow each other on the stream
        with self._lock:
            captured = self.captured.pop(key, None)
            if captured is not None:
                self.captured[key] = captured
                return captured.replay(given)
            count = self.seen.pop(key, 0)
            if count is not None and count >= _BEFORE:
                return self._capture(key, (device, stream), kinds, arrays, given, compute)
            self.seen[key] = None if count is None else count + 1
            if len(self.seen) > _KNOWN:
                del self.seen[next(iter(self.seen))]
        found = compute(arrays)
        if unless(found):
            self.seen[key] = None
        return found

    def _capture(
        self,
        key: Hashable,
        where: tuple[int, int],
        kinds: list[Any],
        arrays: Tensors,
        given: list[Any],
        compute: Callable[[Tensors], Tensors],
    ) -> Tensors:
        """This call's result; from the next one on it is replayed."""
        constants = [x for kind, x in zip(kinds, arrays, strict=True) if isinstance(kind, int)]
        places = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]
        copy = _Copy(places)
        captured = _Captured(where, copy, constants)
        copy(given)
        inputs = [places[kind[0]] if isinstance(kind, tuple) else x for kind, x in zip(kinds, arrays, strict=True)]
        # whatever a first launch loads is loaded before anything is captured
        result = compute(inputs)
        if len(self.captured) >= MOST:
            oldest = next(iter(self.captured))
            if self.captured.pop(oldest).replays < WORTH:
                self.seen[oldest] = None
        try:
            self._record(captured, lambda: compute(inputs))
        except RuntimeError as error:
            _log.debug("a block is not replayed: %s", error)
            self.seen[key] = None
        else:
            self.captured[key] = captured
        return result

    def _record(self, captured: _Captured, action: Callable[[], Tensors]) -> None:
        """Capture what ``action`` queues."""
        device, _ = captured.where
        side: Any = self._sides.get(device)
        if side is None:
            side = self._sides[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # graphs of one stream run one after the other: what one leaves in between, the next may overwrite.
        # A pool is gone with the last graph that has it
        beside = (x for x in self.captured.values() if x.where == captured.where)
        shared: dict[str, Any] = next(({"pool": x.graph.pool()} for x in beside), {})
        current = torch.cuda.current_stream(device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                # other threads may go on allocating and synchronising
                captured.graph.capture_begin(**shared, capture_error_mode="thread_local")
                try:
                    captured.hold(action())
                finally:
                    captured.graph.capture_end()
        finally:
            current.wait_stream(side)


GRAPHS = Graphs()
