"""A loss on several ranks of torch.distributed: the parameters' gradients after DDP's mean, and the value.

Every rank is a process with gloo. The features of the joined batch are parameters of a module under DDP, and each rank
calls the loss with its own rows of them. A parameter of a tower, whatever the tower, has the right gradient after DDP's
mean exactly where these have the gradient of the joined batch's loss. The value is the mean of the ranks' values.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from contrastile.backends.contract import state_dtype
from contrastile.reporting import ending, one_line
from contrastile.verify.arithmetic import Spread
from contrastile.verify.comparison import Comparisons, Worst, parts
from contrastile.verify.losses import allowed
from contrastile.verify.losses.cases import LossCase, sized
from contrastile.verify.losses.claims import Claims
from contrastile.verify.losses.properties import compared
from contrastile.verify.losses.subject import Loss, Result, load
from contrastile.verify.trial import SkipError
from contrastile.verify.truth import Outcome

SHARDS = {"shards": "every rank has as many rows", "shards@uneven": "the ranks have different numbers of rows"}
"""The cases of several ranks, and what they are."""

DISTRIBUTED = {
    "ddp-value": (("loss",), "The mean of the ranks' values is the loss of the joined batch."),
    "ddp-gradients": (("rows", "columns"), "The parameters' gradients after DDP's mean are those of the joined batch."),
    "ddp-scale-gradient": (("scale", "bias"), "So are the gradients of the scale and of the bias."),
}
"""The properties of several ranks: the fields that each compares, and what it says."""

Results = dict[int, "dict[str, Result] | str"]
"""What each number of ranks found, case by case, or why not."""

# a second of work takes so long on a busy machine; two worlds stay under the limit of a check
_SECONDS = 120.0
_START = 30.0
_LATE = f"the ranks took longer than {_SECONDS:g} s"
# the child imports from the parent's path, whatever its current folder is
_PROGRAM = "import sys; sys.path[:] = {path!r}; from contrastile.verify.losses.ranks import main; main()"


def shared(name: str, claims: Claims, ranks: int) -> tuple[LossCase, tuple[int, ...]]:
    """The case of this name for so many ranks: the joined batch, and the rows of each rank.

    Raises:
        ValueError: the loss claims none; the message says which claim is missing.
    """
    wished = [13] * ranks if name == "shards" else [5 + 8 * rank for rank in range(ranks)]
    if name != "shards" and claims.equal_shards:
        raise ValueError("different numbers of rows on the ranks")
    shards = [claims.batch(rows) for rows in wished]
    width = claims.width(40)
    if None in shards or width is None:
        raise ValueError("batches of few rows")
    if name != "shards" and len(set(shards)) == 1:
        raise ValueError("batches of different sizes")
    sizes = tuple(rows for rows in shards if rows is not None)
    return sized(claims, sum(sizes), width, dtype_of(claims)), sizes


def dtype_of(claims: Claims) -> str:
    """The dtype in which ranks are tested: float32 where it is claimed."""
    return next((x for x in ("float32", "float64") if x in claims.dtypes), claims.dtypes[0])


def missing(claims: Claims) -> str:
    """Why a loss with these claims is not tested on ranks, "" where it is."""
    if not claims.ranks:
        return "several ranks"
    learns = claims.by_autograd and claims.feature_gradients
    return "" if learns else "several ranks, whose gradients DDP takes from autograd"


def check(loss: Loss, name: str, ranks: int, fields: tuple[str, ...]) -> Comparisons:
    case, shards = shared(name, loss.claims, ranks)
    results = _launched(loss)[ranks]
    if isinstance(results, str):
        raise RuntimeError(results)
    found = results[name]
    exact = allowed.expected(case)
    worst = compared(case, found, exact, allowed.allowed(case, spread=Spread(shards, shards)), fields)
    yield _label(ranks, worst, found, exact, fields), worst


def _label(ranks: int, worst: Worst, got: Outcome, exact: Outcome, fields: tuple[str, ...]) -> str:
    """The number of ranks; where everything is off by one factor, that factor."""
    label = f"{ranks} ranks"
    if worst.ratio < 1:
        return label
    found, right = (
        np.concatenate([np.ravel(x) for _, x in parts(each, fields) if x is not None]) for each in (got, exact)
    )
    if found.shape != right.shape or not np.isfinite(found).all() or not right.any():
        return label
    factor = float(found @ right / (right @ right))
    # a factor explains nothing where a tenth of the difference remains
    remains, difference = (float(np.linalg.norm(found - x * right)) for x in (factor, 1.0))
    return f"{label}: {factor:.3g} times what it should be" if remains < 0.1 * difference else label


@lru_cache(maxsize=1)
def _launched(loss: Loss) -> Results:
    """The results of the cases on each number of ranks, or the error that a rank raised; the ranks are started once.

    Raises:
        SkipError: other processes cannot import the loss, or there is no fork.
    """
    if not hasattr(os, "fork"):
        raise SkipError("ranks are forked, which this system cannot")
    order = pickle.dumps((_portable(loss), loss.name, loss.claims))
    command = [sys.executable, "-c", _PROGRAM.format(path=sys.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    patience = _SECONDS * len(loss.claims.ranks) + _START
    try:
        ended = subprocess.run(command, input=order, capture_output=True, env=environment, timeout=patience)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(loss.claims.ranks, _LATE)
    if ended.returncode:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return dict.fromkeys(loss.claims.ranks, f"the process that starts the ranks ended: {last}")
    results: Results = pickle.loads(ended.stdout)
    return results


def _portable(loss: Loss) -> Any:
    """What another process makes the loss's target of: its name, or itself."""
    module = loss.name.partition(":")[0]
    try:
        if module != "__main__" and load(loss.name) is loss.target:
            return None
    except Exception:
        pass
    try:
        pickled = pickle.dumps(loss.target)
    except Exception as error:
        raise SkipError(f"other processes cannot import it: name it as module:attribute ({error})") from error
    if b"__main__" in pickled:
        raise SkipError("other processes cannot import it from __main__: put it into a module")
    return pickled


def main() -> None:
    """Start the ranks of each world in turn, as the standard input says, and write what they found to stdout."""
    given = pickle.loads(sys.stdin.buffer.read())
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # what the loss prints is nobody's answer
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # imported once, before the ranks are forked: it starts no thread
    importlib.import_module("torch.distributed")
    found: Results = {}
    for size in given[2].ranks:
        with tempfile.TemporaryDirectory() as folder:
            found[size] = _world(given, size, Path(folder))
    answer.write(pickle.dumps(found))
    answer.close()
    os._exit(0)


def _world(given: tuple[Any, ...], size: int, folder: Path) -> dict[str, Result] | str:
    """What a world of this size found, or the first error of one of its ranks."""
    multiprocessing: Any = importlib.import_module("torch.multiprocessing")
    context = multiprocessing.start_processes(_rank, (given, size, folder), size, join=False, start_method="fork")
    end = time.monotonic() + _SECONDS
    try:
        while not context.join(max(0.0, end - time.monotonic())):
            if time.monotonic() > end:
                return _LATE
    except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException):
        # a rank that is gone was so before those that waited for it raised; the others were then terminated
        codes = {rank: process.exitcode for rank, process in enumerate(context.processes)}
        for rank, code in codes.items():
            if code not in (0, None, -signal.SIGTERM) and not (folder / f"error{rank}").exists():
                return f"rank {rank} {ending(code)}"
        return min(folder.glob("error*"), key=lambda path: path.stat().st_mtime_ns).read_text()
    finally:
        for process in context.processes:
            process.kill()
            process.join()
    results: dict[str, Result] = pickle.loads((folder / "found").read_bytes())
    return results


def _rank(rank: int, given: tuple[Any, ...], size: int, folder: Path) -> None:
    import torch.distributed as dist

    pickled, name, claims = given
    found: dict[str, Result] = {}
    try:
        loss = Loss.of(name if pickled is None else pickle.loads(pickled), claims, name=name)
        where, patience = f"file://{folder}/group", timedelta(seconds=_SECONDS)
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=patience)
        call = loss.on_rank(rank, size)
        for case in SHARDS:
            try:
                parts_of_it = shared(case, loss.claims, size)
            except ValueError:
                continue
            found[case] = _under_ddp(loss.claims, call, *parts_of_it, rank)
        dist.barrier()
    except BaseException as error:
        (folder / f"error{rank}").write_text(f"rank {rank} raised {one_line(error)}")
        raise
    if rank == 0:
        (folder / "found").write_bytes(pickle.dumps(found))


def _under_ddp(claims: Claims, call: Any, case: LossCase, shards: tuple[int, ...], rank: int) -> Result:
    """The mean of the ranks' values, and the parameters' gradients after DDP's mean."""
    import torch
    import torch.distributed as dist

    start = sum(shards[:rank])
    own = slice(start, start + shards[rank])

    class Towers(torch.nn.Module):
        """Its parameters are the features of the joined batch."""

        def __init__(self) -> None:
            super().__init__()
            arguments, kind = case.arguments, getattr(torch, case.dtype)
            self.features = torch.nn.ParameterList(torch.tensor(x, dtype=kind) for x in arguments.features)
            numbers = [x for x in (arguments.scale, arguments.bias) if x is not None]
            wide = getattr(torch, state_dtype(case.dtype))
            self.numbers = torch.nn.ParameterList(
                torch.tensor(x, dtype=wide) for x in (numbers if claims.scale_gradient else [])
            )
            self.plain = [] if claims.scale_gradient else numbers
            self.labels = [] if arguments.labels is None else [torch.tensor(arguments.labels)[own]]

        def forward(self) -> Any:
            return call(*(x[own] for x in self.features), *self.labels, *self.numbers, *self.plain)

    towers = Towers()
    module = torch.nn.parallel.DistributedDataParallel(towers)
    value = module()
    value = next(iter(value.values())) if isinstance(value, dict) else value
    value.backward()
    mean = value.detach().clone().double()
    dist.all_reduce(mean)

    def take(x: Any) -> Any:
        return None if x is None else np.array(x.detach().double().numpy())

    rows, *columns = (take(x.grad if x.grad is None else x.grad.flatten(0, -2)) for x in towers.features)
    scale, bias = [*(take(x.grad) for x in towers.numbers), None, None][:2]
    return Result(take(mean / dist.get_world_size()), rows, tuple(columns), scale, bias)
