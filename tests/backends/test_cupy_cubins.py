"""What every instance of every CUDA kernel costs on sm_80, sm_90a and sm_100, recorded, and compiled with no GPU.

``python scripts/cupy_resources.py docs/results/cupy_resources.json`` writes the table anew.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from contrastile.backends.contract import Options
from contrastile.backends.cupy import build, instances
from contrastile.backends.cupy.configs import AMPERE, HOPPER, backward_chunk, forward_chunk, kernel_family

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "results" / "cupy_resources.json"
JOBS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# bytes of shared memory that one block may have, and that a multiprocessor has
BLOCK = {80: 166_912, 90: 232_448, 100: 232_448}
MULTIPROCESSOR = {80: 167_936, 90: 233_472, 100: 233_472}
RESERVED, REGISTERS = 1024, 65_536


def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("cupy_resources")


def test_the_table_is_of_these_sources_and_has_every_instance(script: Any) -> None:
    found = recorded()
    why = "kernels changed: write the table anew, as this file's first lines say, and look at what it says"
    assert found["sources"] == script.sources(), why
    rows = {(row["kernel"], row["architecture"]): row for row in found["kernels"]}
    wanted = [
        (each.kernel, capability) for capability in instances.CAPABILITIES for each in instances.every(capability)
    ]
    assert sorted(rows) == sorted((kernel, build.architecture_name(capability)) for kernel, capability in wanted)
    for kernel, capability in wanted:
        row = rows[kernel, build.architecture_name(capability)]
        assert row["warnings"] == 0, row
        assert row["shared"] <= BLOCK[capability], row


@pytest.mark.slow
@pytest.mark.parametrize("capability", instances.CAPABILITIES)
def test_an_instance_of_every_template_compiles_as_recorded(capability: int, script: Any) -> None:
    """All were compiled when the table was written, and it says of which sources."""
    table = {(row["kernel"], row["architecture"]): row for row in recorded()["kernels"]}
    same = recorded()["nvrtc"] == "{}.{}".format(*build.nvrtc_version())
    wanted = {each.kernel.partition("<")[0]: each for each in reversed(instances.every(capability))}
    for row in script.table(list(wanted.values()), capability, JOBS):
        assert row.warnings == 0, row
        if same:
            assert asdict(row) == table[row.kernel, row.architecture]


def test_blocks_that_are_to_share_a_multiprocessor_fit() -> None:
    tiles = [row for row in recorded()["kernels"] if row["threads"]]
    assert {row["architecture"] for row in tiles} == {build.architecture_name(x) for x in instances.CAPABILITIES}
    for row in tiles:
        capability = int(re.sub(r"\D", "", row["architecture"]))
        warps = -(-row["threads"] // 32)
        # registers are given out in groups of 8 a thread
        assert row["resident"] * 32 * warps * (-(-row["registers"] // 8) * 8) <= REGISTERS, row
        assert row["resident"] * (row["shared"] + RESERVED) <= MULTIPROCESSOR[capability], row


@pytest.mark.parametrize("name", ["forward", "gradient", "sigmoid"])
@pytest.mark.parametrize("family", [HOPPER, AMPERE], ids=lambda family: family.name)
def test_the_plain_kernels_spill_nothing(name: str, family: Any) -> None:
    paths = (False, True) if name == "forward" else (None,)
    plain = {
        instances.tile_kernel(
            name, kernel_family(dtype, capability, hopper=family is HOPPER), dtype, 0, safe=safe
        ).kernel
        for dtype in ("bfloat16", "float16")
        for capability in instances.CAPABILITIES
        for safe in paths
    }
    rows = [row for row in recorded()["kernels"] if row["kernel"] in plain]
    assert {row["kernel"] for row in rows} == plain
    for row in rows:
        assert row["spilled"] == row["stack"] == 0, row


def test_every_source_holds_a_kernel_of_the_table() -> None:
    named = {each.file for capability in instances.CAPABILITIES for each in instances.every(capability)}
    assert named == {path.name for path in build.SOURCES.glob("*.cu")}


def test_chunks_stay_within_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRASTILE_WORKSPACE_MIB", "256")
    for size, dtype in ((2, "bfloat16"), (4, "float32")):
        family = kernel_family(dtype, 90)
        for m, n in ((4_194_304, 4_194_304), (65536, 1000), (1000, 65536), (1, 10**7), (10**7, 1), (40001, 40003)):
            height, width = backward_chunk(m, n, size, family, Options())
            assert 1 <= height <= m
            assert 1 <= width <= n
            padded = -(-width // (16 // size)) * (16 // size)
            assert size * height * padded <= 256 * 2**20
            assert backward_chunk(m, n, size, family, Options(tile=(3, 5))) == (min(m, 3), min(n, 5))


def test_partial_results_of_the_forward_pass_stay_bounded() -> None:
    for family in (HOPPER, AMPERE):
        for m, n in ((4_194_304, 4_194_304), (65536, 1000), (1000, 65536), (1, 10**8), (10**8, 1)):
            for numbers in (1, 2, 6):
                height, width = forward_chunk(m, n, family, None, numbers)
                across, down = -(-width // family.bn), -(-height // family.bm)
                # a chunk one tile wide has one partial a row, whatever its height
                assert numbers * (across * height + down * width) <= 16 * 2**20 * 1.1 + numbers * (height + width)
