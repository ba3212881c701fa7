"""Profiles the fused backends' kernels on one GPU, runs the sanitizers over them, and verifies every dtype.

``python benchmarks/gpu_profile.py [--parts verify sanitizer compile times ncu] [--backends triton cupy ampere]
[--others] [--out DIR] [--commit HASH]`` writes ``profile_<device>.json`` and ``verify_<device>.json``, each part as it
ends; what another run of the same commit left there of other parts and backends stays. With --page it writes the
profiled part of docs/performance.md from the records, with --check it exits 1 if the page says otherwise. Needs ncu
and compute-sanitizer on the path.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_run import profile_tables  # noqa: E402
from gpu_run.profiler import BACKENDS, OTHERS  # noqa: E402
from pages import RESULTS, ROOT, differs, spliced  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- profiled: written by benchmarks/gpu_profile.py from docs/results -->"
END = "<!-- end of profiled -->"
PARTS = ("verify", "sanitizer", "compile", "times", "ncu")
SHOWN = 400
"""Characters of a row that are printed."""

Lists = dict[str, list[dict[str, Any]]]


def calls(part: str, backends: list[str], steps: Sequence[str] = ()) -> list[Callable[[], Lists]]:
    """What a part runs, one after another; each gives rows by the name under which the record keeps them."""
    from gpu_run import profile_sanitizers, profile_times, profiler, verdicts

    def times(backend: str) -> Lists:
        return dict(zip(("times", "ceilings"), profile_times.kernel_times(backend, steps), strict=True))

    whole: dict[str, Callable[[], Lists]] = {
        "verify": lambda: {"verify": verdicts.verify(backends)},
        "sanitizer": lambda: {"sanitizer": profile_sanitizers.sanitize(backends)},
        "compile": lambda: {"compile": profiler.compile_times()},
    }
    if part in whole:
        return [whole[part]]
    one: Callable[[str], Lists] = times if part == "times" else lambda x: {"ncu": profiler.profile(x, steps)}
    return [partial(one, backend) for backend in backends]


def measure(parts: list[str], backends: list[str], out: Path, commit: str | None, steps: Sequence[str] = ()) -> int:
    """Run the parts and write their records; 1 if a verdict is not clean."""
    from gpu_run.machine import facts
    from gpu_run.record import compact, file_name

    environment = facts("cuda", commit)
    name = file_name(environment["device"]).removeprefix("gpu_")
    path = out / f"profile_{name}"
    data = kept(path, environment)
    clean = True
    out.mkdir(parents=True, exist_ok=True)
    for part in parts:
        for call in calls(part, backends, steps):
            start = time.perf_counter()
            try:
                found = call()
            except Exception as error:  # one part that breaks off loses no other
                print(f"{part}: {type(error).__name__}: {error}", flush=True)
                clean = False
                continue
            if part == "verify":
                rows = found[part]
                clean &= all(row["status"] != "fail" for row in rows)
                both = kept(out / f"verify_{name}", environment)
                both["rows"] = merged(both.get("rows", []), profile_tables.beside(rows))
                (out / f"verify_{name}").write_text(compact(both), encoding="utf-8")
                found = {part: profile_tables.counted(rows)}
            clean &= part != "sanitizer" or all(row["clean"] for row in found[part])
            for key, rows in found.items():
                data[key] = merged(data.get(key, []), rows)
                told = [f"{len(rows)} rows"] if key in ("times", "ncu") else rows
                print(*(f"{key}: {str(row)[:SHOWN]}" for row in told), sep="\n", flush=True)
            path.write_text(compact(data), encoding="utf-8")
            print(f"{part}: {time.perf_counter() - start:.0f} s", flush=True)
    return 0 if clean else 1


def kept(path: Path, environment: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run of the same commit with the same libraries left, under the environment of this one."""
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"environment": {}}
    same = all(old["environment"].get(x) == environment.get(x) for x in ("commit", "torch", "triton", "cupy-cuda13x"))
    return (old if same else {}) | {"environment": environment}


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new rows behind the old ones of other backends."""
    renewed = {row.get("backend") for row in new}
    return [*(row for row in old if row.get("backend") not in renewed), *new]


def page(folder: Path) -> str:
    """The profiled part of the page."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("profile_*.json"))]
    return "\n\n".join(map(profile_tables.section, found)) or "Nothing has been profiled yet."


def main(arguments: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        0; 1 when something is not clean, or with --check when the page is not what the records say.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="whose kernels (all)")
    add("--others", action="store_true", help="time and count steps of other losses, in place of the symmetric one's")
    add("--out", type=Path, default=RESULTS, metavar="DIR", help="where the records are")
    add("--commit", help="what the record says was measured, where there is no checkout")
    add("--page", action="store_true", help="write the page and measure nothing")
    add("--check", action="store_true", help="say whether the page is what the records say")
    given = parser.parse_args(arguments)
    if not (given.page or given.check):
        return measure(given.parts, given.backends, given.out, given.commit, OTHERS if given.others else ())
    old = PAGE.read_text(encoding="utf-8")
    new = spliced(old, BEGIN, END, page(given.out))
    if given.check:
        return differs(PAGE, old, new, "benchmarks/gpu_profile.py --page")
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
