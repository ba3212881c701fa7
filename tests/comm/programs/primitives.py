"""Every primitive of a communicator against what it must give, bit for bit; started by test_engines."""

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
"""The array libraries, and how each makes an array of NumPy's in float64; tests on a GPU have others."""


def data(*key: Any, shape: tuple[int, ...], dtype: str = "float32", library: str = "torch") -> Any:
    """An array that every rank can make; different for every key."""
    draw = np.random.default_rng(zlib.crc32(repr(key).encode()))
    return PLACES[library](np.asarray(draw.standard_normal(shape) * 100), dtype)


def empty(like: Any) -> Any:
    """The same shape and dtype, other values."""
    return library_of(like).full(like.shape, -77, str(like.dtype).removeprefix("torch."), like)


def host(x: Any) -> Any:
    """The values in float64."""
    return np.asarray(library_of(x).to_numpy(x)).astype(np.float64)


def equal(x: Any, y: Any) -> bool:
    """Whether two arrays hold the same values in the same dtype."""
    return x.dtype == y.dtype and np.array_equal(host(x), host(y))


def trials(comm: Any) -> Iterator[tuple[list[int], Callable[..., Any]]]:
    """Rows of every rank, and what makes arrays of a library and a dtype; NumPy has no bfloat16."""
    for library, dtype in ((lib, x) for lib in PLACES for x in DTYPES if (lib, x) != ("numpy", "bfloat16")):
        for sizes in sizes_for(comm.size):
            yield sizes, partial(data, dtype=dtype, library=library)


def sizes_for(n: int) -> list[list[int]]:
    return [(sizes * n)[:n] for sizes in SIZES]


def shifts(comm: Any) -> None:
    for sizes, made in trials(comm):

        def message(rank: int, sizes: Any = sizes, made: Any = made) -> list[Any]:
            shapes = (sizes[rank], WIDTH), (sizes[rank],), ()
            return [made("shift", rank, s, shape=s) for s in shapes]

        sent, expected = message(comm.rank), message((comm.rank - 1) % comm.size)
        arrived = [empty(x) for x in expected]
        comm.shift(sent, arrived).wait()
        assert all(map(equal, arrived, expected)), (sizes, made)
        assert all(map(equal, sent, message(comm.rank)))


def everybody_to_everybody(comm: Any) -> None:
    for sizes, made in trials(comm):

        def part(a: int, b: int, sizes: Any = sizes, made: Any = made) -> Any:
            return made("all", a, b, shape=((sizes[a] + 2 * sizes[b]) % 4, WIDTH))

        expected = [part(r, comm.rank) for r in range(comm.size)]
        arrived = [empty(x) for x in expected]
        comm.all_to_all([part(comm.rank, r) for r in range(comm.size)], arrived).wait()
        assert all(map(equal, arrived, expected)), (sizes, made)


def several_to_some(comm: Any) -> None:
    """Arrays of several dtypes to and from the ranks of the same parity, and none to this one."""
    for sizes in sizes_for(comm.size):
        some = [r for r in range(comm.size) if r != comm.rank and (r - comm.rank) % 2 == 0]

        def parts(a: int, b: int, sizes: Any = sizes) -> list[Any]:
            shapes = {"float64": (1,), "bfloat16": (sizes[a], WIDTH), "float32": (sizes[b],)}
            return [data("some", a, b, shape=s, dtype=dtype) for dtype, s in shapes.items()]

        expected = {r: parts(r, comm.rank) for r in some}
        arrived = {r: [empty(x) for x in xs] for r, xs in expected.items()}
        if some:
            comm.exchange({r: parts(comm.rank, r) for r in some}, arrived).wait()
        else:
            alone = data("alone", shape=(1,))
            comm.exchange({comm.rank: [alone]}, {comm.rank: [empty(alone)]}).wait()
        assert all(all(map(equal, arrived[r], expected[r])) for r in some), sizes


def gathers(comm: Any) -> None:
    for (sizes, made), tail in product(trials(comm), ((WIDTH,), ())):
        shards = [made("gather", r, shape=(k, *tail)) for r, k in enumerate(sizes)]
        expected = library_of(shards[0]).concat(shards)
        whole = empty(expected)
        pending = comm.all_gather(shards[comm.rank], whole, sizes)
        pending.wait()
        assert equal(whole, expected), (sizes, made)
        whole[:1] = 0
        # a message arrives once
        pending.wait()
        assert not host(whole[:1]).any(), (sizes, made)


def waits_in_any_order(comm: Any) -> None:
    behind = (comm.rank - 1) % comm.size
    for seed in range(4):
        expected = [data("late", seed, i, behind, shape=(50, i)) for i in range(6)]
        sent = [data("late", seed, i, comm.rank, shape=(50, i)) for i in range(6)]
        arrived = [empty(x) for x in expected]
        posted = [comm.shift([a], [b]) for a, b in zip(sent, arrived, strict=True)]
        whole = empty(library_of(sent[1]).concat([sent[1]] * comm.size))
        posted.append(comm.all_gather(sent[1], whole, [50] * comm.size))
        # also while messages are under way
        assert comm.tell("λ" * comm.rank) == ["λ" * r for r in range(comm.size)]
        # each rank in an order of its own
        random.Random(seed + comm.rank).shuffle(posted)
        for pending in posted:
            pending.wait()
        assert all(map(equal, arrived, expected)), seed


def long_messages(comm: Any) -> None:
    behind, usual = (comm.rank - 1) % comm.size, buffers.PIECE
    buffers.PIECE = 1000
    for size in (249, 250, 251, 12_345):
        sent, expected = (data("long", r, shape=(size,), library="numpy") for r in (comm.rank, behind))
        arrived = empty(expected)
        comm.shift([sent], [arrived]).wait()
        assert equal(arrived, expected), size
    buffers.PIECE = usual
    big = np.full(1 << 22, comm.rank, dtype=np.float64)
    arrived = empty(big)
    comm.shift([big], [arrived]).wait()
    assert (arrived == behind).all()


def records_and_texts(comm: Any) -> None:
    record = np.array([comm.rank, -(2**62) + comm.rank, 7], dtype=np.int64)
    assert comm.agree(record).tolist() == [[r, -(2**62) + r, 7] for r in range(comm.size)]
    texts = ["", "ein Wort", "λ → ∞", "x" * 5000]
    assert comm.tell(texts[comm.rank % 4]) == [texts[r % 4] for r in range(comm.size)]


def read_only_arrays(comm: Any) -> None:
    sent = np.arange(5.0)
    sent.flags.writeable = False
    arrived = np.zeros(5)
    comm.shift([sent], [arrived]).wait()
    assert (arrived == sent).all()
    gaps = np.zeros((4, 4))[:, ::2]
    if comm.size > 1:
        said = refusal(ValueError, lambda: comm.all_to_all([gaps] * comm.size, [gaps.copy()] * comm.size))
        assert "contiguous" in said


def refusal(kind: type[Exception], action: Callable[[], object]) -> str:
    """What it says when it refuses."""
    try:
        action()
    except kind as error:
        return str(error)
    return "nothing"


# also by ranks that are threads, which share the size of a piece, and on GPUs
BY_THREADS = (shifts, everybody_to_everybody, several_to_some, gathers, waits_in_any_order, records_and_texts)
EVERY = (*BY_THREADS, long_messages)


def wrong_deadlines(ranks: Any) -> None:
    """A deadline that is none on the last rank alone; every rank says what it raises."""
    pair = np.random.default_rng(ranks.rank).standard_normal((2, 5, 6))
    for deadline in ("soon", "-3"):
        os.environ["CONTRASTILE_DEADLINE"] = deadline if ranks.rank == ranks.size - 1 else str(PATIENCE)
        say(ranks.rank, refusal(MismatchError, lambda: contrastile.clip_loss(*pair, 3.0, group=ranks.world)))
    del os.environ["CONTRASTILE_DEADLINE"]


def main(ranks: Any) -> None:
    # what it has left does not disturb the rest
    wrong_deadlines(ranks)
    world = connect(ranks.world, deadline=PATIENCE)
    assert (world.rank, world.size, world.deadline) == (ranks.rank, ranks.size, PATIENCE)
    assert connect(ranks.world) is world, "one communicator for each group"
    for check in (*EVERY, read_only_arrays):
        check(world)
        say(ranks.rank, f"{check.__name__} in a world of {world.size}")
    n = ranks.size
    # two groups at once, of different sizes where there are enough ranks, while the world has a message under way
    sent, arrived = np.arange(10) + ranks.rank, np.zeros(10, dtype=np.int64)
    pending = world.shift([sent], [arrived])
    halves = [[0], list(range(1, n))]
    half = connect(ranks.part(halves), deadline=PATIENCE)
    assert half.size == len(next(h for h in halves if ranks.rank in h))
    for check in EVERY:
        check(half)
    say(ranks.rank, f"a world of {half.size} beside it")
    evens = [list(range(0, n, 2)), list(range(1, n, 2))]
    mine = ranks.part(evens)
    other = connect(mine)
    for check in (shifts, gathers):
        check(other)
        check(half)
    pending.wait()
    assert (arrived == np.arange(10) + (ranks.rank - 1) % n).all()
    say(ranks.rank, "groups do not meet")
    first_calls_of_threads(ranks)
    if hasattr(ranks, "dist"):
        meshes(n)
        # as before torch 2.8
        torch_group._CLONES = False
        first_calls_of_threads(ranks)
    forgotten(mine, other)
    ranks.finish()
    # not the world's: from torch 2.14 on a mesh that was flattened to it keeps its group
    kept = weakref.ref(half)
    del world, half, other, mine, pending
    gc.collect()
    assert (kept() is None) == ranks.forgets, "a communicator outlived its group"
    say(ranks.rank, "done")


THREADS, CALLS = 4, 5


def evaluated(group: Any, rank: int, number: int) -> list[bytes]:
    """The loss and gradients of several calls over this group, as their bits."""
    both = contrastile.value_and_grad(contrastile.clip_loss, group=group, exchange=("ring", "gather")[number % 2])
    found = []
    for call in range(CALLS):
        draw = np.random.default_rng([rank, number, call])
        image, text = draw.standard_normal((2, 4 + rank, 6)).astype(np.float32)
        value, gradients = both(image, text, 3.0)
        found += [np.asarray(x).tobytes() for x in (value, *gradients)]
    return found


def first_calls_of_threads(ranks: Any) -> None:
    """Several threads of each rank, each with a group of its own, connect these at once."""
    everybody, together = [list(range(ranks.size))], threading.Barrier(THREADS)
    groups = [ranks.part(everybody) for _ in range(THREADS)]

    def first(number: int) -> list[bytes]:
        together.wait(PATIENCE)
        return evaluated(groups[number], ranks.rank, number)

    def connected(group: Any) -> Any:
        together.wait(PATIENCE)
        return connect(group)

    with ThreadPoolExecutor(THREADS) as pool:
        for number, found in enumerate(list(pool.map(first, range(THREADS)))):
            alone = InProcessGroup[Any](ranks.size).run(lambda comm, i=number: evaluated(comm, comm.rank, i))
            assert found == alone[ranks.rank], number
        # one more group, that all threads want first
        assert len({id(x) for x in pool.map(connected, [ranks.part(everybody)] * THREADS)}) == 1
    say(ranks.rank, "threads have groups of their own")


def meshes(n: int) -> None:
    """Dimensions of a mesh are groups: of each slice, and of several that were made one."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    said = refusal(ValueError, lambda: connect(mesh))
    assert "one dimension, got one of dp, tp; pass the dimension that shards the batch, e.g. mesh['dp']" in said
    for each in (mesh["dp"], mesh["tp"]):
        communicator = connect(each)
        assert communicator is connect(each.get_group())
        assert communicator.hosts == ((0, 1),)
        for check in (shifts, gathers):
            check(communicator)
    assert connect(mesh["dp", "tp"]._flatten()).size == n


def forgotten(group: Any, communicator: Any) -> None:
    """What is freed, and what is closed, carries nothing more."""
    again = group.Dup() if hasattr(group, "Dup") else None
    if again is not None:
        beside = connect(again, deadline=PATIENCE)
        beside.agree(np.zeros(1, dtype=np.int64))
        again.Free()
        assert not beside.host.comm, "not freed with its group"
        assert "closed" in refusal(ExchangeError, lambda: beside.tell(""))
    communicator.close()
    assert "closed" in refusal(ExchangeError, lambda: communicator.tell(""))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(started())
