"""How a backend is named: by its name, or by anybody's module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrastile.backends import registry
from contrastile.backends.contract import BackendUnavailableError


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    registry.load.cache_clear()
    yield
    registry.load.cache_clear()


@pytest.mark.parametrize("name", ["numpy", "contrastile.backends.numpy:backend"])
def test_one_record_has_two_names(name: str) -> None:
    from contrastile.backends.numpy import backend

    assert registry.load(name) is backend


def test_a_known_backend_without_its_packages_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_is_there", lambda name: False)
    expected = r"'cupy' is not available: .*cupy.*; run: pip install 'contrastile\[cupy\]'$"
    with pytest.raises(BackendUnavailableError, match=expected):
        registry.load("cupy")


def test_a_record_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'contrastile.backends.numpy:nothing' must be a .*Backend, got NoneType"):
        registry.load("contrastile.backends.numpy:nothing")


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


@pytest.mark.parametrize("name", [":", ":backend", ".numpy:backend", ""])
def test_a_name_without_a_module_is_none_that_is_known(name: str) -> None:
    with pytest.raises(ValueError, match="backend must be one of numpy, "):
        registry.load(name)


def test_what_needs_a_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.require("this", "torch")
    monkeypatch.setattr(registry, "_is_there", lambda name: False)
    expected = r"^this is not available: torch cannot be imported; run: pip install 'contrastile\[torch\]'$"
    with pytest.raises(BackendUnavailableError, match=expected):
        registry.require("this", "torch")
