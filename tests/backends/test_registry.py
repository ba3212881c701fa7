"""How a backend is named: by its name, or by anybody's module."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrastile.backends import registry
from contrastile.backends.contract import BackendUnavailableError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    registry.load.cache_clear()
    yield
    registry.load.cache_clear()


@pytest.mark.parametrize("name", ["numpy", "contrastile.backends.numpy:backend"])
def test_one_record_has_two_names(name: str) -> None:
    from contrastile.backends.numpy import backend

    assert registry.load(name) is backend


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


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("3.4.0", "triton must be 3.5 or newer, got 3.4.0; run: pip install 'contrastile[triton]'"),
        ("3.5.0a0+git1", None),
        ("3.10", None),
        ("4", None),
        (None, None),
    ],
)
def test_a_package_that_is_too_old_is_said_to_be(
    version: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_is_there", lambda name: True)
    monkeypatch.setattr(registry, "installed_version", {"torch": "2.6.0", "triton": version}.get)
    assert registry.available()["triton"] == said
    if said:
        with pytest.raises(BackendUnavailableError, match=r"^backend 'triton' is not available: triton must be 3\.5"):
            registry.load("triton")


def test_packages_may_be_as_old_as_pyproject_lets_them() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    needed = {each.partition(";")[0] for extra in ("torch", "triton") for each in extras[extra]}
    assert needed - {"contrastile[torch]"} == set(registry.BUILT_IN["triton"].requires)
