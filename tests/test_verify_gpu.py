"""``make verify-gpu`` without a GPU: its commands can be given, and what a job must do to pass."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest
import verify_gpu as script

from contrastile.cli import main
from contrastile.mutate import command as mutate
from contrastile.verify import cases
from contrastile.verify import command as verify
from contrastile.verify.properties import PROPERTIES

ROOT = Path(__file__).parent.parent


def test_every_command_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen, mutants = set(), list[str]()
    parser = {"verify": argparse.ArgumentParser(), "mutate": argparse.ArgumentParser()}
    verify.add_arguments(parser["verify"])
    mutate.add_arguments(parser["mutate"])
    for job in script.jobs(100, 3, 16, tmp_path):
        words = job.command[job.command.index(sys.executable) + 1 :]
        if job.step == "kernels":
            importlib.import_module("cupy_resources").main([*words[1:], "--match", "no such kernel"])
            continue
        if words[1] == "contrastile":
            seen.add(words[2])
            mutants = words[2:] if words[2] == "mutate" else mutants
            parser[words[2]].parse_args(words[3:])
            continue
        seen.add("pytest")
        if "--pyargs" in words:
            parser["verify"].parse_args(words[words.index("--pyargs") + 2 :])
            continue
        files = [ROOT / word for word in words if word.startswith("tests/")]
        chosen = words[words.index("-k") + 1] if "-k" in words else "test_"
        assert files
        assert all(chosen in file.read_text(encoding="utf-8") for file in files)
    assert seen == {"verify", "mutate", "pytest"}
    assert {*script.SMALL_CASES, "drawn"} <= {*cases.names(), *(each.case for each in PROPERTIES.values())}
    assert main([*mutants, "--list"]) == 0
    listed = capsys.readouterr().out
    assert "triton:zero-pad-counted" in listed
    assert "cupy:plain-log" in listed


@pytest.mark.parametrize(
    ("program", "seconds", "why"),
    [
        ("print('PASS: 3 passed')", 300.0, ""),
        ("print('FAIL: 1 failed'); raise SystemExit(1)", 300.0, "exit code 1"),
        ("print('4 skipped')", 300.0, "nothing ran"),
        ("import time; time.sleep(60)", 1.0, "not done in time"),
        ("print('PASS: 3 passed')", -1.0, "not done in time"),
        (None, 300.0, "exit code 127"),
    ],
    ids=["sound", "wrong", "skipped", "endless", "late", "missing"],
)
def test_a_job_passes_only_if_it_has_shown_something(
    program: str | None, seconds: float, why: str, tmp_path: Path
) -> None:
    command = ["no-such-program"] if program is None else [sys.executable, "-S", "-c", program]
    job = script.Job("verify", "one", command, {"seed": 3})
    row = script.run(job, tmp_path, script.time.monotonic() + seconds)
    assert (row["status"], row["why"], row["seed"]) == ("fail" if why else "pass", why, 3)
    assert seconds < 300 or row["said"] in (tmp_path / "verify-one.log").read_text()


SAID = """========= COMPUTE-SANITIZER
28 passed in 3.1s
========= Uninitialized __global__ memory read of size 16 bytes
=========     at void cutlass::Kernel2<a_nt_align8>(T1::Params)+0xc10
=========     by thread (0,0,0) in block (0,0,4)
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void contrastile::measure<float>(MeasureArguments)+0x50 in measure.cu:12
=========     by thread (1,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""


def test_what_a_sanitizer_finds_is_counted_by_kernel() -> None:
    cublas, ours = "void cutlass::Kernel2<a_nt_align8>", "void contrastile::measure<float>"
    assert script.findings(SAID) == {cublas: 1, ours: 1}

    def judged(tool: str, text: str) -> str:
        return script.judged(script.Job("sanitizers", f"{tool}-cupy", [], {}), text)

    assert judged("memcheck", SAID) == f"1 x {ours}; 1 x {cublas}"
    assert judged("initcheck", SAID) == f"1 x {ours}"
    of_cublas = SAID.replace("contrastile", "cutlass")
    assert judged("initcheck", of_cublas) == ""
    assert judged("initcheck", of_cublas.replace("28 passed", "28 skipped")) == "nothing ran"
    assert judged("initcheck", "========= COMPUTE-SANITIZER\n1 passed\n") == "the sanitizer did not end"
    race = "========= Error: Race reported between Write access at fold(A)+0x1f0 and Read access at fold(A)+0x2f0\n"
    assert judged("racecheck", race + SAID.splitlines()[-1]) == "1 x fold"
    assert judged("initcheck", "========= Host API memory access error\n" + of_cublas).startswith("1 x outside")
