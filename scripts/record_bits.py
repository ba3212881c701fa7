"""Hashes losses and gradients of seeded problems, so that a change of the code can be shown to keep every bit.

    python scripts/record_bits.py before.json                       # on the version before
    python scripts/record_bits.py after.json --against before.json  # on the version after: exit code 1 if a bit differs

Five losses, with ids, positives and negatives, four dtypes, confident and random pairs, through autograd and through
``value_and_grad``, in one process and over three in-process ranks. Bits depend on the machine, the thread count and the
versions of the libraries: compare two records of one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import contrastile
from contrastile.comm.inprocess import InProcess, InProcessGroup

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
SIZES = ((5, 3), (33, 16), (96, 40), (64, 64))
SHARDS = ((7, 0, 26), (11, 11, 11))
Inputs = tuple[Callable[..., Any], list[torch.Tensor], dict[str, Any]]


def inputs(loss: str, m: int, d: int, dtype: torch.dtype, seed: int) -> Inputs:
    """The loss function, its differentiable arguments and the others."""
    random = torch.Generator().manual_seed(seed)

    def unit(n: int, like: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.randn(n, d, generator=random, dtype=torch.float64)
        x = x if like is None else like + x / 8
        return torch.nn.functional.normalize(x, dim=1)

    first = unit(m)
    second = unit(m, first if seed % 2 else None)
    scale = torch.tensor((10.0, 100.0)[seed % 2], dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    ids = torch.randint(0, max(2, m // 2), (m,), generator=random)
    if loss == "clip_loss":
        return contrastile.clip_loss, [first.to(dtype), second.to(dtype), scale], {"ids": ids} if seed % 3 == 0 else {}
    if loss == "info_nce":
        more = {"negatives": unit(m // 2).to(dtype)} if seed % 3 == 0 else {}
        return contrastile.info_nce, [first.to(dtype), second.to(dtype), scale], more
    if loss == "nt_xent":
        return contrastile.nt_xent, [first.to(dtype), second.to(dtype), scale], {}
    if loss == "sup_con":
        return contrastile.sup_con, [first.to(dtype), scale], {"labels": ids}
    bias = torch.tensor(-10.0, dtype=scale.dtype)
    return contrastile.sigmoid_loss, [first.to(dtype), second.to(dtype), scale, bias], {}


def called(function: Callable[..., Any], given: list[Any], more: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The loss: labels come second in ``sup_con``."""
    if "labels" in more:
        return function(given[0], more["labels"], *given[1:], **settings)
    return function(*given, **more, **settings)


def outcome(problem: Inputs, settings: dict[str, Any], *, autograd: bool) -> list[torch.Tensor]:
    """The value and every gradient."""
    function, given, more = problem
    if not autograd:
        value, gradients = called(contrastile.value_and_grad(function, **settings), given, more, {})
        return [value, *gradients]
    leaves = [x.clone().requires_grad_() for x in given]
    value = called(function, leaves, more, settings)
    value.backward()
    return [value.detach(), *(x.grad for x in leaves if x.grad is not None)]


def shard(problem: Inputs, rows: tuple[int, ...], rank: int) -> Inputs:
    """One rank's part of the problem."""
    function, given, more = problem
    total, start = sum(rows), sum(rows[:rank])
    cut = [x[start : start + rows[rank]] if x.ndim == 2 else x for x in given]
    own = {name: x[start : start + rows[rank]] if x.shape[0] == total else x for name, x in more.items()}
    return function, cut, own


def digest(found: list[torch.Tensor]) -> str:
    """A hash of bytes and dtypes."""
    sha = hashlib.sha256()
    for x in found:
        sha.update(str(x.dtype).encode())
        sha.update(x.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def moved(problem: Inputs, device: str) -> Inputs:
    """The problem on a device."""
    function, given, more = problem
    return function, [x.to(device) for x in given], {name: x.to(device) for name, x in more.items()}


def records(backends: list[str], device: str) -> Iterator[tuple[str, str]]:
    """Name and hash of every problem."""
    losses = ("clip_loss", "info_nce", "nt_xent", "sup_con", "sigmoid_loss")
    for backend in backends:
        interpreted = backend == "triton" and device == "cpu"
        for loss in losses:
            for dtype in DTYPES:
                if (backend in ("triton", "cupy") and dtype == "float64") or (interpreted and dtype == "bfloat16"):
                    continue
                for seed, (m, d) in enumerate(SIZES[:2] if interpreted else SIZES * 2):
                    for way in ("autograd", "value_and_grad"):
                        problem = moved(inputs(loss, m, d, DTYPES[dtype], seed), device)
                        found = outcome(problem, {"backend": backend}, autograd=way == "autograd")
                        yield f"{backend} {loss} {dtype} {m}x{d} seed {seed} {way}", digest(found)
            if interpreted:
                continue
            for dtype in ("bfloat16", "float32"):
                for exchange in ("ring", "gather"):
                    for rows in SHARDS:
                        problem = moved(inputs(loss, sum(rows), 16, DTYPES[dtype], 3), device)
                        yield f"{backend} {loss} {dtype} {exchange} {rows}", ranks(problem, rows, backend, exchange)


def ranks(problem: Inputs, rows: tuple[int, ...], backend: str, exchange: str) -> str:
    """The hash over all ranks."""

    def program(communicator: InProcess) -> list[torch.Tensor]:
        settings = {"backend": backend, "exchange": exchange, "group": communicator}
        # on a GPU all ranks of a process would share one thread of autograd, and wait for one another in it
        autograd = problem[1][0].device.type == "cpu"
        return outcome(shard(problem, rows, communicator.rank), settings, autograd=autograd)

    group: InProcessGroup[list[torch.Tensor]] = InProcessGroup(len(rows))
    return digest([x for found in group.run(program) for x in found])


def main() -> int:
    """Record, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("file", type=Path, help="where the record goes")
    parser.add_argument("--against", type=Path, help="an earlier record")
    parser.add_argument("--backend", nargs="+", default=["numpy", "torch"])
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = dict(records(asked.backend, asked.device))
    asked.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(found)} problems")
    if asked.against is None:
        return 0
    before = json.loads(asked.against.read_text(encoding="utf-8"))
    differing = [name for name in before.keys() | found.keys() if before.get(name) != found.get(name)]
    print(*sorted(differing), f"{len(differing)} of {len(before)} differ", sep="\n")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
