"""Every dtype and precision of a backend held to the oracle on a GPU, each in a process of its own, all at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WAYS = (("float16", "ieee"), ("bfloat16", "ieee"), ("float32", "ieee"), ("float32", "tf32"), ("float32", "split"))


def verify(backend: str = "triton", examples: int = 20) -> list[dict[str, Any]]:
    """Rows of ``contrastile verify``: property, case, dtype, ratio, status; without hypothesis nothing is drawn."""
    from contrastile.verify.properties import PROPERTIES

    try:
        import hypothesis  # noqa: F401
    except ImportError:
        chosen = ["--property", *(name for name in PROPERTIES if name != "drawn")]
    else:
        chosen = ["--examples", str(examples)]

    def one(way: tuple[str, str]) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.json"
            command = [sys.executable, "-m", "contrastile", "verify", "--backend", backend, "--device", "cuda"]
            command += ["--dtype", way[0], "--precision", way[1], "--json", str(path), "--quiet", *chosen]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
            if not path.exists():
                raise RuntimeError(f"verify {way} did not end: {(done.stderr or done.stdout)[-500:]}")
            rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
            return rows

    with ThreadPoolExecutor() as pool:
        found = [row for rows in pool.map(one, WAYS) for row in rows]
    kept = ("backend", "property", "case", "dtype", "ratio", "status", "reason")
    return [{name: row[name] for name in kept if row[name] != ""} for row in found]
