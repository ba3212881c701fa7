"""Everything that holds the GPU backends to the oracle, on a machine with a GPU: ``make verify-gpu``.

    python scripts/verify_gpu.py                              # all steps, within minutes
    python scripts/verify_gpu.py --steps verify sanitizers    # some of them
    python scripts/verify_gpu.py --steps drawn --examples 5000 --seed 7

``kernels``     CuPy's kernels are compiled once, before anything else runs, so that no two jobs compile the same one
``verify``      contrastile verify, triton and cupy, every dtype and precision
``mutants``     contrastile mutate, the defects of their kernels
``sanitizers``  compute-sanitizer: four tools over CuPy's kernels, memcheck over Triton's
``repeats``     the tests that ask for the same bits twenty times
``drawn``       problems that are drawn, as many for each backend, dtype and precision

Nothing is timed, so that the jobs share the cores. What is not done within the time limit has failed.
``make measure-gpu`` times the same commit. ``--out`` gets what each job printed, its records, and ``summary.json``. The
exit code is 0 only where every job passed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from contrastile.environment import measurement_environment  # noqa: E402
from contrastile.reporting import write_json  # noqa: E402

STEPS = ("kernels", "mutants", "sanitizers", "verify", "repeats", "drawn")
KINDS = (
    *(("triton", *kind) for kind in (("float32", "split"), ("float32", "tf32"), ("bfloat16", ""), ("float16", ""))),
    *(("cupy", *kind) for kind in (("float32", "ieee"), ("float32", "tf32"), ("bfloat16", ""), ("float16", ""))),
)
"""The backends with their dtypes, float32 with each of its precisions."""
SANITIZER = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck")
SMALL_CASES = ("ragged", "large-logits", "labels", "self-excluded", "blocks", "sigmoid-ids")
"""Both paths of a kernel, every kind of positives, several column blocks, the sigmoid loss."""
KEPT_MIB, KEPT_CASES = (1, 16), ("wide", "hot", "certain", "wordnet@14.3", "wordnet@100")
"""What may be kept between the passes: all of small problems, and of larger ones all or a part of the rows."""

PART = 2000
"""Drawn problems of one process: its start is a small part of its time."""

# a pool of memory would hide a step beyond one of its blocks: each array is an allocation of its own
UNPOOLED = "import sys, cupy, pytest; cupy.cuda.set_allocator(None); sys.exit(pytest.main(sys.argv[1:]))"
PYTEST = ("-p", "no:cacheprovider")
started: list[subprocess.Popen[bytes]] = []


class Job(NamedTuple):
    """A command of a step; facts: its seed, its problems."""

    step: str
    name: str
    command: Sequence[str]
    facts: dict[str, Any]


NO_FINDING = r"COMPUTE-SANITIZER|.*SUMMARY: |Target application|Warning: |\d+ errors were|Error: process"
OUTSIDE = "outside of kernels: "


def findings(text: str) -> Counter[str]:
    """What compute-sanitizer reported, by kernel."""
    found: Counter[str] = Counter()
    # a finding is a line at the margin and the indented lines below it
    for block in re.findall(r"^========= (?! )(.*\n(?:^=========  .*\n)*)", text + "\n", re.MULTILINE):
        if not re.match(NO_FINDING, block):
            place = re.search(r"\b(?:at|in) (\S.*?)(?:\(.*)?\+0x", block)
            found[place[1] if place else OUTSIDE + block.splitlines()[0]] += 1
    return found


def judged(job: Job, text: str) -> str:
    """Why a job that ended with 0 has failed by what it printed, or "".

    A sanitizer must end and find nothing. initcheck does not see what the copy engine (TMA) writes and cuBLAS reads: of
    this tool, findings in the kernels of others do not count. Tests that all were skipped have shown nothing, and a
    mutant whose backend is missing has not been caught.
    """
    if job.step == "kernels":
        return ""
    if job.step == "mutants":
        found = re.search(r"^not run: .*", text, re.MULTILINE)
        return found[0] if found else ""
    if job.step == "sanitizers":
        if "SUMMARY: " not in text:
            return "the sanitizer did not end"
        counted = [
            f"{number} x {name}"
            for name, number in sorted(findings(text).items())
            if not job.name.startswith("initcheck") or "contrastile" in name or name.startswith(OUTSIDE)
        ]
        if counted:
            return "; ".join(counted)
    return "" if re.search(r"^PASS|\b\d+ passed", text, re.MULTILINE) else "nothing ran"


def verify(backend: str, dtype: str, precision: str, *more: str) -> list[str]:
    command = [sys.executable, "-m", "contrastile", "verify", "--backend", backend, "--device", "cuda", "--quiet"]
    return [*command, "--dtype", dtype, *(["--precision", precision] if precision else []), *more]


def jobs(examples: int, seed: int, cores: int, out: Path) -> Iterator[Job]:
    """All jobs, in the order in which they begin: the longest first."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    command = [sys.executable, "scripts/cupy_resources.py", "--capability", "{}{}".format(*capability), "--keep"]
    yield Job("kernels", "cupy", [*command, "--jobs", str(cores)], {})
    command = [sys.executable, "-m", "contrastile", "mutate", "--device", "cuda", "--quiet", "--component"]
    command += ["triton", "cupy", "--jobs", str(max(1, cores // 2)), "--json", f"{out}/mutants.json"]
    yield Job("mutants", "all", command, {})
    small = ["--case", *SMALL_CASES, "--property", "value", "gradients"]
    # the same checks as tests of one process
    words = ["--pyargs", "contrastile.verify", "--backend", "cupy", "--device", "cuda", "--dtype", "bfloat16", *small]
    tests = {"cupy": words, "cupy-steps": ["tests/gpu/test_cupy_gpu.py", "-k", "give_the_same_bits"]}
    programs = {name: [sys.executable, "-c", UNPOOLED, *PYTEST, *which] for name, which in tests.items()}
    for tool in TOOLS:
        under = [SANITIZER, "--tool", tool, "--target-processes", "all", "--show-backtrace", "no"]
        under += ["--print-limit", "1000000"]
        # libraries ask the driver for entry points that it may lack
        under += ["--report-api-errors", "no"] if tool == "memcheck" else []
        of_triton = {"triton": verify("triton", "bfloat16", "", *small)} if tool == "memcheck" else {}
        for name, program in (programs | of_triton).items():
            yield Job("sanitizers", f"{tool}-{name}", [*under, *program], {})
    kinds = {"-".join(filter(None, kind)): kind for kind in KINDS}
    more = ["--jobs", "2", "--seed", str(seed)]
    every = {name: verify(*kind, *more) for name, kind in kinds.items()}
    for mib in KEPT_MIB:
        kept = verify("cupy", "bfloat16", "", *more, "--keep", str(mib), "--case", *KEPT_CASES)
        every[f"cupy-bfloat16-keep-{mib}"] = kept
    for name, command in every.items():
        yield Job("verify", name, [*command, "--json", f"{out}/verify-{name}.json"], {"seed": seed})
    tests_of_bits = ["tests/gpu/test_repeats.py", "-k", "repeats_have_the_same_bits"]
    yield Job("repeats", "all", [sys.executable, "-m", "pytest", *PYTEST, *tests_of_bits], {})
    # at least so many problems in all, in parts, each with a seed of its own
    each = -(-examples // len(kinds))
    for part, start in enumerate(range(0, each, PART)):
        facts = {"seed": seed + part, "problems": min(PART, each - start)}
        words = ["--case", "drawn", "--property", "drawn", "--examples", str(facts["problems"])]
        for kind_name, kind in kinds.items():
            name = f"{kind_name}-{part}"
            command = verify(*kind, *words, "--seed", str(facts["seed"]), "--json", f"{out}/drawn-{name}.json")
            yield Job("drawn", name, command, facts)


def run(job: Job, out: Path, end: float) -> dict[str, Any]:
    """Run a job, print what became of it, and return that; at ``end``, by the monotonic clock, it has failed."""
    start, log = time.monotonic(), out / f"{job.step}-{job.name}.log"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # what PyTorch keeps to itself hides a step beyond an array from a sanitizer, too
    more |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if job.step == "sanitizers" else {}
    # an interrupt ends what the job has started, and ten seconds later all that is left is killed
    limited = ["timeout", "--signal=INT", "--kill-after=10", str(max(0.01, end - start)), *job.command]
    how: dict[str, Any] = {"cwd": ROOT, "env": os.environ | more, "stdin": subprocess.DEVNULL}
    with log.open("wb") as file:
        started.append(process := subprocess.Popen(limited, stdout=file, stderr=subprocess.STDOUT, **how))
        code = process.wait()
    seconds, text = time.monotonic() - start, log.read_text(encoding="utf-8", errors="replace")
    why = "not done in time" if time.monotonic() > end else f"exit code {code}" if code else judged(job, text)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("=========")]
    row = {"step": job.step, "name": job.name, **job.facts, "status": "fail" if why else "pass", "why": why}
    row |= {"seconds": round(seconds, 1), "said": lines[-1] if lines else "", "found": findings(text)}
    seed = f" seed {row['seed']}" if "seed" in row else ""
    told = [f"{row['status']:4} {seconds:6.1f} s  {job.step} {job.name}{seed}: {why or row['said']}"]
    print(*told, *(f"    {line}" for line in lines[-15:] if why), sep="\n", flush=True)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Run the steps.

    Returns:
        0 where every job passed, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", nargs="+", choices=STEPS, default=STEPS, help="which (default: all)")
    add("--examples", type=int, default=100_000, help="problems to draw in all (%(default)s)")
    add("--seed", type=int, default=0, help="the first seed (%(default)s)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (%(default)s)")
    add("--limit", type=float, metavar="S", default=540.0, help="seconds within which all must end (%(default)s)")
    add("--out", type=Path, default=ROOT / "out" / "verify-gpu", metavar="DIR", help="records (%(default)s)")
    given = parser.parse_args(arguments)
    out, start = given.out.resolve(), time.monotonic()
    todo = [job for job in jobs(given.examples, given.seed, given.jobs, out) if job.step in given.steps]
    out.mkdir(parents=True, exist_ok=True)
    one = partial(run, out=out, end=start + given.limit)
    # the kernels before anything else; the mutants' own processes are half of all
    rows = [one(job) for job in todo if job.step == "kernels"]
    with ThreadPoolExecutor(max(1, given.jobs // (2 if "mutants" in given.steps else 1))) as pool:
        try:
            rows += pool.map(one, [job for job in todo if job.step != "kernels"])
        except KeyboardInterrupt:
            for process in started:
                process.terminate()
            raise
    record = {"environment": measurement_environment("cuda"), "seconds": round(time.monotonic() - start, 1)}
    write_json(out / "summary.json", record | {"jobs": rows})
    for step in dict.fromkeys(row["step"] for row in rows):
        here = [row for row in rows if row["step"] == step]
        passed = [row for row in here if row["status"] == "pass"]
        problems = sum(row.get("problems", 0) for row in passed)
        drawn = f", {problems:,} problems from seed {given.seed} on" if problems else ""
        verdict = "pass" if len(passed) == len(here) else "fail"
        print(f"{verdict} {step}: {len(passed)} of {len(here)} jobs, {sum(x['seconds'] for x in here):.0f} s{drawn}")
    print(f"{record['seconds']:.0f} s in all; {out}/summary.json")
    return int(any(row["status"] == "fail" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
