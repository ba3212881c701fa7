"""The cupy backend's compiler and its cache on disk: NVRTC needs neither CuPy nor a GPU."""

from __future__ import annotations

import ctypes
import stat
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest.importorskip("cuda.bindings.nvrtc")

from contrastile.backends.cupy import arguments, build, cache, cubins
from contrastile.backends.cupy.build import Instance

SOURCE = """
#include "shift.cuh"
namespace contrastile {
extern "C" __device__ const int add_shared = 3 * SHIFT;
template <int BY>
__global__ void add(float* x) { x[threadIdx.x] += BY + SHIFT; }
}
"""
ADD = Instance("add.cu", "add<3>")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources and an empty cache; a folder of the process's own goes with the test."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "seven.cuh").write_text("constexpr int SEVEN = 7;\n")
    (folder / "shift.cuh").write_text('#include "seven.cuh"\nconstexpr int SHIFT = SEVEN;\n')
    (folder / "add.cu").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    held: list[TemporaryDirectory[str]] = []
    monkeypatch.setattr(cache, "_held", held)
    for remembered in (build._sources, cache._scratch):
        remembered.cache_clear()
    yield folder
    for remembered in (build._sources, cache._scratch):
        remembered.cache_clear()
    for each in held:
        each.cleanup()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures that were compiled for, in order."""
    done: list[str] = []
    compile_instance = build.compile_instance

    def counted(instance: Instance, architecture: str) -> build.Compiled:
        done.append(architecture)
        return compile_instance(instance, architecture)

    monkeypatch.setattr(build, "compile_instance", counted)
    return done


def changed(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))
    build._sources.cache_clear()


def test_what_was_compiled_once_comes_from_the_cache(sources: Path, compilations: list[str]) -> None:
    first, second = (build.cubin(ADD, "sm_80") for _ in range(2))
    assert first == second
    assert compilations == ["sm_80"]
    path, kernel = first
    assert kernel.encode() in path.read_bytes()
    assert cubins.integer(path.read_bytes(), "add_shared") == 21
    with pytest.raises(KeyError):
        cubins.integer(path.read_bytes(), "add_shar")


def test_everything_that_matters_is_in_the_key(
    sources: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {build.cubin(ADD, "sm_80")[0]}
    for change in (
        lambda: changed(sources / "seven.cuh", "= 7", "= 8"),
        lambda: changed(sources / "add.cu", "+=", "-="),
        lambda: monkeypatch.setattr(build, "OPTIONS", (*build.OPTIONS, "-use_fast_math")),
        lambda: monkeypatch.setattr(build, "nvrtc_version", lambda: (99, 0)),
    ):
        change()
        seen.add(build.cubin(ADD, "sm_80")[0])
    seen.add(build.cubin(ADD, "sm_90a")[0])
    seen.add(build.cubin(Instance("add.cu", "add<4>"), "sm_90a")[0])
    assert len(seen) == len(compilations) == 7


def test_the_cache_is_the_user_s_alone(sources: Path) -> None:
    path, _ = build.cubin(ADD, "sm_80")
    assert path.parent == cache.folder()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("spoil", ["truncated", "altered", "writable", "no note"])
def test_a_file_that_is_not_what_was_written_is_not_loaded(sources: Path, compilations: list[str], spoil: str) -> None:
    path, _ = build.cubin(ADD, "sm_80")
    whole = path.read_bytes()
    if spoil == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif spoil == "altered":
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif spoil == "writable":
        path.chmod(0o666)
    else:
        path.with_suffix(".json").unlink()
    again, _ = build.cubin(ADD, "sm_80")
    assert len(compilations) == 2
    assert again.read_bytes() == whole
    assert stat.S_IMODE(again.stat().st_mode) == 0o600


def test_a_folder_that_others_may_write_is_not_used(sources: Path, compilations: list[str]) -> None:
    cache.folder().mkdir()
    cache.folder().chmod(0o777)
    path, _ = build.cubin(ADD, "sm_80")
    assert path.parent != cache.folder()
    assert not list(cache.folder().iterdir())
    assert build.cubin(ADD, "sm_80")[0] == path
    assert len(compilations) == 1


def test_an_error_says_what_the_compiler_said(sources: Path) -> None:
    changed(sources / "add.cu", "BY + SHIFT", "unheard_of")
    with pytest.raises(RuntimeError, match=r"(?s)cannot compile add<3> of add.cu for sm_80.*unheard_of"):
        build.cubin(ADD, "sm_80")


def test_the_structs_are_laid_out_as_in_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build.SOURCES
    lines = [f'#include "{folder / header}"' for header in arguments.HEADERS] + ["namespace contrastile {"]
    found = arguments.structs()
    assert {"ForwardArguments", "GradientArguments", "SigmoidArguments", "FoldArguments"} <= set(found)
    for name, struct in found.items():
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
