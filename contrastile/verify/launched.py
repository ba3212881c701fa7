"""The processes of mpirun or torchrun as a world.

A failed program's communicator is not used again. A rank that raises tells the others when they have finished, or have
given up on it. A watchdog ends a rank that hangs; its launcher then ends the others.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import math
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from contrastile.comm.buffers import split
from contrastile.comm.communicator import Communicator, ExchangeError
from contrastile.comm.connect import connect
from contrastile.comm.watchdog import deadline_or, until
from contrastile.environment import finds_a_gpu, torch_gpus
from contrastile.reporting import CannotRunError
from contrastile.verify.worlds import LARGEST, Threads, World, portable, simulated

T = TypeVar("T")


@dataclass
class Launched(World):
    """One of the processes of a launcher.

    Attributes:
        rank: this process's rank.
        all_gather: gathers one object from each process, and returns all by rank.
        duplicate: makes a fresh group of all processes.
    """

    name: str
    launch: Sequence[str]
    rank: int
    size: int
    all_gather: Callable[[Any], list[Any]]
    duplicate: Callable[[], Any]
    per_host: int | None = None
    _communicator: Communicator | None = None
    _deadline: float = field(default_factory=lambda: 3 * deadline_or(None) + 60)

    can_be_late = False

    def __post_init__(self) -> None:
        self.leads = self.rank == 0
        self.hosts = simulated(self.size, self.size)

    def run(self, program: Callable[[Communicator], T], *, late: bool = False) -> list[T]:
        """See ``World``. Raises the first rank's error, but an ExchangeError only if all errors are."""
        with self._watched():
            if self._communicator is None:
                self._communicator = connect(self.duplicate())
                if self.per_host is not None:
                    self._communicator.hosts = simulated(self.size, self.per_host)
                self.hosts = self._communicator.hosts
            own_result: tuple[Any, Exception | None]
            try:
                own_result = program(self._communicator), None
            except Exception as error:
                own_result = None, portable(error)
            results = self.all_gather(own_result)
        errors = [error for _, error in results if error is not None]
        if errors:
            # a failed program may have left messages behind
            self._communicator = None
            raise min(errors, key=lambda error: isinstance(error, ExchangeError))
        return [value for value, _ in results]

    def share(self, x: T) -> T:
        with self._watched():
            value: T = self.all_gather(x if self.leads else None)[0]
            return value

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """In this context a process that hangs prints its stacks and ends."""
        faulthandler.dump_traceback_later(self._deadline, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@contextmanager
def opened(name: str | None, device: str, per_host: int | None = None) -> Iterator[World | None]:
    """The world that ``--world`` names; None for none.

    Raises:
        CannotRunError: there is no such world, or its launcher or package is missing.
    """
    if name is None:
        yield None
        return
    if name not in ("mpi", "torch"):
        if not (name.isdecimal() and 1 <= int(name) <= LARGEST):
            raise CannotRunError(f"--world must be 1..{LARGEST}, mpi or torch, got {name!r}")
        yield Threads(int(name), per_host=per_host)
        return
    package = {"mpi": "mpi4py", "torch": "torch"}[name]
    if importlib.util.find_spec(package) is None:
        raise CannotRunError(f"--world {name} needs {package}; run: pip install 'contrastile[{name}]'")
    device_type = "cuda" if on_gpus(name, device) else "cpu"
    with (mpi if name == "mpi" else torch)(device_type) as world:
        world.per_host = per_host
        yield world


def on_gpus(name: str | None, device: str) -> bool:
    """Whether the ranks of this world use GPUs. "auto" needs a GPU, under torchrun one for each rank of the host."""
    if device != "auto":
        return device == "cuda"
    if name != "torch":
        return finds_a_gpu()
    return torch_gpus() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def mpi(device: str) -> Iterator[Launched]:
    """The processes of ``mpirun``.

    Raises:
        CannotRunError: there is no MPI, or one rank.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CannotRunError(f"--world mpi cannot load MPI ({error}); run: pip install mpich") from error
    comm = MPI.COMM_WORLD
    if comm.Get_size() == 1:
        command = "mpirun -n 4 python -m mpi4py -m contrastile verify --world mpi"
        raise CannotRunError(f"--world mpi runs under mpirun on 2 ranks or more, got 1; run: {command}")
    if device == "cuda":
        _take_gpu(comm.Split_type(MPI.COMM_TYPE_SHARED).Get_rank())
    launch = ["mpirun", "-n", str(comm.Get_size()), "python", "-m", "mpi4py", "-m", "contrastile"]
    rank, size = comm.Get_rank(), comm.Get_size()

    def all_gather(x: Any) -> list[Any]:
        # a blocking collective spins, and takes the core from a rank that computes: poll until all are here
        message, counts = pickle.dumps(x), np.empty(size, np.int64)
        until(comm.Iallgather(np.array([len(message)]), counts).Test, math.inf)
        received = bytearray(counts.sum())
        until(comm.Iallgatherv([message, MPI.BYTE], [received, counts, MPI.BYTE]).Test, math.inf)
        return [pickle.loads(part) for part in split(received, counts.tolist())]

    yield Launched("mpi", launch, rank, size, all_gather, comm.Dup)


@contextmanager
def torch(device: str) -> Iterator[Launched]:
    """The processes of ``torchrun``: gloo on the host, NCCL with ``--device cuda``.

    Raises:
        CannotRunError: not under torchrun.
    """
    import torch.distributed as dist

    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        command = "torchrun --nproc-per-node 4 -m contrastile verify --world torch"
        raise CannotRunError(f"--world torch runs under torchrun; run: {command}")
    if device == "cuda":
        _take_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        size = dist.get_world_size()
        host = dist.new_group(backend="gloo")

        def all_gather(x: Any) -> list[Any]:
            objects: list[Any] = [None] * size
            dist.all_gather_object(objects, x, group=host)
            return objects

        launch = ["torchrun", "--nproc-per-node", str(size), "-m", "contrastile"]
        yield Launched("torch", launch, dist.get_rank(), size, all_gather, dist.new_group)
    finally:
        dist.destroy_process_group()


def _take_gpu(number: int) -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(number % torch.cuda.device_count())
