"""A communicator over multiprocessing queues: the ranks are processes of one host.

``python queues.py`` starts three of them, each with its own part of a batch, and prints
the loss of the whole batch.
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import contrastile
from contrastile.comm.buffers import raw
from contrastile.comm.calls import Conflict
from contrastile.comm.communicator import Communicator, Parts
from contrastile.comm.watchdog import PeerTimeout


class Queues(Communicator):
    """One rank. ``queues[i, j]`` carries bytes from rank i to rank j, in order."""

    name = "queues"
    devices = ("cpu",)

    def __init__(
        self,
        rank: int,
        size: int,
        queues: Mapping[tuple[int, int], Any],
        deadline: float = 60.0,
    ) -> None:
        """Join the ranks that share these queues."""
        super().__init__(rank, size, deadline)
        self.queues = queues
        # by sender: the arrays that still wait for their bytes, as they were posted,
        # and how many have got theirs
        self.expected = [deque[Any]() for _ in range(size)]
        self.received = [0] * size

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """See ``Communicator``."""
        arrived = [np.frombuffer(bytearray(own), np.uint8) for _ in range(self.size)]
        outgoing = {r: [arrived[self.rank]] for r in range(self.size)}
        self.post(outgoing, {r: [x] for r, x in enumerate(arrived)}).wait()
        return [x.tobytes() for x in arrived]

    def post(self, outgoing: Parts, incoming: Parts) -> Message:
        """See ``Communicator``."""
        for r, arrays in self.others(outgoing).items():
            for x in arrays:
                # a copy, and a queue without a limit: the sender waits for nobody
                self.queues[self.rank, r].put(raw(x).tobytes())
        until = {}
        for r, arrays in self.others(incoming).items():
            self.expected[r].extend(arrays)
            until[r] = self.received[r] + len(self.expected[r])
        return Message(self, until)

    def receive(self, source: int, seconds: float) -> None:
        """Fill the next array that waits for this rank's bytes."""
        try:
            content = self.queues[source, self.rank].get(timeout=max(seconds, 0.0))
        except queue.Empty:
            raise PeerTimeout([source], "did not answer") from None
        x = raw(self.expected[source].popleft())
        self.received[source] += 1
        if len(content) != x.size:
            told = f"rank {source} sent {len(content)} bytes instead of {x.size}"
            raise Conflict(f"{told}; make the same calls everywhere")
        x[:] = np.frombuffer(content, np.uint8)


@dataclass
class Message:
    """What ``post`` returns.

    ``until`` counts the arrays of each sender, up to the last one of this message.
    """

    communicator: Queues
    until: dict[int, int]

    def wait(self) -> None:
        """Receive this message, and those that were posted before it."""
        end = time.monotonic() + self.communicator.deadline
        for source, count in self.until.items():
            while self.communicator.received[source] < count:
                self.communicator.receive(source, end - time.monotonic())


def train(rank: int, size: int, queues: Mapping[tuple[int, int], Any]) -> None:
    """What each process runs."""
    communicator = Queues(rank, size, queues)
    draw = np.random.default_rng(rank)
    image, text = draw.standard_normal((2, 100 + rank, 32)).astype("float32")
    loss = contrastile.clip_loss(image, text, 0.5, group=communicator)
    if rank == 0:
        print(f"loss {loss:.4f} of the whole batch", flush=True)


def main(size: int = 3) -> None:
    """Start the processes, and wait for them."""
    context = multiprocessing.get_context("spawn")
    pairs = itertools.permutations(range(size), 2)
    queues = {pair: context.Queue() for pair in pairs}
    ranks = [(rank, size, queues) for rank in range(size)]
    processes = [context.Process(target=train, args=each) for each in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
