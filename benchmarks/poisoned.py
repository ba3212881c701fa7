# pyright: reportAttributeAccessIssue=false
"""Whether anything that nobody wrote reaches a result: ``verify`` with all memory full of NaN before it is given out.

``python benchmarks/poisoned.py --backend cupy triton --dtype bfloat16 float16``. A sanitizer reports every read of
memory that nobody wrote, also where a kernel loads sixteen bytes of which it uses ten. Here the bytes are NaN (and -1
as integers): what is used shows in a result, and a pass says that nothing is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from contrastile.backends.registry import load
from contrastile.verify.report import verdict
from contrastile.verify.runner import DTYPES, Run, Selection

BYTE = 0xFF
"""Bytes of it make a NaN of any float and -1 of any integer."""


@contextmanager
def cupy_poisoned() -> Iterator[None]:
    """CuPy's memory, whole blocks of it: what a kernel reads past the end of an array is poisoned too."""
    import cupy

    pool = cupy.cuda.MemoryPool()

    def allocate(size: int) -> Any:
        found = pool.malloc(size)
        if size:
            stream = cupy.cuda.get_current_stream().ptr
            cupy.cuda.runtime.memsetAsync(found.ptr, BYTE, found.mem.size, stream)
        return found

    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(allocate)
    try:
        yield
    finally:
        cupy.cuda.set_allocator(before)


@contextmanager
def torch_poisoned() -> Iterator[None]:
    """What ``torch.empty`` and its kin give, on any device, by torch's own switch."""
    import torch

    # cuBLAS is asked for this wherever algorithms must be deterministic
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


POISONED: dict[str, Callable[[], Any]] = {"cupy": cupy_poisoned, "torch": torch_poisoned}
"""By the array library of the backend."""


def verify(name: str, device: str, **selection: Any) -> tuple[str, int, list[str]]:
    """Hold a backend to the oracle, its memory poisoned: the verdict, how much was checked, and what failed.

    Args:
        name: of the backend.
        device: "cuda" or "cpu".
        **selection: of ``verify``: dtypes, cases, properties.
    """
    backend = load(name)
    dtypes = [x for x in selection.pop("dtypes", DTYPES) if x in backend.dtypes]
    with POISONED[backend.arrays.name]():
        run = Run(Selection({name: backend}, dtypes=dtypes, device=device, **selection))
        rows = list(run.rows())
    failed = [f"{x.row['property']} {x.row['case']} {x.row['dtype']}: {x.worst}" for x in run.failures]
    return verdict(rows), sum(row["status"] == "pass" for row in rows), failed


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if everything passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="+", default=["cupy", "triton"], help="which (%(default)s)")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES, help="of the features (all)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="where (%(default)s)")
    parser.add_argument("--case", nargs="+", help="of ``verify`` (all)")
    parser.add_argument("--property", nargs="+", help="of ``verify`` (all)")
    given = parser.parse_args(arguments)
    wrong = 0
    for name in given.backend:
        chosen = {"dtypes": given.dtype, "cases": given.case, "properties": given.property}
        said, passed, failed = verify(name, given.device, **chosen)
        print(f"{name}, all memory poisoned: {said}, {passed} checks passed, {len(failed)} failed", flush=True)
        for line in failed[:10]:
            print(f"  FAILED {line}", flush=True)
        wrong += said != "pass" or not passed
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
