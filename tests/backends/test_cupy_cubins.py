"""The cupy backend's kernels without a GPU: NVRTC, the cache on disk, and the recorded table of their resources.

``python scripts/cupy_resources.py docs/results/cupy_resources.json`` rewrites the table.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import stat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

import cupy_resources as script

from contrastile.backends.cupy import arguments, build, cache, instances
from contrastile.backends.cupy.build import Instance
from contrastile.backends.cupy.configs import AMPERE, HOPPER, kernel_family

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "results" / "cupy_resources.json"
JOBS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
# shared memory in bytes, by capability: the maximum of a block, and the capacity of a multiprocessor
BLOCK = {80: 166_912, 90: 232_448, 100: 232_448}
MULTIPROCESSOR = {80: 167_936, 90: 233_472, 100: 233_472}
RESERVED, REGISTERS = 1024, 65_536


def recorded_table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def test_the_table_matches_the_sources_and_has_every_instance() -> None:
    table = recorded_table()
    why = "kernels changed: write the table anew, as this file's first lines say, and look at what it says"
    assert table["sources"] == script.sources(), why
    rows = {(row["kernel"], row["architecture"]): row for row in table["kernels"]}
    expected = [(x.kernel, capability) for capability in instances.CAPABILITIES for x in instances.every(capability)]
    assert sorted(rows) == sorted((kernel, build.architecture_name(capability)) for kernel, capability in expected)
    for kernel, capability in expected:
        row = rows[kernel, build.architecture_name(capability)]
        assert row["warnings"] == 0, row
        assert row["shared"] <= BLOCK[capability], row


@pytest.mark.slow
@pytest.mark.parametrize("capability", instances.CAPABILITIES)
def test_an_instance_of_every_template_compiles_as_recorded(capability: int) -> None:
    """The script compiled every instance when it wrote the table, which records a hash of the sources."""
    table = {(row["kernel"], row["architecture"]): row for row in recorded_table()["kernels"]}
    is_recorded_compiler = recorded_table()["nvrtc"] == "{}.{}".format(*build.nvrtc_version())
    selected = {instance.kernel.partition("<")[0]: instance for instance in reversed(instances.every(capability))}
    for row in script.table(list(selected.values()), capability, JOBS):
        assert row["warnings"] == 0, row
        if is_recorded_compiler:
            assert row == table[row["kernel"], row["architecture"]]


def test_blocks_that_share_a_multiprocessor_fit_it() -> None:
    tiles = [row for row in recorded_table()["kernels"] if row["threads"]]
    assert {row["architecture"] for row in tiles} == {build.architecture_name(x) for x in instances.CAPABILITIES}
    for row in tiles:
        capability = int(re.sub(r"\D", "", row["architecture"]))
        warps = -(-row["threads"] // 32)
        # the hardware allocates registers in groups of 8 per thread
        assert row["resident"] * 32 * warps * (-(-row["registers"] // 8) * 8) <= REGISTERS, row
        assert row["resident"] * (row["shared"] + RESERVED) <= MULTIPROCESSOR[capability], row


@pytest.mark.parametrize("name", ["forward", "gradient", "sigmoid"])
@pytest.mark.parametrize("family", [HOPPER, AMPERE], ids=lambda family: family.name)
def test_the_plain_kernels_spill_no_register(name: str, family: Any) -> None:
    paths = (False, True) if name == "forward" else (None,)
    plain = {
        instances.tile_kernel(
            name, kernel_family(dtype, capability, hopper=family is HOPPER), dtype, 0, safe=safe
        ).kernel
        for dtype in ("bfloat16", "float16")
        for capability in instances.CAPABILITIES
        for safe in paths
    }
    rows = [row for row in recorded_table()["kernels"] if row["kernel"] in plain]
    assert {row["kernel"] for row in rows} == plain
    for row in rows:
        assert row["spilled"] == row["stack"] == 0, row


def test_every_source_has_a_kernel_of_the_table() -> None:
    files = {instance.file for capability in instances.CAPABILITIES for instance in instances.every(capability)}
    assert files == {path.name for path in build.SOURCES.glob("*.cu")}


SOURCE = """
#include "shift.cuh"
namespace contrastile {
template <int BY>
__global__ void add(float* x) { x[threadIdx.x] += BY + SHIFT; }
}
"""
ADD = Instance("add.cu", "add<3>")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources and an empty cache; temporary folders of the cache are removed with the test."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "seven.cuh").write_text("constexpr int SEVEN = 7;\n")
    (folder / "shift.cuh").write_text('#include "seven.cuh"\nconstexpr int SHIFT = SEVEN;\n')
    (folder / "add.cu").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    temporary_folders: list[TemporaryDirectory[str]] = []
    monkeypatch.setattr(cache, "_held", temporary_folders)
    build._sources.cache_clear()
    yield folder
    build._sources.cache_clear()
    for directory in temporary_folders:
        directory.cleanup()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architecture of each compilation, in order."""
    architectures: list[str] = []
    compile_instance = build.compile_instance

    def counting(instance: Instance, architecture: str) -> build.Compiled:
        architectures.append(architecture)
        return compile_instance(instance, architecture)

    monkeypatch.setattr(build, "compile_instance", counting)
    return architectures


def edit(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))
    build._sources.cache_clear()


def test_a_second_compilation_comes_from_the_cache(sources: Path, compilations: list[str]) -> None:
    first, second = (build.cubin(ADD, "sm_80") for _ in range(2))
    assert first == second
    assert compilations == ["sm_80"]
    path, kernel = first
    assert kernel.encode() in path.read_bytes()


def test_the_key_covers_sources_options_compiler_architecture_and_instance(
    sources: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {build.cubin(ADD, "sm_80")[0]}
    for change in (
        lambda: edit(sources / "seven.cuh", "= 7", "= 8"),
        lambda: edit(sources / "add.cu", "+=", "-="),
        lambda: monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "-use_fast_math")),
        lambda: monkeypatch.setattr(build, "nvrtc_version", lambda: (99, 0)),
    ):
        change()
        paths.add(build.cubin(ADD, "sm_80")[0])
    paths.add(build.cubin(ADD, "sm_90a")[0])
    paths.add(build.cubin(Instance("add.cu", "add<4>"), "sm_90a")[0])
    assert len(paths) == len(compilations) == 7


def test_only_the_user_can_read_the_cache(sources: Path) -> None:
    path, _ = build.cubin(ADD, "sm_80")
    assert path.parent == cache.folder()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["truncated", "altered", "writable", "no note"])
def test_a_damaged_file_of_the_cache_is_not_loaded(sources: Path, compilations: list[str], damage: str) -> None:
    path, _ = build.cubin(ADD, "sm_80")
    original = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(original[: len(original) // 2])
    elif damage == "altered":
        path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    elif damage == "writable":
        path.chmod(0o666)
    else:
        path.with_suffix(".json").unlink()
    recompiled, _ = build.cubin(ADD, "sm_80")
    assert len(compilations) == 2
    assert recompiled.read_bytes() == original
    assert stat.S_IMODE(recompiled.stat().st_mode) == 0o600


def test_a_cache_folder_that_others_may_write_is_not_used(sources: Path, compilations: list[str]) -> None:
    cache.folder().mkdir()
    cache.folder().chmod(0o777)
    path, _ = build.cubin(ADD, "sm_80")
    assert path.parent != cache.folder()
    assert not list(cache.folder().iterdir())
    assert build.cubin(ADD, "sm_80")[0] == path
    assert len(compilations) == 1


def test_an_error_has_the_message_of_the_compiler(sources: Path) -> None:
    edit(sources / "add.cu", "BY + SHIFT", "unheard_of")
    with pytest.raises(RuntimeError, match=r"(?s)cannot compile add<3> of add.cu for sm_80.*unheard_of"):
        build.cubin(ADD, "sm_80")


def test_the_structs_have_the_layout_of_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build.SOURCES
    lines = [f'#include "{folder / header}"' for header in arguments.HEADERS] + ["namespace contrastile {"]
    structs = arguments.structs()
    assert {"ForwardArguments", "GradientArguments", "SigmoidArguments", "FoldArguments"} <= set(structs)
    for name, struct in structs.items():
        lines.append(f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});")
        for field, _ in struct._fields_:
            offset = getattr(struct, field).offset
            lines.append(f"static_assert(__INTADDR__(&static_cast<{name}*>(nullptr)->{field}) == {offset});")
    lines += ["__global__ void nothing() {}", "}"]
    (tmp_path / "layout.cu").write_text("\n".join(lines))
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    build.compile_instance(Instance("layout.cu", "nothing"), "sm_80")
    (tmp_path / "layout.cu").write_text("\n".join(lines).replace("== 0)", "== 1)", 1))
    with pytest.raises(RuntimeError, match="static assertion"):
        build.compile_instance(Instance("layout.cu", "nothing"), "sm_80")
