"""Communicators and backends that record their messages and products, for ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

from contrastile.backends.contract import Backend, Block
from contrastile.backends.registry import load
from contrastile.comm.inprocess import InProcess
from contrastile.verify.wrapped import around


@dataclass
class RecordedWait:
    """A message that records when it has been waited for."""

    pending: Any
    events: list[Any]
    number: int

    def wait(self) -> None:
        self.pending.wait()
        self.events.append(self.number)


class Recorder:
    """A communicator that records its messages of arrays and the waits for them.

    Attributes:
        posts: for each exchange, the kinds and bytes of the arrays that each receiver gets.
        events: the post of an exchange when it begins, and its number after the wait for it.
    """

    def __init__(self, communicator: InProcess) -> None:
        self.communicator, self.posts, self.events = communicator, list[dict[int, list[tuple[str, int]]]](), list[Any]()

    @property
    def count(self) -> Counter[str]:
        """The number of messages of each kind, by the arrays for the first receiver."""
        first_messages = (next(iter(post.values()), []) for post in self.posts)
        return Counter(" ".join(kind for kind, _ in first) for first in first_messages)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.communicator, name)

    def exchange(self, outgoing: Any, incoming: Any) -> RecordedWait:
        """See ``Communicator``."""
        # two columns are statistics; features are wider here
        post = {
            rank: [
                (
                    "features" if x.ndim == 2 and x.shape[1] > 2 else "number" if x.shape == (1,) else str(x.ndim),
                    x.nbytes,
                )
                for x in arrays
            ]
            for rank, arrays in outgoing.items()
            if rank != self.communicator.rank
        }
        self.posts.append(post)
        self.events.append(post)
        return RecordedWait(self.communicator.exchange(outgoing, incoming), self.events, len(self.posts) - 1)


def recording_backend() -> Backend:
    """The NumPy backend, which records the cost of its products in ``PRODUCTS.events``, in rows x columns x width."""
    numpy = load("numpy")

    def call(primitive: Any, block: Block, *arguments: Any) -> Any:
        products = 6.0 if primitive is numpy.gradients else 2.0
        PRODUCTS.events.append(products * block.rows.shape[0] * block.columns.shape[0])
        return primitive(block, *arguments)

    return around(numpy, call, "lse", "gradients")


PRODUCTS = threading.local()
RECORDING = recording_backend()


def with_areas(backend: Backend) -> tuple[Backend, list[int]]:
    """A backend that sums the areas of its blocks, and the two sums: forward and backward."""
    areas = [0, 0]

    def call(primitive: Any, block: Block, *arguments: Any) -> Any:
        areas[primitive is backend.gradients] += block.rows.shape[0] * block.columns.shape[0]
        return primitive(block, *arguments)

    return around(backend, call, "lse", "gradients"), areas
