"""Ranks on the GPUs of one host: every primitive, every property of ranks, and steps in CUDA graphs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import run

from contrastile.backends.registry import available

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
GPUS = torch.cuda.device_count()
# NCCL needs one GPU per rank; ranks whose messages go through the host may share one
RANKS = {"torch": GPUS, "gloo": 2, "mpi": 2}


def output_of(engine: str, *words: str) -> str:
    """The output of the ranks of a program, all of which must exit with 0."""
    if engine == "torch" and GPUS < 2:
        pytest.skip("needs two GPUs")
    if engine == "mpi":
        pytest.importorskip("mpi4py")
        if shutil.which("mpirun") is None:
            pytest.skip("needs mpirun")
    # a launcher may give its ranks a terminal, for which verify prints colours
    completed = run("mpi" if engine == "mpi" else "torch", RANKS[engine], *words, PYTHONPATH=str(ROOT), NO_COLOR="1")
    output = completed.stdout + completed.stderr
    assert completed.returncode == 0, output
    return output


@pytest.mark.parametrize("engine", RANKS)
def test_messages_arrive(engine: str) -> None:
    output = output_of(engine, str(PROGRAMS / "exchange.py"), engine)
    assert "FAIL" not in output, output
    assert "done" in output


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_every_property_of_ranks_holds(engine: str) -> None:
    reasons = available()
    backends = [name for name in ("torch", "triton", "cupy") if reasons[name] is None]
    options = ["--backend", *backends, "--case", "ragged", "blocks", "views", "front-door"]
    options += ["--dtype", "float32", "bfloat16"]
    output = output_of(engine, "-m", "contrastile", "verify", "--world", engine, "--device", "cuda", *options)
    assert output.count("PASS: ") == 1, output


# the fault of one rank at one replayed step, and whether every loss and gradient is right nevertheless
FAULTS = {
    **dict.fromkeys(("none", "empty rank"), True),
    **dict.fromkeys(("skipped backward", "swapped backwards", "other scale", "skipped forward", "killed"), False),
}


@pytest.mark.parametrize("backend", ["triton", "cupy"])
@pytest.mark.parametrize("exchange", ["ring", "gather", "replicate"])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_number_is_wrong_where_a_rank_fails(fault: str, exchange: str, backend: str) -> None:
    if GPUS < 2:
        pytest.skip("needs two GPUs")
    words = [str(PROGRAMS / "faults.py"), "torch", fault, exchange, backend]
    completed = run("torch", GPUS, *words, PYTHONPATH=str(ROOT), CONTRASTILE_DEADLINE="10")
    output = completed.stdout + completed.stderr
    assert len(re.findall(" 0 wrong", completed.stdout)) == completed.stdout.count(" wrong"), output
    is_right = FAULTS[fault]
    assert (completed.returncode == 0) == is_right, output
    assert not is_right or completed.stdout.count(" right 0 NaN 0 wrong \n") == GPUS, output


def test_steps_replay_from_graphs_with_the_bits_of_eager_ones() -> None:
    output = output_of("torch", str(PROGRAMS / "graphs.py"), "torch")
    assert "FAIL" not in output, output
    assert "pass" in output


def test_nccl_carries_every_dtype_from_a_gpu_to_itself() -> None:
    command = [sys.executable, str(PROGRAMS / "exchange.py"), "alone"]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "done" in completed.stdout
    assert "right" in completed.stdout
