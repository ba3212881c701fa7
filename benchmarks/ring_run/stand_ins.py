"""What is put in the place of messages, or of products, to tell one's time from the other's.

``Silent`` is a communicator whose messages cost nothing, ``ring_run.stand_ins:idle_triton`` a backend whose blocks do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from contrastile.backends.contract import Backend, Block, Options, Statistics, Weights
from contrastile.backends.registry import load
from contrastile.comm.calls import Calls
from contrastile.schedules import local, schedule


class _Done:
    """A message that has arrived."""

    def wait(self) -> None:
        """It has."""


class Silent:
    """A communicator that moves nothing: what arrives is what was sent. Shards must be of one size.

    A ring then computes what ranks with equal shards would; of a gather's sums each rank has its own share.

    Buffers are not filled but made to share the sender's memory, and a gathered array is written once and kept. They
    hold real features: a product of zeros would draw less power and run faster than what it stands for.
    """

    name = "silent"

    def __init__(self, real: Any, *, handshake: bool) -> None:
        """Stand in for ``real``; with ``handshake`` the ranks still agree over it before each call."""
        self.real, self.handshake = real, handshake
        self.rank, self.size, self.deadline = real.rank, real.size, real.deadline
        self.calls = Calls()
        self._agreed: dict[bytes, Any] = {}
        self._whole: dict[tuple[Any, ...], torch.Tensor] = {}

    def refusal(self, device: str) -> str | None:
        """What the real one refuses."""
        refused: str | None = self.real.refusal(device)
        return refused

    def agree(self, record: Any, label: Any = None) -> Any:
        """Everybody's record: each time anew, or as it was the first time."""
        if self.handshake:
            return self.real.agree(record, label)
        key = record.tobytes()
        if key not in self._agreed:
            self._agreed[key] = self.real.agree(record)
        return self._agreed[key]

    def tell(self, text: str) -> list[str]:
        """Everybody's text."""
        told: list[str] = self.real.tell(text)
        return told

    def shift(self, outgoing: Sequence[Any], incoming: Sequence[Any]) -> _Done:
        """Nothing moves."""
        for target, source in zip(incoming, outgoing, strict=True):
            _become(target, source)
        return _Done()

    def exchange(self, outgoing: Mapping[int, Sequence[Any]], incoming: Mapping[int, Sequence[Any]]) -> _Done:
        """Every rank sent what this one did to the next."""
        for rank, targets in incoming.items():
            sent = outgoing[rank if rank == self.rank else (self.rank + 1) % self.size]
            for target, source in zip(targets, sent, strict=True):
                if target._is_view():
                    # part of a gathered array, which is written as if it had arrived
                    target.copy_(source)
                else:
                    _become(target, source)
        return _Done()

    def all_to_all(self, outgoing: Sequence[Any], incoming: Sequence[Any]) -> _Done:
        """Every rank sent what this one did to the next."""
        return self.exchange(*({rank: [x] for rank, x in enumerate(xs)} for xs in (outgoing, incoming)))

    def all_gather(self, own: Any, whole: Any, sizes: Sequence[int]) -> _Done:
        """Every rank holds what this one does."""
        key = (tuple(whole.shape), whole.dtype)
        if own.ndim == 1 or key not in self._whole:
            torch.cat([own] * self.size, out=whole)
        if own.ndim > 1:
            _become(whole, self._whole.setdefault(key, whole))
        return _Done()

    def close(self) -> None:
        """Nothing is held."""


def _become(target: Any, source: Any) -> None:
    """Share the source's memory."""
    if target.shape != source.shape:
        raise ValueError(f"shards must be of one size here, got {tuple(source.shape)} and {tuple(target.shape)}")
    target.set_(source)


def __getattr__(name: str) -> Backend:
    """``idle_<backend>``: a backend whose blocks cost nothing."""
    if not name.startswith("idle_"):
        raise AttributeError(name)
    real = load(name.removeprefix("idle_"))
    arrays = real.arrays

    def lse(block: Block, columns: bool, options: Options) -> Statistics:
        sizes = [len(block.rows)] * 3 + [len(block.columns)] * (3 if columns else 0)
        return Statistics(*(arrays.full((size,), 0.0, "float64", block.rows) for size in sizes))

    def gradients(block: Block, weights: Weights, row: Any, column: Any, options: Options) -> None:
        return None

    changes: dict[str, Any] = {"name": name, "lse": lse, "gradients": gradients, "finished": None}
    return replace(real, **changes)


def _values(found: local.Forward) -> tuple[Any, ...]:
    rows = found.row_negative_lse, found.row_positive_lse
    return found.loss, *rows, found.column_negative_lse, found.column_positive_lse


@contextmanager
def listening() -> Iterator[list[local.Forward]]:
    """What each forward pass finds, log-sum-exps included, which the front door keeps to itself."""
    heard: list[local.Forward] = []
    real: Callable[..., local.Forward] = schedule.forward

    def forward(*args: Any, **how: Any) -> local.Forward:
        found = real(*args, **how)
        # detached: autograd makes these tensors its own afterwards
        heard.append(local.Forward(*(None if x is None else x.detach() for x in _values(found))))
        return found

    schedule.forward = forward  # type: ignore[assignment]
    try:
        yield heard
    finally:
        schedule.forward = real  # type: ignore[assignment]
