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

Nothing is timed, so that the jobs share the cores. Each step has a time limit; what it has not done by then has failed.
``make measure-gpu`` times the same commit. ``--out`` gets what each job printed, its records, and ``summary.json``. The
exit code is 0 only where every job passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from contrastile.environment import measurement_environment  # noqa: E402
from contrastile.reporting import write_json  # noqa: E402

LIMITS = {"kernels": 150.0, "mutants": 500.0, "sanitizers": 480.0, "verify": 480.0, "repeats": 480.0, "drawn": 520.0}
"""Seconds from the start of the run within which a step must end; jobs begin in this order, the longest first."""

KINDS = {
    "triton": (("float32", "split"), ("float32", "tf32"), ("bfloat16", ""), ("float16", "")),
    "cupy": (("float32", "ieee"), ("float32", "tf32"), ("bfloat16", ""), ("float16", "")),
}
"""The dtypes of each backend, float32 with each of its precisions."""
TOOLS = ("racecheck", "memcheck", "initcheck", "synccheck")
SMALL_CASES = ("ragged", "large-logits", "labels", "self-excluded", "blocks", "sigmoid-ids")
"""Both paths of a kernel, every kind of positives, several column blocks, the sigmoid loss."""
KEPT_MIB, KEPT_CASES = (1, 16), ("wide", "hot", "certain", "wordnet@14.3", "wordnet@100")
"""What may be kept between the passes: all of small problems, and of larger ones all or a part of the rows."""

PART = 2000
"""Drawn problems of one process: its start is a small part of its time."""

GRACE = 10.0
"""Seconds between the interrupt of a job that is out of time and its end."""

# a pool of memory would hide a step beyond one of its blocks: each array is an allocation of its own
UNPOOLED = "import sys, cupy, pytest; cupy.cuda.set_allocator(None); sys.exit(pytest.main(sys.argv[1:]))"
PYTEST = ("-p", "no:cacheprovider")


@dataclass
class Job:
    """A command of a step, and what became of it.

    Attributes:
        step: whose job it is.
        name: of the job, and of its log.
        command: what runs.
        slots: processes that it keeps busy.
        judge: says of what it printed why it has failed, or nothing.
        facts: of the record: its seed, its problems; later its status, seconds and last line.
    """

    step: str
    name: str
    command: Sequence[str]
    slots: int = 1
    judge: Callable[[str], str] = lambda text: ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> str:
        """Its log, a file of ``--out``."""
        return f"{self.step}-{self.name}.log"


def sanitizer() -> str:
    """The program; where there is none, a name that a shell would look for."""
    return shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"


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


def judged(tool: str) -> Callable[[str], str]:
    """What a sanitizer's output must be: ended, its program passed, and nothing found.

    initcheck does not see what the copy engine (TMA) writes and cuBLAS reads: of this tool, findings in the kernels of
    others do not count.
    """

    def judge(text: str) -> str:
        if "SUMMARY: " not in text:
            return "the sanitizer did not end"
        counted = [
            f"{number} x {name}"
            for name, number in sorted(findings(text).items())
            if tool != "initcheck" or "contrastile" in name or name.startswith(OUTSIDE)
        ]
        return "; ".join(counted) or ran(text)

    return judge


def ran(text: str) -> str:
    """Tests that all were skipped have shown nothing."""
    return "" if re.search(r"^PASS|\b\d+ passed", text, re.MULTILINE) else "nothing ran"


def all_ran(text: str) -> str:
    """A mutant whose backend is missing has not been caught."""
    found = re.search(r"^not run: .*", text, re.MULTILINE)
    return found[0] if found else ""


def verify(backend: str, dtype: str, precision: str, *more: str) -> list[str]:
    command = [sys.executable, "-m", "contrastile", "verify", "--backend", backend, "--device", "cuda", "--quiet"]
    return [*command, "--dtype", dtype, *(["--precision", precision] if precision else []), *more]


def jobs(steps: Sequence[str], examples: int, seed: int, cores: int, out: Path) -> list[Job]:
    """All jobs of the steps, in the order in which they begin."""
    each = [kernels(cores), mutants(max(1, cores // 2), out), *sanitized(), *verified(seed, out), *repeats()]
    return [job for job in (*each, *drawn(examples, seed, out)) if job.step in steps]


def kernels(cores: int) -> Job:
    command = [sys.executable, str(ROOT / "scripts" / "cupy_resources.py"), "--capability", capability()]
    return Job("kernels", "cupy", [*command, "--jobs", str(cores), "--keep"], slots=cores)


def capability() -> str:
    """The GPU's compute capability, times 10; Hopper's where there is none to ask."""
    ask = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False).stdout.split()
    except OSError:
        said = []
    return said[0].replace(".", "") if said else "90"


def sanitized() -> list[Job]:
    found = []
    for tool in TOOLS:
        under = [sanitizer(), "--tool", tool, "--target-processes", "all", "--show-backtrace", "no"]
        under += ["--print-limit", "1000000"]
        # libraries ask the driver for entry points that it may lack
        under += ["--report-api-errors", "no"] if tool == "memcheck" else []
        small = ["--case", *SMALL_CASES, "--property", "value", "gradients"]
        # the same checks as tests of one process
        words = ["--backend", "cupy", "--device", "cuda", "--dtype", "bfloat16", *small]
        tests = {"cupy": ["--pyargs", "contrastile.verify", *words]}
        tests["cupy-steps"] = ["tests/gpu/test_cupy_gpu.py", "-k", "give_the_same_bits"]
        programs = {name: ["-c", UNPOOLED, *PYTEST, *which] for name, which in tests.items()}
        if tool == "memcheck":
            programs["triton"] = verify("triton", "bfloat16", "", *small)[1:]
        found += [
            Job("sanitizers", f"{tool}-{name}", [*under, sys.executable, *words], judge=judged(tool))
            for name, words in programs.items()
        ]
    return found


def kinds() -> Iterator[tuple[str, str, str, str]]:
    """Name, backend, dtype and precision of everything that is verified."""
    for backend, of_it in KINDS.items():
        for dtype, precision in of_it:
            yield "-".join(filter(None, (backend, dtype, precision))), backend, dtype, precision


def verified(seed: int, out: Path) -> list[Job]:
    more = ("--jobs", "2", "--seed", str(seed))
    every = [(name, verify(*kind, *more)) for name, *kind in kinds()]
    for mib in KEPT_MIB:
        of_kept = verify("cupy", "bfloat16", "", *more, "--keep", str(mib), "--case", *KEPT_CASES)
        every.append((f"cupy-bfloat16-keep-{mib}", of_kept))
    return [
        Job("verify", name, [*command, "--json", f"{out}/verify-{name}.json"], slots=2, facts={"seed": seed})
        for name, command in every
    ]


def mutants(workers: int, out: Path) -> Job:
    command = [sys.executable, "-m", "contrastile", "mutate", "--device", "cuda", "--component", *KINDS]
    command += ["--jobs", str(workers), "--json", f"{out}/mutants.json", "--quiet"]
    return Job("mutants", "all", command, slots=workers, judge=all_ran)


def repeats() -> list[Job]:
    tests = ["tests/gpu/test_repeats.py", "-k", "repeats_have_the_same_bits"]
    return [Job("repeats", "all", [sys.executable, "-m", "pytest", *PYTEST, *tests], judge=ran)]


def drawn(examples: int, seed: int, out: Path) -> list[Job]:
    """At least so many problems in all, in parts, each with a seed of its own."""
    each = -(-examples // sum(map(len, KINDS.values())))
    found = []
    for part, start in enumerate(range(0, each, PART)):
        size = min(PART, each - start)
        for kind_name, *kind in kinds():
            name = f"{kind_name}-{part}"
            words = ["--case", "drawn", "--property", "drawn", "--examples", str(size), "--seed", str(seed + part)]
            command = verify(*kind, *words, "--json", f"{out}/drawn-{name}.json")
            found.append(Job("drawn", name, command, facts={"seed": seed + part, "problems": size}))
    return found


def run(queue: Sequence[Job], cores: int, out: Path, limits: dict[str, float]) -> None:
    """Run all jobs, as many at a time as there are cores for; their facts say what became of them."""
    waiting, running = list(queue), list[tuple[Job, subprocess.Popen[bytes], float]]()
    start = time.monotonic()
    try:
        while waiting or running:
            now, free = time.monotonic(), cores - sum(job.slots for job, *_ in running)
            for job in [job for job in waiting if now - start > limits[job.step]]:
                waiting.remove(job)
                ended(job, "", 0.0, f"not begun within {limits[job.step]:g} s")
            while waiting and (waiting[0].slots <= free or not running):
                job = waiting.pop(0)
                free -= job.slots
                try:
                    running.append((job, begin(job, out), now))
                except OSError as error:
                    ended(job, "", 0.0, f"{job.command[0]}: {error.strerror}")
            for each in list(running):
                job, process, since = each
                late = now - start > limits[job.step]
                if late:
                    stop(process)
                if process.poll() is not None:
                    running.remove(each)
                    text = (out / job.log).read_text(encoding="utf-8", errors="replace")
                    why = f"not done within {limits[job.step]:g} s" if late else ""
                    why = why or (f"exit code {process.returncode}" if process.returncode else job.judge(text))
                    ended(job, text, time.monotonic() - since, why)
            time.sleep(0.05)
    finally:
        for _, process, _ in running:
            stop(process)


def begin(job: Job, out: Path) -> subprocess.Popen[bytes]:
    """A job's process, which prints to its log."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": path, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    # what PyTorch keeps to itself hides a step beyond an array from a sanitizer, too
    more |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if job.step == "sanitizers" else {}
    how: dict[str, Any] = {"cwd": ROOT, "env": os.environ | more, "stdin": subprocess.DEVNULL}
    with (out / job.log).open("wb") as file:
        return subprocess.Popen(job.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, **how)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a job, so that it ends what it has started; then kill what is left."""
    for how in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)


def ended(job: Job, text: str, seconds: float, why: str) -> None:
    """Enter what became of a job, and print it."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("=========")]
    job.facts |= {"status": "fail" if why else "pass", "seconds": round(seconds, 1), "why": why}
    job.facts |= {"said": lines[-1] if lines else "", "found": findings(text)}
    seed = f" seed {job.facts['seed']}" if "seed" in job.facts else ""
    said = why or job.facts["said"]
    print(f"{'FAIL' if why else 'pass'} {seconds:6.1f} s  {job.step} {job.name}{seed}: {said}", flush=True)
    if why:
        print(*(f"    {line}" for line in lines[-15:]), sep="\n", flush=True)


def summary(done: Sequence[Job], seconds: float) -> dict[str, Any]:
    """Each step's verdict, its jobs, their time together, and the problems that were drawn."""
    steps = {}
    for step in dict.fromkeys(job.step for job in done):
        of_it = [job for job in done if job.step == step]
        passed = [job for job in of_it if job.facts.get("status") == "pass"]
        steps[step] = {
            "status": "pass" if len(passed) == len(of_it) else "fail",
            "passed": len(passed),
            "seconds of its jobs": round(sum(job.facts.get("seconds", 0.0) for job in of_it), 1),
            "problems": sum(job.facts.get("problems", 0) for job in passed),
            "jobs": {job.name: job.facts for job in of_it},
        }
    return {"seconds": round(seconds, 1), "steps": steps}


def main(arguments: list[str] | None = None) -> int:
    """Run the steps.

    Returns:
        0 where every job passed, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", nargs="+", choices=LIMITS, default=list(LIMITS), help="which (default: all)")
    add("--examples", type=int, default=100_000, help="problems to draw in all (%(default)s)")
    add("--seed", type=int, default=0, help="the first seed (%(default)s)")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (%(default)s)")
    add("--limit", type=float, metavar="S", help="seconds within which each step must end (default: its own)")
    add("--out", type=Path, default=ROOT / "out" / "verify-gpu", metavar="DIR", help="records (%(default)s)")
    add("--list", action="store_true", help="print the commands, and run nothing")
    given = parser.parse_args(arguments)
    out = given.out.resolve()
    todo = jobs(given.steps, given.examples, given.seed, given.jobs, out)
    if given.list:
        print(*(f"{job.step} {job.name}: {' '.join(job.command)}" for job in todo), sep="\n")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    try:
        run(todo, given.jobs, out, LIMITS if given.limit is None else dict.fromkeys(LIMITS, given.limit))
    finally:
        found = summary(todo, time.monotonic() - start)
        write_json(out / "summary.json", {"environment": measurement_environment("cuda"), **found})
    for step, of_it in found["steps"].items():
        problems = f", {of_it['problems']:,} problems from seed {given.seed} on" if of_it["problems"] else ""
        line = f"{of_it['status']} {step}: {of_it['passed']} of {len(of_it['jobs'])} jobs"
        print(f"{line}, {of_it['seconds of its jobs']:.0f} s{problems}")
    print(f"{found['seconds']:.0f} s in all; {out}/summary.json")
    return 0 if all(of_it["status"] == "pass" for of_it in found["steps"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
