"""Every dtype and precision of backends held to the oracle on a GPU, each in a process of its own, all at once."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_run.profiler import BACKENDS, ENVIRONMENT, run

Row = dict[str, Any]
WAYS = (("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "tf32"), ("float32", "split"))


def verify(backends: Iterable[str] = ("triton",), examples: int = 20) -> list[Row]:
    """Rows of ``contrastile verify``: property, case, dtype, ratio, status; without hypothesis nothing is drawn."""
    from contrastile.verify.properties import PROPERTIES

    try:
        import hypothesis  # noqa: F401
    except ImportError:
        chosen = ["--property", *(name for name in PROPERTIES if name != "drawn")]
    else:
        chosen = ["--examples", str(examples)]
    jobs = [(backend, way) for backend in backends for way in WAYS]
    threads = max(1, (os.cpu_count() or 1) // len(jobs))

    def one(job: tuple[str, tuple[str, str]]) -> list[Row]:
        backend, (dtype, precision) = job
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "contrastile", "verify", "--backend", BACKENDS[backend]]
            command += ["--device", "cuda", "--dtype", dtype, "--precision", precision]
            done = run(
                [*command, "--json", str(path), "--quiet", *chosen],
                {"OMP_NUM_THREADS": str(threads), **ENVIRONMENT.get(backend, {})},
            )
            if not path.exists():
                raise RuntimeError(f"verify {job} did not end: {(done.stderr or done.stdout)[-500:]}")
            rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
            return [row | {"backend": backend} for row in rows]

    with ThreadPoolExecutor(len(jobs)) as pool:
        found = [row for rows in pool.map(one, jobs) for row in rows]
    kept = ("backend", "property", "case", "dtype", "ratio", "status", "reason")
    return [{name: row[name] for name in kept if row[name] != ""} for row in found]
