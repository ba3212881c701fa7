"""How a backend is named, by its name or by anybody's module, and what "auto" takes: the fastest that can be used."""

from __future__ import annotations

import importlib
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cupy_hosted import hosted

from contrastile.backends import choice, registry
from contrastile.backends.choice import TABLE, choose
from contrastile.backends.contract import PRECISIONS, Backend, BackendUnavailableError, Options
from contrastile.verify.facts import limits

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("raised", ["ImportError('DLL load failed:\\n  no libcudart')", "OSError('no libcudart')"])
def test_what_is_installed_and_does_not_load_is_unavailable_with_a_reason_and_a_remedy(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cupy.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.delitem(sys.modules, "contrastile.backends.cupy.record", raising=False)
    monkeypatch.delattr(importlib.import_module("contrastile.backends.cupy"), "record", raising=False)
    monkeypatch.setattr(registry, "_is_there", lambda name: True)
    expected = (
        r"^backend 'cupy' is not available: it is installed, but cannot be imported \(.*no libcudart\); see that it "
        r"fits this machine and its driver, or run: pip install 'contrastile\[cupy\]' --force-reinstall$"
    )
    with pytest.raises(BackendUnavailableError, match=expected):
        registry.load("cupy")


def test_packages_may_be_as_old_as_pyproject_lets_them() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    needed = {each.partition(";")[0] for extra in ("torch", "triton") for each in extras[extra]}
    assert needed - {"contrastile[torch]"} == set(registry.BUILT_IN["triton"].requires)


PACKAGE = ROOT / "contrastile"
PAGE = ROOT / "docs" / "reference" / "environment.md"


def test_the_table_of_variables_has_those_that_the_package_reads() -> None:
    read = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"CONTRASTILE_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    table = re.findall(r"^\| `(CONTRASTILE_[A-Z_]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert read
    assert sorted(table) == sorted(read)


DTYPES = ("float16", "bfloat16", "float32")
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with a GPU of some compute capability, on which these backends can be used, and torch."""

    def made(capability: int, *usable: str) -> None:
        there = {"torch", *usable}
        monkeypatch.setattr(choice, "capability", lambda place: capability)
        monkeypatch.setattr(choice, "unusable", lambda name, device: None if name in there else f"no {name}")
        choice.explained.cache_clear()

    return made


def test_what_cannot_be_used_is_passed_over_and_the_reason_is_told_once(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "contrastile")
    machine(90, "triton")
    for _ in range(2):
        assert choose("torch", "cuda:0", "bfloat16") == "triton"
    (said,) = caplog.messages
    assert said.startswith("backend='auto' is triton for torch bfloat16 arrays on cuda:0: ")
    assert said.endswith("; cupy cannot be used: no cupy")
    machine(90)
    assert choose("torch", "cuda:0", "bfloat16") == "torch"


def test_the_table_has_a_row_for_every_call_and_says_what_was_measured() -> None:
    wanted = [*DTYPES, *(f"float32/{precision}" for precision in PRECISIONS)]
    assert all(any(dtype in row.dtypes and row.capability is None for row in TABLE) for dtype in wanted)
    for row in TABLE:
        assert "torch" in row.order
        assert set(row.order) <= set(registry.BUILT_IN)
        assert row.measured


@pytest.mark.parametrize("raised", [BackendUnavailableError("no driver"), RuntimeError("no\n  NVRTC")])
def test_a_backend_that_is_installed_and_does_not_load_is_no_error(
    raised: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load(name: str) -> Backend:
        asked.append(name)
        raise raised

    monkeypatch.setattr(registry, "_is_there", lambda name: True)
    monkeypatch.setattr(choice, "load", load)
    monkeypatch.setattr(choice, "capability", lambda place: 90)
    assert choose("torch", "cuda", "bfloat16") == "torch"
    assert choose("torch", "cuda", "float16") == "torch"
    # it is tried once, not in every call
    assert sorted(asked) == ["cupy", "torch", "triton"]
    assert "no" in str(choice.unusable("cupy", "cuda"))
    assert "\n" not in str(choice.unusable("cupy", "cuda"))


def test_nothing_is_loaded_behind_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(choice, "unusable", lambda name, device: asked.append(name))
    monkeypatch.setattr(choice, "capability", lambda place: 90)
    assert choose("torch", "cuda", "float32") == "triton"
    assert choose("torch", "cuda", "bfloat16") == "cupy"
    assert choose("torch", "cuda", "float64") == "torch"
    assert asked == ["triton", "cupy"]


def records() -> Iterator[Backend]:
    for name in ("numpy", "torch"):
        yield registry.load(name)
    pytest.importorskip("triton")
    yield registry.load("triton")
    with hosted() as host:
        yield host.record.backend


def test_the_precision_of_auto_rounds_no_more_than_float32_does() -> None:
    for backend in records():
        assert backend.auto_precision in backend.precisions
        options = () if backend.auto_precision == "ieee" else (Options(precision=backend.auto_precision),)
        found = backend.accuracy("float32", min(backend.devices), *options)
        for name, limit in limits(backend.state("float32"), "float32", "ieee").items():
            assert getattr(found, name) <= limit, (backend.name, name)
