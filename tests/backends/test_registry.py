"""How a backend is named, by its name or by anybody's module, and what the environment says to all."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from contrastile.backends import registry
from contrastile.backends.contract import BackendUnavailableError, Options
from contrastile.backends.settings import kept_bytes, mebibytes, workspace_bytes

ROOT = Path(__file__).parents[2]


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


PACKAGE = ROOT / "contrastile"
PAGE = ROOT / "docs" / "reference" / "environment.md"


@pytest.mark.parametrize("given", ["", "two", "-1", "1.5", "1e3", "0x10", "²"])
def test_a_size_is_a_whole_number_of_mib(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRASTILE_KEEP_MIB", given)
    expected = (
        rf"^CONTRASTILE_KEEP_MIB must be a whole number of MiB, 0 or more, got {re.escape(repr(given))}; set e\.g\."
    )
    with pytest.raises(ValueError, match=expected):
        mebibytes("CONTRASTILE_KEEP_MIB", 7)


@pytest.mark.parametrize(
    ("option", "variable", "size", "usual"),
    [
        ("workspace", "CONTRASTILE_WORKSPACE_MIB", workspace_bytes, 512),
        ("keep", "CONTRASTILE_KEEP_MIB", kept_bytes, 0),
    ],
)
def test_an_option_is_stronger_than_the_environment_and_that_than_the_default(
    option: str, variable: str, size: Callable[[Options], int], usual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert size(Options()) == usual * 2**20
    monkeypatch.setenv(variable, "3")
    assert size(Options()) == 3 * 2**20
    for mib in (0, 7):
        assert size(replace(Options(), **{option: mib})) == mib * 2**20
    monkeypatch.setenv(variable, "much")
    with pytest.raises(ValueError, match=f"{variable} must be"):
        size(Options())


def test_the_table_of_variables_has_those_that_the_package_reads() -> None:
    read = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"CONTRASTILE_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    table = re.findall(r"^\| `(CONTRASTILE_[A-Z_]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert read
    assert sorted(table) == sorted(read)
