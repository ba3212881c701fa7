"""How a backend is named: by its name, by a record of its module, or by anybody's module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contrastile.backends import registry
from contrastile.backends.contract import BackendUnavailableError


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    registry.load.cache_clear()
    yield
    registry.load.cache_clear()


@pytest.mark.parametrize("name", ["numpy", "numpy:backend", "contrastile.backends.numpy:backend"])
def test_one_record_has_three_names(name: str) -> None:
    from contrastile.backends.numpy import backend

    assert registry.load(name) is backend


def test_a_record_of_a_known_backend_needs_what_that_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_is_there", lambda name: False)
    expected = r"'cupy:keeping_2048' is not available: .*cupy.*; run: pip install 'contrastile\[cupy\]'$"
    with pytest.raises(BackendUnavailableError, match=expected):
        registry.load("cupy:keeping_2048")


def test_a_record_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'numpy:nothing' must be a .*Backend, got NoneType"):
        registry.load("numpy:nothing")
