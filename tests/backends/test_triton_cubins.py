"""Triton's kernels compiled for sm_80, sm_90 and sm_100 without a GPU, and the recorded table of their resources.

``python scripts/triton_resources.py docs/results/triton_resources.json`` rewrites the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "results" / "triton_resources.json"
# shared memory in bytes, by capability: the maximum of a program, and the capacity of a multiprocessor
PROGRAM = {80: 166_912, 90: 232_448, 100: 232_448}
MULTIPROCESSOR = {80: 167_936, 90: 233_472, 100: 233_472}
RESERVED, REGISTERS = 1024, 65_536
ARCHITECTURES = tuple(PROGRAM)


def recorded_kernels() -> list[dict[str, Any]]:
    kernels: list[dict[str, Any]] = json.loads(TABLE.read_text())["kernels"]
    return kernels


def compile_kernels(tmp_path: Path) -> list[dict[str, Any]]:
    # in another process, because Triton may interpret kernels in this one
    path = tmp_path / "table.json"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "scripts" / "triton_resources.py"), str(path), "--plain"]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
    kernels: list[dict[str, Any]] = json.loads(path.read_text())["kernels"]
    return kernels


@pytest.mark.slow
def test_the_symmetric_loss_compiles_for_every_architecture_as_recorded(tmp_path: Path) -> None:
    table = {(x["kernel"], x["variant"], x["architecture"]): x for x in recorded_kernels()}
    is_recorded_version = json.loads(TABLE.read_text())["triton"] == triton.__version__
    compiled = compile_kernels(tmp_path)
    for architecture in ARCHITECTURES:
        names = {x["kernel"] for x in compiled if x["architecture"] == architecture}
        assert {"lse_tiles", "gradient_tiles", "fold", "measure", "weight_bounds", "set_positives"} <= names
    for kernel in compiled:
        key = kernel["kernel"], kernel["variant"], kernel["architecture"]
        assert kernel["shared"] <= PROGRAM[kernel["architecture"]], key
        if is_recorded_version:
            assert kernel == table[key], "kernels changed: write the table anew and look at what it says"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_of_every_dtype_is_recorded_and_fits(architecture: int) -> None:
    table = [x for x in recorded_kernels() if x["architecture"] == architecture]
    for dtype in ("float16", "bfloat16", "float32"):
        names = {x["kernel"] for x in table if x["variant"].startswith(dtype)}
        assert {"lse_tiles", "gradient_tiles", "sigmoid_tiles", "add_product", "fold", "add_parts"} <= names
    for kernel in table:
        assert kernel["shared"] <= PROGRAM[architecture], kernel
        assert kernel["registers"] * 32 * kernel["warps"] <= REGISTERS, kernel


def test_two_programs_of_the_hot_kernels_share_a_hopper_multiprocessor_without_spilling() -> None:
    hot = [
        x
        for x in recorded_kernels()
        if x["architecture"] == 90
        and x["kernel"] in ("lse_tiles", "gradient_tiles", "sigmoid_tiles")
        and "float32" not in x["variant"]
        and "EXCLUDED=False IDS=0" in x["variant"]
        and "LIMITED=True" not in x["variant"]
    ]
    assert hot
    # kernels with ids spill, but only in the few tiles where some ids are equal
    plain = [x for x in recorded_kernels() if x["kernel"] == "search_tiles" and "IDS=0" in x["variant"]]
    assert not any(x["spilled"] for x in plain if x["architecture"] == 90)
    for kernel in hot:
        assert kernel["spilled"] == 0, kernel
        assert 2 * (kernel["shared"] + RESERVED) <= MULTIPROCESSOR[90], kernel
        assert 2 * 32 * kernel["warps"] * kernel["registers"] <= REGISTERS, kernel
