"""The results of every primitive of a communicator, bit for bit; started by test_engines."""

from __future__ import annotations

import gc
import os
import random
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from engines import PATIENCE, say, started

import contrastile
from contrastile.backends.arrays import library_of
from contrastile.comm import buffers, torch_group
from contrastile.comm.communicator import ExchangeError, MismatchError
from contrastile.comm.connect import connect
from contrastile.comm.inprocess import InProcessGroup

WIDTH = 7
DTYPES = ("float16", "bfloat16", "float32", "float64", "int64")
SIZES = ([3, 0, 5, 1], [0, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 4])


PLACES: dict[str, Callable[[Any, str], Any]] = {
    "torch": lambda x, dtype: torch.from_numpy(x).to(getattr(torch, dtype)),
    "numpy": lambda x, dtype: x.astype(dtype),
}
"""The array libraries, and how each converts a float64 array of NumPy; tests on a GPU replace them."""


def data(*key: Any, shape: tuple[int, ...], dtype: str = "float32", library: str = "torch") -> Any:
    """A random array that depends on the key alone, so that every rank can make it."""
    rng = np.random.default_rng(zlib.crc32(repr(key).encode()))
    return PLACES[library](np.asarray(rng.standard_normal(shape) * 100), dtype)


def empty(like: Any) -> Any:
    """An array of the same shape and dtype with other values."""
    return library_of(like).full(like.shape, -77, str(like.dtype).removeprefix("torch."), like)


def host(x: Any) -> Any:
    """The values as a float64 array of NumPy."""
    return np.asarray(library_of(x).to_numpy(x)).astype(np.float64)


def equal(x: Any, y: Any) -> bool:
    """Whether two arrays hold the same values in the same dtype."""
    return x.dtype == y.dtype and np.array_equal(host(x), host(y))


def array_makers(comm: Any) -> Iterator[tuple[list[int], Callable[..., Any]]]:
    """Rows of every rank, and a function that makes arrays of one library and dtype; NumPy has no bfloat16."""
    for library, dtype in ((lib, x) for lib in PLACES for x in DTYPES if (lib, x) != ("numpy", "bfloat16")):
        for sizes in sizes_for(comm.size):
            yield sizes, partial(data, dtype=dtype, library=library)


def sizes_for(n: int) -> list[list[int]]:
    return [(sizes * n)[:n] for sizes in SIZES]


def shifts(comm: Any) -> None:
    for sizes, make in array_makers(comm):

        def message(rank: int, sizes: Any = sizes, make: Any = make) -> list[Any]:
            shapes = (sizes[rank], WIDTH), (sizes[rank],), ()
            return [make("shift", rank, shape, shape=shape) for shape in shapes]

        outgoing, expected = message(comm.rank), message((comm.rank - 1) % comm.size)
        incoming = [empty(x) for x in expected]
        comm.shift(outgoing, incoming).wait()
        assert all(map(equal, incoming, expected)), (sizes, make)
        assert all(map(equal, outgoing, message(comm.rank)))


def everybody_to_everybody(comm: Any) -> None:
    for sizes, make in array_makers(comm):

        def part(a: int, b: int, sizes: Any = sizes, make: Any = make) -> Any:
            return make("all", a, b, shape=((sizes[a] + 2 * sizes[b]) % 4, WIDTH))

        expected = [part(r, comm.rank) for r in range(comm.size)]
        incoming = [empty(x) for x in expected]
        comm.all_to_all([part(comm.rank, r) for r in range(comm.size)], incoming).wait()
        assert all(map(equal, incoming, expected)), (sizes, make)


def several_to_some(comm: Any) -> None:
    """Exchange arrays of several dtypes with the other ranks of the same parity."""
    for sizes in sizes_for(comm.size):
        peers = [r for r in range(comm.size) if r != comm.rank and (r - comm.rank) % 2 == 0]

        def arrays(a: int, b: int, sizes: Any = sizes) -> list[Any]:
            shapes = {"float64": (1,), "bfloat16": (sizes[a], WIDTH), "float32": (sizes[b],)}
            return [data("some", a, b, shape=shape, dtype=dtype) for dtype, shape in shapes.items()]

        expected = {r: arrays(r, comm.rank) for r in peers}
        incoming = {r: [empty(x) for x in xs] for r, xs in expected.items()}
        if peers:
            comm.exchange({r: arrays(comm.rank, r) for r in peers}, incoming).wait()
        else:
            alone = data("alone", shape=(1,))
            comm.exchange({comm.rank: [alone]}, {comm.rank: [empty(alone)]}).wait()
        assert all(all(map(equal, incoming[r], expected[r])) for r in peers), sizes


def gathers(comm: Any) -> None:
    for (sizes, make), tail in product(array_makers(comm), ((WIDTH,), ())):
        shards = [make("gather", r, shape=(k, *tail)) for r, k in enumerate(sizes)]
        expected = library_of(shards[0]).concat(shards)
        gathered = empty(expected)
        pending = comm.all_gather(shards[comm.rank], gathered, sizes)
        pending.wait()
        assert equal(gathered, expected), (sizes, make)
        gathered[:1] = 0
        # a second wait does not write the message again
        pending.wait()
        assert not host(gathered[:1]).any(), (sizes, make)


def waits_in_any_order(comm: Any) -> None:
    previous = (comm.rank - 1) % comm.size
    for seed in range(4):
        expected = [data("late", seed, i, previous, shape=(50, i)) for i in range(6)]
        outgoing = [data("late", seed, i, comm.rank, shape=(50, i)) for i in range(6)]
        incoming = [empty(x) for x in expected]
        pending_messages = [comm.shift([a], [b]) for a, b in zip(outgoing, incoming, strict=True)]
        gathered = empty(library_of(outgoing[1]).concat([outgoing[1]] * comm.size))
        pending_messages.append(comm.all_gather(outgoing[1], gathered, [50] * comm.size))
        # texts can be exchanged while messages are pending
        assert comm.tell("λ" * comm.rank) == ["λ" * r for r in range(comm.size)]
        # each rank waits in an order of its own
        random.Random(seed + comm.rank).shuffle(pending_messages)
        for pending in pending_messages:
            pending.wait()
        assert all(map(equal, incoming, expected)), seed


def long_messages(comm: Any) -> None:
    previous, default_piece = (comm.rank - 1) % comm.size, buffers.PIECE
    buffers.PIECE = 1000
    for size in (249, 250, 251, 12_345):
        outgoing, expected = (data("long", r, shape=(size,), library="numpy") for r in (comm.rank, previous))
        incoming = empty(expected)
        comm.shift([outgoing], [incoming]).wait()
        assert equal(incoming, expected), size
    buffers.PIECE = default_piece
    big = np.full(1 << 22, comm.rank, dtype=np.float64)
    incoming = empty(big)
    comm.shift([big], [incoming]).wait()
    assert (incoming == previous).all()


def records_and_texts(comm: Any) -> None:
    record = np.array([comm.rank, -(2**62) + comm.rank, 7], dtype=np.int64)
    assert comm.agree(record).tolist() == [[r, -(2**62) + r, 7] for r in range(comm.size)]
    texts = ["", "ein Wort", "λ → ∞", "x" * 5000]
    assert comm.tell(texts[comm.rank % 4]) == [texts[r % 4] for r in range(comm.size)]


def read_only_arrays(comm: Any) -> None:
    outgoing = np.arange(5.0)
    outgoing.flags.writeable = False
    incoming = np.zeros(5)
    comm.shift([outgoing], [incoming]).wait()
    assert (incoming == outgoing).all()
    strided = np.zeros((4, 4))[:, ::2]
    if comm.size > 1:
        error = error_message(ValueError, lambda: comm.all_to_all([strided] * comm.size, [strided.copy()] * comm.size))
        assert "contiguous" in error


def error_message(kind: type[Exception], action: Callable[[], object]) -> str:
    """The message of the error that an action raises, or "nothing"."""
    try:
        action()
    except kind as error:
        return str(error)
    return "nothing"


# checks for GPUs and for ranks that are threads; those share buffers.PIECE, which long_messages changes
BY_THREADS = (shifts, everybody_to_everybody, several_to_some, gathers, waits_in_any_order, records_and_texts)
EVERY = (*BY_THREADS, long_messages)


def wrong_deadlines(ranks: Any) -> None:
    """Set an invalid deadline on the last rank alone; every rank prints its error."""
    features = np.random.default_rng(ranks.rank).standard_normal((2, 5, 6))
    for deadline in ("soon", "-3"):
        os.environ["CONTRASTILE_DEADLINE"] = deadline if ranks.rank == ranks.size - 1 else str(PATIENCE)
        say(ranks.rank, error_message(MismatchError, lambda: contrastile.clip_loss(*features, 3.0, group=ranks.world)))
    del os.environ["CONTRASTILE_DEADLINE"]


def main(ranks: Any) -> None:
    # the errors of this first check must not disturb the checks that follow
    wrong_deadlines(ranks)
    world = connect(ranks.world, deadline=PATIENCE)
    assert (world.rank, world.size, world.deadline) == (ranks.rank, ranks.size, PATIENCE)
    assert connect(ranks.world) is world, "one communicator for each group"
    for check in (*EVERY, read_only_arrays):
        check(world)
        say(ranks.rank, f"{check.__name__} in a world of {world.size}")
    n = ranks.size
    # two groups, of different sizes if there are enough ranks, work while a message of the world is pending
    outgoing, incoming = np.arange(10) + ranks.rank, np.zeros(10, dtype=np.int64)
    pending = world.shift([outgoing], [incoming])
    halves = [[0], list(range(1, n))]
    half = connect(ranks.part(halves), deadline=PATIENCE)
    assert half.size == len(next(h for h in halves if ranks.rank in h))
    for check in EVERY:
        check(half)
    say(ranks.rank, f"a world of {half.size} beside it")
    evens = [list(range(0, n, 2)), list(range(1, n, 2))]
    group = ranks.part(evens)
    communicator = connect(group)
    for check in (shifts, gathers):
        check(communicator)
        check(half)
    pending.wait()
    assert (incoming == np.arange(10) + (ranks.rank - 1) % n).all()
    say(ranks.rank, "groups do not meet")
    first_calls_of_threads(ranks)
    if hasattr(ranks, "dist"):
        meshes(n)
        # as in torch before 2.8
        torch_group._CLONES = False
        first_calls_of_threads(ranks)
    free_and_close(group, communicator)
    ranks.finish()
    # half and not world: from torch 2.14 on a mesh that was flattened to the world keeps its group
    reference = weakref.ref(half)
    del world, half, communicator, group, pending
    gc.collect()
    assert (reference() is None) == ranks.frees_groups, "a communicator outlived its group"
    say(ranks.rank, "done")


THREADS, CALLS = 4, 5


def evaluate(group: Any, rank: int, number: int) -> list[bytes]:
    """The bits of the loss and the gradients of several calls over this group."""
    compute = contrastile.value_and_grad(contrastile.clip_loss, group=group, exchange=("ring", "gather")[number % 2])
    results = []
    for call in range(CALLS):
        rng = np.random.default_rng([rank, number, call])
        image, text = rng.standard_normal((2, 4 + rank, 6)).astype(np.float32)
        value, gradients = compute(image, text, 3.0)
        results += [np.asarray(x).tobytes() for x in (value, *gradients)]
    return results


def first_calls_of_threads(ranks: Any) -> None:
    """Several threads of each rank connect groups of their own at the same time, and then one shared group."""
    all_ranks, barrier = [list(range(ranks.size))], threading.Barrier(THREADS)
    groups = [ranks.part(all_ranks) for _ in range(THREADS)]

    def first_calls(number: int) -> list[bytes]:
        barrier.wait(PATIENCE)
        return evaluate(groups[number], ranks.rank, number)

    def connect_at_once(group: Any) -> Any:
        barrier.wait(PATIENCE)
        return connect(group)

    with ThreadPoolExecutor(THREADS) as pool:
        for number, results in enumerate(list(pool.map(first_calls, range(THREADS)))):
            expected = InProcessGroup[Any](ranks.size).run(lambda comm, i=number: evaluate(comm, comm.rank, i))
            assert results == expected[ranks.rank], number
        # all threads connect one more group at the same time
        assert len({id(x) for x in pool.map(connect_at_once, [ranks.part(all_ranks)] * THREADS)}) == 1
    say(ranks.rank, "threads have groups of their own")


def meshes(n: int) -> None:
    """A dimension of a mesh is a group, and so are several flattened dimensions."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    error = error_message(ValueError, lambda: connect(mesh))
    assert "one dimension, got one of dp, tp; pass the dimension that shards the batch, e.g. mesh['dp']" in error
    for submesh in (mesh["dp"], mesh["tp"]):
        communicator = connect(submesh)
        assert communicator is connect(submesh.get_group())
        assert communicator.hosts == ((0, 1),)
        for check in (shifts, gathers):
            check(communicator)
    assert connect(mesh["dp", "tp"]._flatten()).size == n


def free_and_close(group: Any, communicator: Any) -> None:
    """A communicator refuses messages after its group was freed, and after it was closed."""
    duplicate = group.Dup() if hasattr(group, "Dup") else None
    if duplicate is not None:
        other = connect(duplicate, deadline=PATIENCE)
        other.agree(np.zeros(1, dtype=np.int64))
        duplicate.Free()
        assert not other.host.comm, "not freed with its group"
        assert "closed" in error_message(ExchangeError, lambda: other.tell(""))
    communicator.close()
    assert "closed" in error_message(ExchangeError, lambda: communicator.tell(""))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(started())
