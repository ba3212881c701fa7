"""Worlds of one process for the tests of the exchange: trials, and what properties say of them."""

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
class Waited:
    """A message whose wait is written down."""

    pending: Any
    events: list[Any]
    number: int

    def wait(self) -> None:
        self.pending.wait()
        self.events.append(self.number)


class Counting:
    """A communicator that writes down its messages of arrays, and which have been waited for.

    Attributes:
        posts: of each message, by receiver, the kinds of its arrays and their bytes.
        events: a message when it is posted, and its number when it has been waited for.
    """

    def __init__(self, home: InProcess) -> None:
        self.home, self.posts, self.events = home, list[dict[int, list[tuple[str, int]]]](), list[Any]()

    @property
    def count(self) -> Counter[str]:
        """How many there were of each kind."""
        firsts = (next(iter(post.values()), []) for post in self.posts)
        return Counter(" ".join(kind for kind, _ in first) for first in firsts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.home, name)

    def exchange(self, outgoing: Any, incoming: Any) -> Waited:
        """See ``Communicator``."""
        # statistics are pairs, narrower than any features here
        post = {
            rank: [
                (
                    "features" if x.ndim == 2 and x.shape[1] > 2 else "number" if x.shape == (1,) else str(x.ndim),
                    x.nbytes,
                )
                for x in xs
            ]
            for rank, xs in outgoing.items()
            if rank != self.home.rank
        }
        self.posts.append(post)
        self.events.append(post)
        return Waited(self.home.exchange(outgoing, incoming), self.events, len(self.posts) - 1)


def recording() -> Backend:
    """The NumPy backend, which writes its products down in ``PRODUCTS.events``, in rows x columns x width."""
    numpy = load("numpy")

    def call(primitive: Any, block: Block, *rest: Any) -> Any:
        times = 6.0 if primitive is numpy.gradients else 2.0
        PRODUCTS.events.append(times * block.rows.shape[0] * block.columns.shape[0])
        return primitive(block, *rest)

    return around(numpy, call, "lse", "gradients")


PRODUCTS = threading.local()
RECORDING = recording()


def measured(backend: Backend) -> tuple[Backend, list[int]]:
    """A backend that adds up the areas of the blocks of its forward and of its backward."""
    areas = [0, 0]

    def call(primitive: Any, block: Block, *rest: Any) -> Any:
        areas[primitive is backend.gradients] += block.rows.shape[0] * block.columns.shape[0]
        return primitive(block, *rest)

    return around(backend, call, "lse", "gradients"), areas
