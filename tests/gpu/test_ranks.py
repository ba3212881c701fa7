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
# NCCL gives each rank a GPU of its own; what goes through the host may share one
RANKS = {"torch": GPUS, "gloo": 2, "mpi": 2}


def said(engine: str, *words: str) -> str:
    """What a program's ranks print; they must all end well."""
    if engine == "torch" and GPUS < 2:
        pytest.skip("needs two GPUs")
    if engine == "mpi":
        pytest.importorskip("mpi4py")
        if shutil.which("mpirun") is None:
            pytest.skip("needs mpirun")
    # a launcher may give its ranks a terminal, where verify writes in colours
    done = run("mpi" if engine == "mpi" else "torch", RANKS[engine], *words, PYTHONPATH=str(ROOT), NO_COLOR="1")
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@pytest.mark.parametrize("engine", RANKS)
def test_messages_arrive(engine: str) -> None:
    output = said(engine, str(PROGRAMS / "exchange.py"), engine)
    assert "FAIL" not in output, output
    assert "done" in output


@pytest.mark.parametrize("engine", ["torch", "mpi"])
def test_every_property_of_ranks_holds(engine: str) -> None:
    known = available()
    backends = [name for name in ("torch", "triton", "cupy") if known[name] is None]
    chosen = ["--backend", *backends, "--case", "ragged", "blocks", "views", "front-door"]
    chosen += ["--dtype", "float32", "bfloat16"]
    output = said(engine, "-m", "contrastile", "verify", "--world", engine, "--device", "cuda", *chosen)
    assert output.count("PASS: ") == 1, output


# what one rank does at one step, which is replayed, and whether every loss and gradient is right all the same
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
    done = run("torch", GPUS, *words, PYTHONPATH=str(ROOT), CONTRASTILE_DEADLINE="10")
    output = done.stdout + done.stderr
    assert len(re.findall(" 0 wrong", done.stdout)) == done.stdout.count(" wrong"), output
    right = FAULTS[fault]
    assert (done.returncode == 0) == right, output
    assert not right or done.stdout.count(" right 0 NaN 0 wrong \n") == GPUS, output


def test_steps_replay_from_graphs_with_the_bits_of_eager_ones() -> None:
    output = said("torch", str(PROGRAMS / "graphs.py"), "torch")
    assert "FAIL" not in output, output
    assert "pass" in output


def test_nccl_carries_every_dtype_from_a_gpu_to_itself() -> None:
    command = [sys.executable, str(PROGRAMS / "exchange.py"), "alone"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "done" in done.stdout
    assert "right" in done.stdout
