"""Communicators over torch.distributed: NCCL for arrays on GPUs, gloo for arrays on the host, any process group.

Each group gets its own engines: gloo for the host, so that agreement never waits for work queued on a GPU; and NCCL
from the first message of arrays on a GPU, if the group itself uses NCCL and the ranks can load it. The price is one
more NCCL communicator; the gain is that no transfer queues behind the gradients that DDP is reducing. Gloo is made
below torch's registry of groups, whose names depend on how many groups a process is in.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist

from contrastile.comm import buffers, nccl, watchdog
from contrastile.comm.communicator import Communicator, ExchangeError, Parts, Posted
from contrastile.comm.point_to_point import PointToPoint, met
from contrastile.comm.watchdog import AbortNotice, PeerTimeout, deadline_and_error, deadline_or

# since torch 2.8
_CLONES = hasattr(getattr(dist, "Store", None), "clone")

_KNOWN: WeakKeyDictionary[Any, PointToPoint] = WeakKeyDictionary()
_CONNECTING: dict[str, threading.Lock] = {}
"""A lock for each group, by its name: groups share none, for their ranks may wait for each other."""


def of(group: Any, deadline: float | None = None) -> Communicator:
    """The communicator of a process group; made once, and kept as long as the group is.

    Args:
        group: a ProcessGroup that this process is in, "world" for the default group, or a DeviceMesh of one dimension.
        deadline: see ``connect``.

    Raises:
        TypeError: it is none of these.
        ValueError: a DeviceMesh of several dimensions.
        ExchangeError: there is no default group, or a rank did not call within the deadline.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ExchangeError(
            "group='world' needs the default group, got none; call torch.distributed.init_process_group() first"
        )
    from torch.distributed.device_mesh import DeviceMesh

    known = dist.group.WORLD if isinstance(group, str) and group == "world" else group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or range(group.ndim)
            raise ValueError(
                f"group must be a mesh of one dimension, got one of {', '.join(map(str, names))}; pass the dimension "
                "that shards the batch, e.g. mesh['dp'], or several as one, e.g. mesh['replicate', 'shard']._flatten()"
            )
        known = group.get_group() if group.get_coordinate() is not None else group
    if not isinstance(known, dist.ProcessGroup):
        raise TypeError(
            f"group must be a ProcessGroup or a DeviceMesh that this process is in, or 'world', got {group!r}"
        )
    with _CONNECTING.setdefault(known.group_name, threading.Lock()):
        found = _KNOWN.get(known)
        if found is None:
            found = _KNOWN[known] = _connect(known, deadline)
            finalize(known, found.close)
            return found
    if deadline is not None:
        found.deadline = deadline_or(deadline)
    return found


def _connect(group: Any, given: float | None) -> PointToPoint:
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    if len(ranks) == 1:
        return PointToPoint(rank, 1, deadline_or(given), None)
    deadline, error = deadline_and_error(given)
    try:
        store = _store(group.group_name, rank, deadline)
        # an engine that connects does not name the rank that is missing
        hosts = met(lambda text: _told(store, "here", text, rank, ranks, deadline), error, ranks)
    except dist.DistNetworkError as reason:
        raise ExchangeError(
            "the store of torch.distributed cannot be reached, got no answer: its process, which may be rank 0's, has "
            "ended; look into that rank's log"
        ) from reason
    seconds = timedelta(seconds=watchdog.patience(deadline))
    try:
        engine: Any = dist.ProcessGroupGloo(_below(store, "gloo"), rank, len(ranks), seconds)
    except RuntimeError as reason:
        # they called in time, and are gone: this rank came after their deadline, or they died
        raise ExchangeError(
            f"the other ranks gave up before this one connected the group (deadline {deadline:g} s); look into their "
            "logs, or raise CONTRASTILE_DEADLINE"
        ) from reason
    host = GlooChannel(engine, rank, len(ranks), store)
    on_device = nccl.channel if "nccl" in str(dist.get_backend_config(group)) else None
    found = PointToPoint(rank, len(ranks), deadline, host, on_device, ranks)
    found.meet(hosts)
    return found


def _told(store: Any, key: str, text: str, rank: int, ranks: Sequence[int], deadline: float) -> list[str]:
    """Every rank's text under a key, by rank.

    Raises:
        ExchangeError: some rank stored none within the deadline.
    """
    keys = [f"{key}/{r}" for r in range(len(ranks))]
    store.set(keys[rank], text)
    with suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=watchdog.patience(deadline)))
    # a slow store may answer after the last of them has come
    if absent := ", ".join(str(ranks[r]) for r, each in enumerate(keys) if not store.check([each])):
        raise _absent(absent, deadline)
    return [store.get(each).decode() for each in keys]


def _absent(ranks: str, deadline: float) -> ExchangeError:
    return ExchangeError(
        f"rank(s) {ranks} did not connect the group within {deadline:g} s; every rank of it must call the loss"
    )


def _store(group: str, rank: int, deadline: float) -> Any:
    """The default group's store, with names of this connection's own and over a connection of its own.

    A thread that waits in one connection holds up every other thread there, whatever group it connects.
    """
    c10d: Any = dist
    tcp = store = c10d.distributed_c10d._get_default_store()
    if _CLONES:
        found: list[Any] = []
        _ask(lambda: found.append(store.clone()), watchdog.patience(deadline))
        if not found:
            raise dist.DistNetworkError(f"no connection within {deadline:g} s")
        (store,) = found
    # counted there, not here: a rank may have been in other worlds before, under other stores
    name = f"contrastile/{group}/{store.add(f'contrastile/connections/{group}/{rank}', 1)}"
    if _CLONES:
        return _below(store, name)
    while isinstance(tcp, c10d.PrefixStore):
        tcp = tcp.underlying_store
    if not isinstance(tcp, c10d.TCPStore):
        return _below(store, name)
    # the default group's prefix is not accessible: rank 0 makes up another
    if rank == 0:
        store.set(name, secrets.token_hex(16))
    if not watchdog.until(lambda: store.check([name]), watchdog.patience(deadline)):
        raise _absent("0 of the group", deadline)
    own = c10d.TCPStore(tcp.host, tcp.port, is_master=False, wait_for_workers=False)
    return _below(own, store.get(name).decode())


def _ask(request: Callable[[], None], seconds: float) -> None:
    """Run a request to a store, for so long at most: its server may be gone with its rank, and no request ends then."""

    def ask() -> None:
        # without the store there are no answers
        with suppress(RuntimeError):
            request()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)


def _below(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class GlooChannel:
    """Bytes on the host, by gloo's messages between pairs."""

    engine: Any
    rank: int
    size: int
    store: Any
    _under_way: dict[int, Any] = field(default_factory=dict)

    name = "torch gloo"

    def post(self, outgoing: Parts, incoming: Parts, number: int, seconds: Callable[[], float]) -> Posted:
        works: list[tuple[int, Any]] = []
        for post, parts in ((self.engine.recv, incoming), (self.engine.send, outgoing)):
            for rank, piece in buffers.pieces(parts):
                # torch has no read-only tensors, and warns
                tensor = torch.from_numpy(piece if piece.flags.writeable else piece.copy())
                with _reaching(rank):
                    works.append((rank, post([tensor], rank, number)))
        # gloo writes into these arrays until the message is done, even if nobody waits for it any more
        self._under_way[id(works)] = works, outgoing, incoming

        def wait() -> None:
            end = time.monotonic() + seconds()
            for rank, work in works:
                with _reaching(rank):
                    work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            del self._under_way[id(works)]

        return Posted(wait)

    def abort(self, notice: AbortNotice, seconds: float) -> Mapping[int, AbortNotice]:
        heard: dict[int, AbortNotice] = {}
        end = time.monotonic() + seconds

        def exchange() -> None:
            self.store.set(f"gone/{self.rank}", notice.encode())
            while len(heard) < self.size - 1 and time.monotonic() < end:
                for other in range(self.size):
                    if other != self.rank and other not in heard and self.store.check([f"gone/{other}"]):
                        heard[other] = AbortNotice.decode(self.store.get(f"gone/{other}").decode())
                time.sleep(0.01)

        # where there are no answers the rank that was waited for is named all the same
        _ask(exchange, seconds)
        return dict(heard)

    def close(self) -> None:
        self.engine = None


@contextmanager
def _reaching(rank: int) -> Iterator[None]:
    """While open, what torch.distributed raises is a PeerTimeout of this rank."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        # gloo puts a source location before its message, and the peer's address after it
        text = said.rpartition(".cc:")[2].partition("] ")[2].partition(" [")[0] or said
        how = "did not answer" if "imed out" in text else f"cannot be reached ({text})"
        raise PeerTimeout([rank], how) from error
