"""Profiles the fused backend's kernels on one GPU, runs the sanitizers over them, and verifies every dtype.

``python benchmarks/gpu_profile.py [--parts verify sanitizer compile times ncu] [--out DIR] [--commit HASH]`` writes
``profile_<device>.json`` and ``verify_<device>.json``; with --page it writes the profiled part of docs/performance.md
from them, with --check it exits 1 if the page says otherwise. Needs ncu and compute-sanitizer on the path.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from gpu_run import profile_tables  # noqa: E402

ROOT = HERE.parent
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "performance.md"
BEGIN = "<!-- profiled: written by benchmarks/gpu_profile.py from docs/results -->"
END = "<!-- end of profiled -->"
PARTS = ("verify", "sanitizer", "compile", "times", "ncu")


def measure(parts: list[str], out: Path, commit: str | None) -> int:
    """Run the parts and write their records; 1 if a verdict is not clean."""
    from gpu_run import profiler, verdicts
    from gpu_run.machine import facts
    from gpu_run.record import compact, file_name

    environment = facts("cuda", commit)
    name = file_name(environment["device"]).removeprefix("gpu_")
    calls: dict[str, Any] = {
        "verify": verdicts.verify,
        "sanitizer": profiler.sanitize,
        "compile": profiler.compile_times,
        "times": profiler.kernel_times,
        "ncu": profiler.profile,
    }
    clean = True
    path = out / f"profile_{name}"
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    data["environment"] = environment
    for part in parts:
        try:
            rows = calls[part]()
        except Exception as error:  # one part that breaks off loses no other
            print(f"{part}: {type(error).__name__}: {error}", flush=True)
            clean = False
            continue
        if part == "verify":
            clean &= all(row["status"] != "fail" for row in rows)
            out.mkdir(parents=True, exist_ok=True)
            record = {"environment": environment, "rows": profile_tables.beside(rows)}
            (out / f"verify_{name}").write_text(compact(record), encoding="utf-8")
            rows = profile_tables.counted(rows)
        clean &= part != "sanitizer" or all(row["clean"] for row in rows)
        data[part] = rows
        path.write_text(compact(data), encoding="utf-8")
        print(*(f"{part}: {row}" for row in rows), sep="\n", flush=True)
    return 0 if clean else 1


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
    add("--out", type=Path, default=RESULTS, metavar="DIR", help="where the records are")
    add("--commit", help="what the record says was measured, where there is no checkout")
    add("--page", action="store_true", help="write the page and measure nothing")
    add("--check", action="store_true", help="say whether the page is what the records say")
    given = parser.parse_args(arguments)
    if not (given.page or given.check):
        return measure(given.parts, given.out, given.commit)
    old = PAGE.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        raise ValueError(f"the page must hold {BEGIN!r} and {END!r}")
    new = f"{old.partition(BEGIN)[0]}{BEGIN}\n\n{page(given.out)}\n\n{END}{old.partition(END)[2]}"
    if given.check:
        if new != old:
            print(f"{PAGE} is not what the records say; run: python benchmarks/gpu_profile.py --page", file=sys.stderr)
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
