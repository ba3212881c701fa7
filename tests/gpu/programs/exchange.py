"""Shows that the exchange runs on the GPUs of one host: every primitive, bit for bit.

``torchrun --nproc-per-node N exchange.py torch`` for NCCL through torch, ``... gloo`` for GPUs through the host,
``mpirun -n N python -m mpi4py exchange.py mpi`` for MPI's ranks (through the host where they share a GPU), and
``python exchange.py alone`` for NCCL from a GPU to itself. With ``killed``, ``raises``, ``leaves`` or ``stalls`` the
last rank does that in the middle of a ring instead, and the others must end within CONTRASTILE_DEADLINE. One line per
check. The losses over these ranks are ``contrastile verify --world``'s.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np

from contrastile.backends.arrays import library_of
from contrastile.comm.connect import connect

SECONDS = 240
FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raises": lambda: _raise(RuntimeError("this rank has a defect")),
    "leaves": lambda: sys.exit(0),
    "stalls": lambda: time.sleep(600),
}
DTYPES = ("float16", "bfloat16", "float32", "float64", "int64")
SIZES = ([3, 0, 5, 1], [0, 0, 0, 0], [2, 2, 2, 2], [0, 0, 0, 4], [70_001, 3, 131_072, 0])


def join(engine: str) -> tuple[Any, int, Callable[[], None]]:
    """The group of all ranks, this rank's GPU, and what ends it."""
    if engine == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD, MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Get_rank(), lambda: None
    import torch
    import torch.distributed as dist

    number = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(number % torch.cuda.device_count())
    dist.init_process_group("nccl" if engine == "torch" else "gloo")
    return dist.group.WORLD, number, dist.destroy_process_group


def libraries(number: int) -> Iterator[tuple[str, Callable[[Any, str], Any]]]:
    """The array libraries that are there, and how each puts a NumPy array on this rank's GPU."""
    try:
        import cupy
    except ImportError:
        pass
    else:
        cupy.cuda.Device(number % cupy.cuda.runtime.getDeviceCount()).use()
        yield "cupy", lambda x, dtype: cupy.asarray(x).astype(dtype)
    try:
        import torch
    except ImportError:
        return
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    yield "torch", lambda x, dtype: torch.from_numpy(x).to(device, getattr(torch, dtype))


def data(*key: Any, shape: tuple[int, ...]) -> Any:
    """Values that every rank can make; different for every key."""
    return np.random.default_rng(zlib.crc32(repr(key).encode())).integers(-120, 120, shape).astype(np.float64)


def host(x: Any) -> Any:
    """The values in float64."""
    return np.asarray(library_of(x).to_numpy(x)).astype(np.float64)


def primitives(comm: Any, put: Callable[[Any, str], Any]) -> int:
    """Every primitive, with uneven sizes and nothing at all; how many messages were right."""
    n, rank, count = comm.size, comm.rank, 0

    def check(got: Any, expected: Any, *what: Any) -> None:
        nonlocal count
        assert np.array_equal(host(got), expected), (rank, *what)
        count += 1

    for dtype in DTYPES:
        for sizes in ((sizes * n)[:n] for sizes in SIZES):
            behind, shape = (rank - 1) % n, (sizes[rank], 5)
            sent = put(data("x", rank, shape=shape), dtype)
            arrived = put(data("old", shape=(sizes[behind], 5)), dtype)
            whole = put(data("old", shape=(sum(sizes), 5)), dtype)
            parts = [put(data("old", shape=(sizes[r], 5)), dtype) for r in range(n)]
            # three messages at once, waited for in another order
            late = [
                comm.shift([sent, sent[:1]], [arrived, put(data("old", shape=(min(1, sizes[behind]), 5)), dtype)]),
                comm.all_gather(sent, whole, sizes),
                comm.all_to_all([sent] * n, parts),
            ]
            for pending in reversed(late):
                pending.wait()
            check(arrived, data("x", behind, shape=(sizes[behind], 5)), "shift", dtype, sizes)
            everyone = [data("x", r, shape=(sizes[r], 5)) for r in range(n)]
            check(whole, np.concatenate(everyone), "all_gather", dtype, sizes)
            for r in range(n):
                check(parts[r], everyone[r], "all_to_all", dtype, sizes)
    return count


def unwaited(comm: Any, put: Callable[[Any, str], Any]) -> int:
    """Messages of all sizes, none of which the host waits for; how many numbers were right."""
    n, rank, count = comm.size, comm.rank, 0
    expected = []
    for turn in range(200):
        sizes = np.random.default_rng(turn).choice([0, 1, 999, 65_536, 65_537, 400_000], (n, n))
        incoming = [put(np.full(sizes[r][rank], -1.0), "float32") for r in range(n)]
        x = put(np.arange(400_000.0), "float32")
        x += 1000 * rank + turn
        pending = comm.all_to_all([x[: sizes[rank][r]] for r in range(n)], incoming)
        pending.wait()
        # what was sent is the sender's again
        x *= 0
        expected.append((incoming, [np.arange(sizes[r][rank]) + 1000 * r + turn for r in range(n)]))
    for incoming, values in expected:
        for got, wanted in zip(incoming, values, strict=True):
            assert np.array_equal(host(got), wanted), (rank, wanted.size)
            count += wanted.size
    return count


def overwritten(comm: Any, put: Callable[[Any, str], Any]) -> None:
    """Work queued before a message is posted is in it, and work queued after it was waited for is not."""
    n, rank = comm.size, comm.rank
    x, y = (put(data("z", rank, shape=(1 << 22,)), "float32") for _ in range(2))
    for turn in range(20):
        for _ in range(4):
            x *= 1
        x += 1
        comm.shift([x], [y]).wait()
        x -= 1
        y *= 1
        expected = data("z", (rank - 1) % n, shape=(1 << 22,)) + 1
        if turn % 5 == 4:
            assert np.array_equal(host(y), expected), (rank, turn)


def _raise(error: Exception) -> None:
    raise error


def fail(comm: Any, put: Callable[[Any, str], Any], fault: str) -> None:
    """The last rank fails in the middle of a ring; the others wait for it on the device."""
    x, y = (put(data(fault, shape=(1 << 20,)), "float32") for _ in range(2))
    for step in range(1000):
        if step == 5 and comm.rank == comm.size - 1:
            print(f"[{comm.rank}] fails {time.time():.2f}", flush=True)
            FAULTS[fault]()
        try:
            comm.shift([x], [y]).wait()
            if step % 2:
                # the host sits in the device's runtime: nothing can be raised there
                host(y)
        except RuntimeError as error:
            print(f"[{comm.rank}] {time.time():.2f} {type(error).__name__}: {error}", flush=True)
            raise


def alone() -> None:
    """Both ways to NCCL with one rank, which sends to itself."""
    import torch
    import torch.distributed as dist

    from contrastile.comm import nccl, torch_group
    from contrastile.comm.driver import Gpu
    from contrastile.comm.watchdog import Watchdog

    calls, gpu = nccl.NCCL(), Gpu(0)
    with gpu.active():
        communicator = calls.connect(calls.key(), 0, 1)
        channels: list[Any] = [nccl.NCCLChannel(calls, communicator, gpu, gpu.stream(), Watchdog(lambda: 10.0))]
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.global_ranks_in_group = [0]
    engine = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    through_torch = torch_group.ThroughTorch(engine, Watchdog(lambda: 10.0))
    through_torch.open(torch.device("cuda", 0), 1)
    channels.append(through_torch)
    for channel in channels:
        for library, put in libraries(0):
            for dtype in DTYPES:
                x = put(data(dtype, shape=(1000, 7)), dtype)
                y = put(np.zeros((1000, 7)), dtype)
                try:
                    pendings = [channel.post({0: [x]}, {0: [y]}, i, lambda: 1.0) for i in range(20)]
                except (RuntimeError, ValueError) as error:
                    print(f"{channel.name} {library} {dtype}: {type(error).__name__} {str(error)[:200]}", flush=True)
                    break
                for pending in pendings:
                    pending.wait()
                assert np.array_equal(host(x), host(y)), (channel.name, library, dtype)
            else:
                print(f"{channel.name} {library}: right", flush=True)
        channel.close()
    print("done", flush=True)


def main() -> None:
    """One of the programs."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    started, engine = time.monotonic(), sys.argv[1]
    if engine == "alone":
        alone()
        return
    group, number, leave = join(engine)
    comm = connect(group)
    for library, put in libraries(number):
        x = put(np.zeros(1), "float32")
        comm.shift([x], [put(np.zeros(1), "float32")]).wait()
        _say(comm, f"{engine} {library}: messages by {comm.name}", started)
        for fault in set(sys.argv) & set(FAULTS):
            fail(comm, put, fault)
        count = primitives(comm, put)
        numbers = unwaited(comm, put)
        overwritten(comm, put)
        _say(comm, f"{engine} {library}: {numbers} numbers of messages that nobody waited for right", started)
        _say(comm, f"{engine} {library}: {count} messages right, by {comm.name}", started)
    comm.agree(np.zeros(1, dtype=np.int64))
    leave()
    if comm.rank == 0:
        print("done", flush=True)


def _say(comm: Any, text: str, started: float) -> None:
    if comm.rank == 0:
        print(f"{time.monotonic() - started:5.1f} s {text}", flush=True)


if __name__ == "__main__":
    main()
