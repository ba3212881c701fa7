"""A loss on several ranks of torch.distributed: the parameters' gradients after DDP's mean, and the value.

Every rank is a process with gloo. The features of the joined batch are parameters of a module under DDP, and each rank
calls the loss with its own rows. The parameters of any tower have the right gradients after DDP's mean exactly where
the features have the gradients of the joined batch's loss. The value is the mean of the ranks' values.
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
from contrastile.verify.process import exact_products
from contrastile.verify.rounding import UNIT
from contrastile.verify.trial import SkipError
from contrastile.verify.truth import Outcome

SHARDS = {"shards": "every rank has as many rows", "shards@uneven": "the ranks have different numbers of rows"}
"""The cases of several ranks, each with its description."""

DISTRIBUTED = {
    "ddp-value": (("loss",), "The mean of the ranks' values is the loss of the joined batch."),
    "ddp-gradients": (("rows", "columns"), "The parameters' gradients after DDP's mean are those of the joined batch."),
    "ddp-scale-gradient": (("scale", "bias"), "So are the gradients of the scale and of the bias."),
}
"""The properties of several ranks: the fields that each compares, and its description."""

Results = dict[int, "dict[str, Result] | str"]
"""For each number of ranks: the result of each case, or the error message of a rank."""

# A busy machine may need this long for a second of work. Two worlds stay within the time limit of a check.
_SECONDS = 120.0
_START = 30.0
_LATE = f"the ranks took longer than {_SECONDS:g} s"
# The child process imports from the parent's path, whatever its current folder is.
_PROGRAM = "import sys; sys.path[:] = {path!r}; from contrastile.verify.losses.ranks import main; main()"


def shared(name: str, claims: Claims, ranks: int) -> tuple[LossCase, tuple[int, ...]]:
    """The case of this name for a number of ranks: the joined batch, and the number of rows of each rank.

    Raises:
        ValueError: the loss does not claim this case; the message says which claim is missing.
    """
    requested = [13] * ranks if name == "shards" else [5 + 8 * rank for rank in range(ranks)]
    if name != "shards" and claims.equal_shards:
        raise ValueError("different numbers of rows on the ranks")
    shards = [claims.batch(rows) for rows in requested]
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
    """Why a loss with these claims is not tested on ranks; "" if it is."""
    if not claims.ranks:
        return "several ranks"
    has_gradients = claims.by_autograd and claims.feature_gradients
    return "" if has_gradients else "several ranks, whose gradients DDP takes from autograd"


def check(loss: Loss, name: str, ranks: int, fields: tuple[str, ...]) -> Comparisons:
    case, shards = shared(name, loss.claims, ranks)
    results = _launch(loss)[ranks]
    if isinstance(results, str):
        raise RuntimeError(results)
    result = results[name]
    expected = allowed.expected(case)
    with exact_products():
        bound = allowed.allowed(case, spread=Spread(shards, shards))
    worst = compared(case, result, expected, bound, fields)
    yield _factor_label(ranks, worst, result, expected, fields), worst


def _factor_label(ranks: int, worst: Worst, result: Outcome, expected: Outcome, fields: tuple[str, ...]) -> str:
    """The number of ranks, and the factor by which all values are wrong, if there is one."""
    label = f"{ranks} ranks"
    if worst.ratio < 1:
        return label
    values, exact = (
        np.concatenate([np.ravel(x) for _, x in parts(outcome, fields) if x is not None])
        for outcome in (result, expected)
    )
    if values.shape != exact.shape or not np.isfinite(values).all() or not exact.any():
        return label
    factor = float(values @ exact / (exact @ exact))
    # The factor explains an error only if less than a tenth of the difference remains.
    remainder, difference = (float(np.linalg.norm(values - x * exact)) for x in (factor, 1.0))
    return f"{label}: {factor:.3g} times what it should be" if remainder < 0.1 * difference else label


@lru_cache(maxsize=1)
def _launch(loss: Loss) -> Results:
    """Start the ranks once, and return the results of the cases on each number of ranks, or the error of a rank.

    Raises:
        SkipError: other processes cannot import the loss, or there is no fork.
    """
    if not hasattr(os, "fork"):
        raise SkipError("ranks are forked, which this system cannot")
    request = pickle.dumps((_pickled_target(loss), loss.name, loss.claims))
    command = [sys.executable, "-c", _PROGRAM.format(path=sys.path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    timeout = _SECONDS * len(loss.claims.ranks) + _START
    try:
        process = subprocess.run(command, input=request, capture_output=True, env=environment, timeout=timeout)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(loss.claims.ranks, _LATE)
    if process.returncode:
        last_line = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return dict.fromkeys(loss.claims.ranks, f"the process that starts the ranks ended: {last_line}")
    results: Results = pickle.loads(process.stdout)
    return results


def _pickled_target(loss: Loss) -> Any:
    """The pickled target of the loss; None if another process imports the target by its name."""
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
    """Read a request from stdin, start the ranks of each world in turn, and write their results to stdout."""
    request = pickle.loads(sys.stdin.buffer.read())
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Send the loss's own output to stderr, because stdout carries the results.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Import torch once, before the ranks are forked. The import starts no thread.
    importlib.import_module("torch.distributed")
    results: Results = {}
    for size in request[2].ranks:
        with tempfile.TemporaryDirectory() as folder:
            results[size] = _run_world(request, size, Path(folder))
    output.write(pickle.dumps(results))
    output.close()
    os._exit(0)


def _run_world(request: tuple[Any, ...], size: int, folder: Path) -> dict[str, Result] | str:
    """The results of a world of this size, or the first error of one of its ranks."""
    multiprocessing: Any = importlib.import_module("torch.multiprocessing")
    context = multiprocessing.start_processes(_run_rank, (request, size, folder), size, join=False, start_method="fork")
    deadline = time.monotonic() + _SECONDS
    try:
        while not context.join(max(0.0, deadline - time.monotonic())):
            if time.monotonic() > deadline:
                return _LATE
    except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException):
        # A rank that died did so before the ranks that waited for it raised. The others were then terminated.
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


def _run_rank(rank: int, request: tuple[Any, ...], size: int, folder: Path) -> None:
    import torch.distributed as dist

    pickled, name, claims = request
    results: dict[str, Result] = {}
    try:
        loss = Loss.of(name if pickled is None else pickle.loads(pickled), claims, name=name)
        address, timeout = f"file://{folder}/group", timedelta(seconds=_SECONDS)
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timeout)
        call = loss.on_rank(rank, size)
        for case in SHARDS:
            try:
                case_and_shards = shared(case, loss.claims, size)
            except ValueError:
                continue
            with exact_products():
                results[case] = _under_ddp(loss.claims, call, *case_and_shards, rank)
        dist.barrier()
    except BaseException as error:
        (folder / f"error{rank}").write_text(f"rank {rank} raised {one_line(error)}")
        raise
    if rank == 0:
        (folder / "found").write_bytes(pickle.dumps(results))


def _under_ddp(claims: Claims, call: Any, case: LossCase, shards: tuple[int, ...], rank: int) -> Result:
    """The mean of the ranks' values, and the parameters' gradients after DDP's mean."""
    import torch
    import torch.distributed as dist

    start = sum(shards[:rank])
    local_rows = slice(start, start + shards[rank])

    class Towers(torch.nn.Module):
        """A module whose parameters are the features of the joined batch, and its numbers if they are claimed."""

        def __init__(self) -> None:
            super().__init__()
            arguments, dtype = case.arguments, getattr(torch, case.dtype)
            self.features = torch.nn.ParameterList(torch.tensor(x, dtype=dtype) for x in arguments.features)
            numbers = [x for x in (arguments.scale, arguments.bias) if x is not None]
            number_dtype = getattr(torch, state_dtype(case.dtype))
            self.numbers = torch.nn.ParameterList(
                torch.tensor(x, dtype=number_dtype) for x in (numbers if claims.scale_gradient else [])
            )
            self.plain = [] if claims.scale_gradient else numbers
            self.labels = [] if arguments.labels is None else [torch.tensor(arguments.labels)[local_rows]]

        def forward(self) -> Any:
            return call(*(x[local_rows] for x in self.features), *self.labels, *self.numbers, *self.plain)

    towers = Towers()
    module = torch.nn.parallel.DistributedDataParallel(towers)
    value = module()
    value = next(iter(value.values())) if isinstance(value, dict) else value
    value.backward()
    mean = value.detach().clone().double()
    dist.all_reduce(mean)

    def to_float64(x: Any) -> Any:
        return None if x is None else np.array(x.detach().double().numpy())

    rows, *columns = (to_float64(x.grad if x.grad is None else x.grad.flatten(0, -2)) for x in towers.features)
    scale, bias = [*(to_float64(x.grad) for x in towers.numbers), None, None][:2]
    unit = UNIT[str(value.dtype).removeprefix("torch.")]
    return Result(to_float64(mean / dist.get_world_size()), rows, tuple(columns), scale, bias, unit=unit)
