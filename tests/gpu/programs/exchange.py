"""Check every primitive of the exchange on the GPUs of one host, bit for bit.

``torchrun --nproc-per-node N exchange.py torch`` for NCCL through torch, ``... gloo`` for GPUs through the host,
``mpirun -n N python -m mpi4py exchange.py mpi`` for MPI's ranks (through the host where they share a GPU), and
``python exchange.py alone`` for NCCL from a GPU to itself. It prints one line per check. The checks of primitives are
those of ``tests/comm/programs``. ``contrastile verify --world`` checks the losses over these ranks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "comm" / "programs"))

import numpy as np
from primitives import BY_THREADS, DTYPES, PLACES, error_message, host

import contrastile
from contrastile.comm.communicator import MismatchError
from contrastile.comm.connect import connect

SECONDS = 240


def join(engine: str) -> tuple[Any, int, Callable[[], None]]:
    """The group of all ranks, the rank within its host, and a function that closes the group."""
    if engine == "mpi":
        from mpi4py import MPI

        return MPI.COMM_WORLD, MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).Get_rank(), lambda: None
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group("nccl" if engine == "torch" else "gloo")
    return dist.group.WORLD, local_rank, dist.destroy_process_group


def libraries(local_rank: int) -> Iterator[tuple[str, Callable[[Any, str], Any]]]:
    """The installed array libraries, and a function that copies a NumPy array to the GPU of this rank."""
    try:
        import cupy
    except ImportError:
        pass
    else:
        cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()
        yield "cupy", lambda x, dtype: cupy.asarray(x).astype(dtype)
    try:
        import torch
    except ImportError:
        return
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    yield "torch", lambda x, dtype: torch.from_numpy(x).to(device, getattr(torch, dtype))


def send_without_host_waits(comm: Any, put: Callable[[Any, str], Any]) -> int:
    """Send messages of all sizes without a wait on the host, and return the count of correct numbers."""
    n, rank, count = comm.size, comm.rank, 0
    expected = []
    for turn in range(200):
        sizes = np.random.default_rng(turn).choice([0, 1, 999, 65_536, 65_537, 400_000], (n, n))
        incoming = [put(np.full(sizes[r][rank], -1.0), "float32") for r in range(n)]
        x = put(np.arange(400_000.0), "float32")
        x += 1000 * rank + turn
        pending = comm.all_to_all([x[: sizes[rank][r]] for r in range(n)], incoming)
        pending.wait()
        # after the wait the sender may overwrite the array
        x *= 0
        expected.append((incoming, [np.arange(sizes[r][rank]) + 1000 * r + turn for r in range(n)]))
    for incoming, values in expected:
        for array, value in zip(incoming, values, strict=True):
            assert np.array_equal(host(array), value), (rank, value.size)
            count += value.size
    return count


def overwrite_around_messages(comm: Any, put: Callable[[Any, str], Any]) -> None:
    """A message contains work that was queued before its post, and no work that was queued after the wait for it."""
    n, rank = comm.size, comm.rank
    x, y = (put(np.full(1 << 22, float(rank)), "float32") for _ in range(2))
    for turn in range(20):
        for _ in range(4):
            x *= 1
        x += 1
        comm.shift([x], [y]).wait()
        x -= 1
        y *= 1
        if turn % 5 == 4:
            assert (host(y) == (rank - 1) % n + 1).all(), (rank, turn)


def scales_that_differ(comm: Any, put: Callable[[Any, str], Any]) -> None:
    """The loss is NaN on every rank, and the next call raises."""
    features = [put(np.eye(4, 9), "float32") for _ in range(2)]
    for exchange in ("ring", "gather", "replicate"):
        value_and_grad = contrastile.value_and_grad(contrastile.clip_loss, group=comm, exchange=exchange)
        value, gradients = value_and_grad(*features, put(np.asarray(14.25 + comm.rank), "float32"))
        assert all(np.isnan(host(x)).all() for x in (value, *gradients)), (exchange, value)
        error = error_message(MismatchError, lambda: value_and_grad(*features, put(np.asarray(14.25), "float32")))  # noqa: B023
        assert error.startswith("scale must be the same on every rank, got 14.25 on rank 0, 15.25 on rank 1"), error


def alone() -> None:
    """NCCL with one rank, which sends to itself."""
    from contrastile.comm import nccl
    from contrastile.comm.driver import Gpu
    from contrastile.comm.watchdog import Watchdog

    calls, gpu = nccl.NCCL(), Gpu(0)
    with gpu.active:
        channel = nccl.NCCLChannel(calls, calls.connect(calls.key(), 0, 1), gpu, gpu.stream(), Watchdog(lambda: 10.0))
    for library, put in libraries(0):
        for dtype in DTYPES:
            x, y = put(np.arange(7000.0).reshape(1000, 7), dtype), put(np.zeros((1000, 7)), dtype)
            for pending in [channel.post({0: [x]}, {0: [y]}, i, lambda: 1.0) for i in range(20)]:
                pending.wait()
            assert np.array_equal(host(x), host(y)), (library, dtype)
        print(f"{library}: right", flush=True)
    channel.close()
    print("done", flush=True)


def main() -> None:
    """Run the program of the engine."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    start, engine = time.monotonic(), sys.argv[1]
    if engine == "alone":
        alone()
        return
    group, local_rank, close_group = join(engine)
    comm = connect(group)
    for library, put in libraries(local_rank):
        x = put(np.zeros(1), "float32")
        comm.shift([x], [put(np.zeros(1), "float32")]).wait()
        _say(comm, f"{engine} {library}: messages by {comm.name}", start)
        # the checks use this name for every library
        PLACES.clear()
        PLACES["torch"] = put
        for check in BY_THREADS:
            check(comm)
        _say(comm, f"{engine} {library}: every primitive right, by {comm.name}", start)
        numbers = send_without_host_waits(comm, put)
        overwrite_around_messages(comm, put)
        if comm.size > 1:
            scales_that_differ(comm, put)
        _say(comm, f"{engine} {library}: {numbers} numbers of messages that nobody waited for right", start)
    comm.agree(np.zeros(1, dtype=np.int64))
    close_group()
    if comm.rank == 0:
        print("done", flush=True)


def _say(comm: Any, text: str, start: float) -> None:
    if comm.rank == 0:
        print(f"{time.monotonic() - start:5.1f} s {text}", flush=True)


if __name__ == "__main__":
    main()
