"""The requirements, environment variables and precisions of the backends, and the table of what "auto" selects."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from cupy_hosted import hosted

from contrastile.backends import registry
from contrastile.backends.choice import TABLE
from contrastile.backends.contract import PRECISIONS, Backend, Options
from contrastile.verify.facts import limits

ROOT = Path(__file__).parents[2]


def test_backends_require_the_package_versions_of_pyproject() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    requirements = {requirement.partition(";")[0] for extra in ("torch", "triton") for requirement in extras[extra]}
    assert requirements - {"contrastile[torch]"} == set(registry.BUILT_IN["triton"].requires)


PACKAGE = ROOT / "contrastile"
PAGE = ROOT / "docs" / "reference" / "environment.md"


def test_the_documented_environment_variables_are_those_that_the_package_reads() -> None:
    read = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r"CONTRASTILE_[A-Z_]+", path.read_text(encoding="utf-8"))
    }
    documented = re.findall(r"^\| `(CONTRASTILE_[A-Z_]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert read
    assert sorted(documented) == sorted(read)


DTYPES = ("float16", "bfloat16", "float32")


def test_the_table_of_auto_has_a_row_for_every_dtype_and_a_measurement_in_every_row() -> None:
    keys = [*DTYPES, *(f"float32/{precision}" for precision in PRECISIONS)]
    assert all(any(key in row.dtypes and row.capability is None for row in TABLE) for key in keys)
    for row in TABLE:
        assert "torch" in row.order
        assert set(row.order) <= set(registry.BUILT_IN)
        assert row.measured


def loaded_backends() -> Iterator[Backend]:
    for name in ("numpy", "torch"):
        yield registry.load(name)
    pytest.importorskip("triton")
    yield registry.load("triton")
    with hosted() as host:
        yield host.record.backend


def test_the_automatic_precision_rounds_no_more_than_float32_does() -> None:
    for backend in loaded_backends():
        assert backend.auto_precision in backend.precisions
        options = () if backend.auto_precision == "ieee" else (Options(precision=backend.auto_precision),)
        accuracy = backend.accuracy("float32", min(backend.devices), *options)
        for name, limit in limits(backend.state("float32"), "float32", "ieee").items():
            assert getattr(accuracy, name) <= limit, (backend.name, name)
