"""The call of a loss, and its phase, to which a message belongs, so that no message is taken for another.

Before the messages of a phase the ranks exchange frames of equal size over the host, and every rank sees every frame.
If a rank is at another call or phase, or has posted more or fewer messages, all ranks raise the same error. So messages
carry nothing but their arrays.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Phase = Literal["forward", "backward"]
_PHASES: tuple[Phase, Phase] = "forward", "backward"

_HEAD, _LOSS = struct.Struct("<6q"), 32
MOST = 16
"""The most numbers of a record."""

SAME_CALLS = "every rank must make the same calls in the same order, forward and backward"


class Conflict(Exception):  # noqa: N818 - it becomes an ExchangeError
    """Ranks are at different calls; the text names the ranks and their calls."""


@dataclass(frozen=True, slots=True)
class Label:
    """A phase of a call.

    Attributes:
        serial: the call's number, counted on each rank from 1; 0 for messages of no call.
        phase: the phase of the call.
        loss: the loss's name, for error messages; at most 32 characters.
        wants: the gradients that a backward computes, one bit each: scale, bias, rows, each column block.
    """

    serial: int = 0
    phase: Phase = "forward"
    loss: str = ""
    wants: int = 0

    def __str__(self) -> str:
        if self.serial == 0:
            return "messages of no call"
        return f"the {self.phase} of call {self.serial}" + (f" ({self.loss})" if self.loss else "")


@dataclass(slots=True)
class Calls:
    """One rank's position among the calls of its group.

    Attributes:
        label: the phase whose messages are under way, or were the last.
        messages: the number of posted messages; the same on every rank.
        unread: for earlier calls, functions that return all ranks' values of a number, or None until they arrive.
        captured: all ranks' values, by name, in the last captured call: see ``scalars.read``.
    """

    label: Label = field(default_factory=Label)
    messages: int = 0
    unread: list[tuple[Label, Mapping[str, Any]]] = field(default_factory=list)
    captured: Mapping[str, Any] = field(default_factory=dict)
    _serial: int = 0
    _agreed: int = 0
    _thread: int | None = None
    _agreeing: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> int:
        """The serial number of a new call."""
        self._serial += 1
        return self._serial

    def enter(self, label: Label | None) -> None:
        """Begin the agreement of a new phase, or with None another one in the current phase; ``agreed`` ends it.

        Raises:
            Conflict: another thread is in an agreement.
        """
        if not self._agreeing.acquire(blocking=False):
            raise self._thread_conflict()
        self.label = label or self.label
        self._thread = threading.get_ident()
        self._agreed += 1

    def agreed(self) -> None:
        """End the agreement."""
        self._agreeing.release()

    def leave(self) -> None:
        """End the phase, so that another thread may post the next message."""
        self._thread = None

    def post(self) -> int:
        """Count another message; returns its number.

        Raises:
            Conflict: another thread has begun a phase in the meantime.
        """
        if self._thread not in (None, threading.get_ident()):
            raise self._thread_conflict()
        self.messages += 1
        return self.messages

    def _thread_conflict(self) -> Conflict:
        return Conflict("two threads of this rank use one group at the same time; give each thread a group of its own")

    def head(self, size: int) -> bytes:
        """The start of a frame: numbers that must be equal on all ranks, with a record's size, and the loss's name."""
        label = self.label
        numbers = label.serial, _PHASES.index(label.phase), label.wants, self._agreed, self.messages, size
        return _HEAD.pack(*numbers) + label.loss.encode()[:_LOSS].ljust(_LOSS, b"\0")

    def frame(self, record: npt.NDArray[np.int64]) -> bytes:
        """The frame of a record; all frames have the same length."""
        assert record.size <= MOST, f"a record must have at most {MOST} numbers, got {record.size}"
        return self.head(record.size) + record.tobytes().ljust(8 * MOST, b"\0")


def content(frame: bytes) -> bytes:
    """The bytes of a frame's record, with padding."""
    return frame[_HEAD.size + _LOSS :]


def compare(heads: Sequence[bytes], global_ranks: Sequence[int]) -> None:
    """Compare all ranks' ``Calls.head``, or frames, by rank; ``global_ranks`` are the ranks' numbers in errors.

    Raises:
        Conflict: they differ; the text is the same on every rank.
    """
    size = _HEAD.size
    if all(head[:size] == heads[0][:size] for head in heads):
        return
    positions = [_HEAD.unpack_from(head)[3:5] for head in heads]
    labels = []
    for head in heads:
        serial, phase, wants, *_ = _HEAD.unpack_from(head)
        loss = head[size : size + _LOSS].rstrip(b"\0").decode(errors="replace")
        labels.append(Label(serial, _PHASES[phase & 1], loss, wants))
    texts = list(map(str, labels))
    if len(set(texts)) == 1 and len({label.wants for label in labels}) > 1:
        texts = [f"{text} for {_wants(label)}" for text, label in zip(texts, labels, strict=True)]
    if len(set(texts)) == 1:
        texts = [f"{text} after {sum(counts)} messages" for text, counts in zip(texts, positions, strict=True)]
    raise Conflict(whereabouts(dict(zip(global_ranks, texts, strict=True))))


def _wants(label: Label) -> str:
    names = ["scale", "bias", "rows"] + [f"column block {i}" for i in range(label.wants.bit_length() - 3)]
    wanted = [name for i, name in enumerate(names) if label.wants >> i & 1]
    return f"the gradients of {', '.join(wanted)}" if wanted else "no gradients"


def whereabouts(texts: dict[int, str]) -> str:
    """A sentence that names the ranks at each call and ends with the fix."""
    groups = [(text, [r for r, other in texts.items() if other == text]) for text in dict.fromkeys(texts.values())]
    groups_text = ", ".join(f"{named(ranks)} {'are' if len(ranks) > 1 else 'is'} at {text}" for text, ranks in groups)
    return f"{groups_text}; {SAME_CALLS}"


def held(texts: Sequence[str], global_ranks: Sequence[int]) -> str:
    """Each distinct text, with the ranks that hold it; ``global_ranks`` as for ``compare``."""
    pairs = list(zip(global_ranks, texts, strict=True))
    ranks_by_text = {text: [rank for rank, other in pairs if other == text] for text in texts}
    return ", ".join(f"{text} on {named(ranks)}" for text, ranks in ranks_by_text.items())


def named(ranks: Sequence[int]) -> str:
    """The ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
