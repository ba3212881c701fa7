"""Communicators over torch.distributed: NCCL for arrays on GPUs, gloo for arrays on the host, any process group.

Each group gets its own engines: gloo for the host, so that agreement never waits for work queued on a GPU; and NCCL
from the first message of arrays on a GPU, if the group itself uses NCCL and the ranks can load it. The price is one
more NCCL communicator; the gain is that no transfer queues behind the gradients that DDP is reducing. Gloo is made
below torch's registry of groups, because its names depend on how many groups a process is in.
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
"""A lock for each group, by its name: groups share no lock, because their ranks may wait for each other."""


def of(group: Any, deadline: float | None = None) -> Communicator:
    """The communicator of a process group; made once, and kept as long as the group exists.

    Args:
        group: a ProcessGroup that this process is in, "world" for the default group, or a DeviceMesh of one dimension.
        deadline: see ``connect``.

    Raises:
        TypeError: the group is none of these.
        ValueError: the group is a DeviceMesh of several dimensions.
        ExchangeError: there is no default group, or a rank did not call within the deadline.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ExchangeError(
            "group='world' needs the default group, got none; call torch.distributed.init_process_group() first"
        )
    from torch.distributed.device_mesh import DeviceMesh

    process_group = dist.group.WORLD if isinstance(group, str) and group == "world" else group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or range(group.ndim)
            raise ValueError(
                f"group must be a mesh of one dimension, got one of {', '.join(map(str, names))}; pass the dimension "
                "that shards the batch, e.g. mesh['dp'], or several as one, e.g. mesh['replicate', 'shard']._flatten()"
            )
        process_group = group.get_group() if group.get_coordinate() is not None else group
    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a ProcessGroup or a DeviceMesh that this process is in, or 'world', got {group!r}; pass "
            "e.g. group='world'"
        )
    with _CONNECTING.setdefault(process_group.group_name, threading.Lock()):
        communicator = _KNOWN.get(process_group)
        if communicator is None:
            communicator = _KNOWN[process_group] = _connect(process_group, deadline)
            finalize(process_group, communicator.close)
            return communicator
    if deadline is not None:
        communicator.deadline = deadline_or(deadline)
    return communicator


def _connect(group: Any, requested: float | None) -> PointToPoint:
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    if len(ranks) == 1:
        return PointToPoint(rank, 1, deadline_or(requested), None)
    deadline, error = deadline_and_error(requested)
    try:
        store = _store(group.group_name, rank, deadline)
        # exchange texts first, because a connecting engine does not name the missing rank
        hosts = met(lambda text: _told(store, "here", text, rank, ranks, deadline), error, ranks)
    except dist.DistNetworkError as reason:
        raise ExchangeError(
            "the store of torch.distributed cannot be reached, got no answer: its process, which may be rank 0's, has "
            "ended; look into that rank's log"
        ) from reason
    seconds = timedelta(seconds=watchdog.patience(deadline))
    try:
        engine: Any = dist.ProcessGroupGloo(_prefixed(store, "gloo"), rank, len(ranks), seconds)
    except RuntimeError as reason:
        # the others called in time, but are gone: this rank called after their deadline, or they died
        raise ExchangeError(
            f"the other ranks gave up before this one connected the group (deadline {deadline:g} s); look into their "
            "logs, or raise CONTRASTILE_DEADLINE"
        ) from reason
    host = GlooChannel(engine, rank, len(ranks), store)
    on_device = nccl.channel if "nccl" in str(dist.get_backend_config(group)) else None
    communicator = PointToPoint(rank, len(ranks), deadline, host, on_device, ranks)
    communicator.meet(hosts)
    return communicator


def _told(store: Any, key: str, text: str, rank: int, ranks: Sequence[int], deadline: float) -> list[str]:
    """All ranks' texts under a key, by rank.

    Raises:
        ExchangeError: some rank stored no text within the deadline.
    """
    keys = [f"{key}/{r}" for r in range(len(ranks))]
    store.set(keys[rank], text)
    with suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=watchdog.patience(deadline)))
    # ask again, because a slow store may answer after the last text has arrived
    if missing_ranks := ", ".join(str(ranks[r]) for r, stored_key in enumerate(keys) if not store.check([stored_key])):
        raise _absent_error(missing_ranks, deadline)
    return [store.get(stored_key).decode() for stored_key in keys]


def _absent_error(ranks: str, deadline: float) -> ExchangeError:
    return ExchangeError(
        f"rank(s) {ranks} did not connect the group within {deadline:g} s; every rank of it must call the loss"
    )


def _store(group: str, rank: int, deadline: float) -> Any:
    """The default group's store, over a new connection, and with a prefix of keys for this connection alone.

    A thread that waits in a connection blocks all other threads that use it, whatever group they connect.
    """
    c10d: Any = dist
    tcp = store = c10d.distributed_c10d._get_default_store()
    if _CLONES:
        clones: list[Any] = []
        _run_request(lambda: clones.append(store.clone()), watchdog.patience(deadline))
        if not clones:
            raise dist.DistNetworkError(f"no connection within {deadline:g} s")
        (store,) = clones
    # the store counts, not this process, which may have been in other worlds with other stores
    name = f"contrastile/{group}/{store.add(f'contrastile/connections/{group}/{rank}', 1)}"
    if _CLONES:
        return _prefixed(store, name)
    while isinstance(tcp, c10d.PrefixStore):
        tcp = tcp.underlying_store
    if not isinstance(tcp, c10d.TCPStore):
        return _prefixed(store, name)
    # the default group's prefix is not accessible, so rank 0 creates another
    if rank == 0:
        store.set(name, secrets.token_hex(16))
    if not watchdog.until(lambda: store.check([name]), watchdog.patience(deadline)):
        raise _absent_error("0 of the group", deadline)
    connection = c10d.TCPStore(tcp.host, tcp.port, is_master=False, wait_for_workers=False)
    return _prefixed(connection, store.get(name).decode())


def _run_request(request: Callable[[], None], seconds: float) -> None:
    """Run a request to a store for at most this time, because it never ends if the store's process has ended."""

    def run() -> None:
        # a request fails if the store is gone
        with suppress(RuntimeError):
            request()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def _prefixed(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class GlooChannel:
    """Bytes on the host, by gloo's messages between pairs of ranks."""

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
                # copy read-only bytes, because torch has no read-only tensors and warns
                tensor = torch.from_numpy(piece if piece.flags.writeable else piece.copy())
                with _as_peer_timeout(rank):
                    works.append((rank, post([tensor], rank, number)))
        # gloo writes into these arrays until the message is complete, even if no one waits for it any more
        self._under_way[id(works)] = works, outgoing, incoming

        def wait() -> None:
            end = time.monotonic() + seconds()
            for rank, work in works:
                with _as_peer_timeout(rank):
                    work.wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            del self._under_way[id(works)]

        return Posted(wait)

    def abort(self, notice: AbortNotice, seconds: float) -> Mapping[int, AbortNotice]:
        notices: dict[int, AbortNotice] = {}
        end = time.monotonic() + seconds

        def exchange() -> None:
            self.store.set(f"gone/{self.rank}", notice.encode())
            while len(notices) < self.size - 1 and time.monotonic() < end:
                for other in range(self.size):
                    if other != self.rank and other not in notices and self.store.check([f"gone/{other}"]):
                        notices[other] = AbortNotice.decode(self.store.get(f"gone/{other}").decode())
                time.sleep(0.01)

        # without answers the error still names the rank that this one waited for
        _run_request(exchange, seconds)
        return dict(notices)

    def close(self) -> None:
        self.engine = None


@contextmanager
def _as_peer_timeout(rank: int) -> Iterator[None]:
    """A context in which an error of torch.distributed becomes a PeerTimeout of a rank."""
    try:
        yield
    except RuntimeError as error:
        line = str(error).partition("\n")[0]
        # gloo puts a source location before its message, and the peer's address after it
        text = line.rpartition(".cc:")[2].partition("] ")[2].partition(" [")[0] or line
        how = "did not answer" if "imed out" in text else f"cannot be reached ({text})"
        raise PeerTimeout([rank], how) from error
