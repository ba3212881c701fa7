"""NVIDIA's compute-sanitizer over small verifications: what each tool found, in whose kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_run.profiler import BACKENDS, ENVIRONMENT, STEPS, kernel, own_kernels, run

Row = dict[str, Any]
TOOLS: dict[str, tuple[str, ...]] = {
    # host libraries ask the driver for entry points that it may lack: no error of anybody's
    "memcheck": ("--report-api-errors", "no"),
    "racecheck": (),
    "synccheck": (),
    "initcheck": (),
}
POISONED = "poisoned"
"""No tool of NVIDIA's: what ``benchmarks/poisoned.py`` finds, with all memory full of NaN before it is given out."""

# both paths, every kind of positives, several column blocks, the sigmoid loss, kept exponentials
CASES = ("ragged", "large-logits", "labels", "self-excluded", "blocks", "sigmoid-ids", "wide")
PATIENCE = 200.0
"""Seconds after which a tool is stopped."""

LIMIT = 1_000_000
"""Findings that a tool prints before it only counts them."""

_NO_FINDING = (
    "COMPUTE-SANITIZER|.*SUMMARY: |Target application|Warning: |\\d+ errors were skipped|Error: (?:process|No att)"
)
# of whatever runs under a tool, and which of them are good
_VERDICT = r"^(?:PASS|FAIL).*|^\d+ checks, \d+ failed|^\d+ steps ran|(?<=poisoned: )\w+, .*"
_PASSED = r"PASS|\d+ checks, 0 failed|[1-9]\d* steps ran|pass, [1-9]"
HERE = Path(__file__).resolve().parent
KERNELS, CONTROL = "tile kernels by themselves", "control"
WHOLE = "whole steps"
"""Of a batch that gives each block many tiles: what goes wrong after the last of them shows nowhere else."""


def commands(backend: str) -> dict[str, list[str]]:
    """What runs under each tool, as arguments of Python."""
    unpooled = ["-m", "gpu_run.profile_unpooled"]
    verify = ["contrastile", "verify", "--backend", BACKENDS[backend], "--device", "cuda", "--quiet", "--case", *CASES]
    found = {"verify": [*unpooled, *verify, "--property", "value", "gradients"]}
    if backend == "cupy":
        found[KERNELS] = [*unpooled, str(HERE.parent / "cupy_kernels.py"), "verify", "--small"]
    return found


def sanitize(backends: Iterable[str]) -> list[Row]:
    """One row for each backend, tool and program, all at once; and one of initcheck's control."""
    jobs = [(b, tool, what, c) for b in backends for what, c in commands(b).items() for tool in TOOLS]
    for backend in backends:
        poisoned = [str(HERE.parent / "poisoned.py"), "--backend", BACKENDS[backend], "--dtype", "bfloat16"]
        jobs.append((backend, POISONED, "verify", poisoned))
        jobs.append((backend, "memcheck", WHOLE, ["-m", "gpu_run.step", backend, *STEPS[backend]]))
    if "triton" in backends:
        jobs.append(("triton", "initcheck", CONTROL, ["-m", "gpu_run.profile_control"]))
    with ThreadPoolExecutor(max(1, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda job: _one(*job), jobs))


def _one(backend: str, tool: str, what: str, arguments: Sequence[str]) -> Row:
    command = ["compute-sanitizer", "--tool", tool, "--show-backtrace", "no", "--print-limit", str(LIMIT)]
    command = [] if tool == POISONED else [*command, *TOOLS[tool]]
    # a pool of memory would hide a step beyond one of its blocks
    alone = (
        {"OMP_NUM_THREADS": "1"}
        | ENVIRONMENT.get(backend, {})
        | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if command else {})
    )
    start = time.perf_counter()
    try:
        text = run([*command, sys.executable, *arguments], alone, PATIENCE).stdout
    except subprocess.TimeoutExpired as error:
        held = error.stdout or b""
        text = held.decode(errors="replace") if isinstance(held, bytes) else held
    taken = round(time.perf_counter() - start, 1)
    return {"backend": backend, "tool": tool, "what": what, "seconds": taken} | report(text)


def report(text: str) -> Row:
    """What a tool printed: findings by kernel, its own last word, and the verdict of what ran under it.

    A row is clean if the tool ended, what ran under it passed, and nothing is reported in a kernel of ours or outside
    of kernels. ``lost`` are findings that the tool counted without saying where: its buffer had overflowed.
    """
    own: Counter[str] = Counter()
    others: Counter[str] = Counter()
    elsewhere: Counter[str] = Counter()
    first: dict[str, list[str]] = {}
    for lines in findings(text):
        place = re.search(r"\b(?:at|in) (\S.*?)\+0x", "\n".join(lines))
        name = kernel(place[1]) if place else lines[0]
        (elsewhere if place is None else own if name in own_kernels() else others)[name] += 1
        first.setdefault(name, lines[:4])
    summary = re.findall(r"^=+ (.*SUMMARY: .*)$", text, re.MULTILINE)
    lost = re.findall(r"^=+ (?:ERROR SUMMARY: )?(\d+) errors were (?:not printed|skipped)", text, re.MULTILINE)
    for shown, *counted in re.findall(r"(\d+) hazards displayed \((\d+) errors, (\d+) warnings", text):
        lost.append(str(sum(map(int, counted)) - int(shown)))
    verdict = re.findall(_VERDICT, text, re.MULTILINE)
    passed = bool(verdict) and bool(re.match(_PASSED, verdict[-1]))
    if not summary and "poisoned: " in text:
        summary = ["-"]
    return {
        "clean": passed and bool(summary) and not (own or elsewhere),
        "own": dict(own),
        "others": dict(others),
        "elsewhere": dict(elsewhere),
        "lost": sum(map(int, lost)),
        "summary": summary[0] if summary else "did not end",
        "verify": verdict[-1] if verdict else "did not end",
        "first": first,
    }


def findings(text: str) -> list[list[str]]:
    """The lines of each finding, without the tool's margin."""
    found: list[list[str]] = []
    open_ = False
    for line in text.splitlines():
        said = re.match(r"=========(?: (.*))?$", line)
        content = (said[1] or "") if said else ""
        if not content.strip():
            open_ = False
        elif content.startswith(" "):
            if open_:
                found[-1].append(content.strip())
        elif not re.match(_NO_FINDING, content):
            found.append([content.strip()])
            open_ = True
    return found
