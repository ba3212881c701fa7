"""The setup of every test; pytest reads this file before any test file imports torch or Triton."""

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

# Triton decides at import whether it interprets kernels; make test-gpu sets 0
os.environ.setdefault("TRITON_INTERPRET", "1")

# packages do not change while tests run; to read their metadata takes milliseconds for each backend that a test loads
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)
importlib.metadata.version = cache(importlib.metadata.version)

# no test fails because the machine is busy
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")

# pytest-xdist runs one process per core: more threads would slow small problems down, because they wait for each other
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", type=Path, metavar="FILE", help="write what tests/integrations/test_matrix.py measures"
    )


@pytest.fixture(autouse=True)
def forget_calls() -> Callable[[], None]:
    """Clear the caches of calls and backends before each test, as tests replace backends; a test may call it again."""

    def forget() -> None:
        prepared, choice = (sys.modules.get(f"contrastile.{name}") for name in ("autograd.prepared", "backends.choice"))
        if prepared is not None:
            prepared.CALLS.prepared.clear()
        if choice is not None:
            for cached_function in (choice.explained, choice.unusable, choice.capability, choice.load):
                cached_function.cache_clear()

    forget()
    return forget


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Limit torch to one thread: a second thread makes problems this small slower."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def primitives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute small losses on the CPU with primitives, which give the same bits however they are called."""
    monkeypatch.setenv("CONTRASTILE_KEEP_MIB", "0")
