"""What every test starts from; read before any test file imports torch or Triton."""

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

# Triton fixes at its import whether kernels are interpreted; make test-gpu sets 0
os.environ.setdefault("TRITON_INTERPRET", "1")

# what is installed stays so, and each test that loads a backend asks for it: milliseconds of many small files
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)
importlib.metadata.version = cache(importlib.metadata.version)

# no test fails because the machine is busy
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")

# one process a core: threads that wait for each other on a busy machine cost more than small problems do
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", type=Path, metavar="FILE", help="write what tests/integrations/test_matrix.py measures"
    )


@pytest.fixture(autouse=True)
def forget_calls() -> Callable[[], None]:
    """Forgets every known call and backend, as before each test: it may have been another."""

    def forget() -> None:
        prepared, choice = (sys.modules.get(f"contrastile.{name}") for name in ("autograd.prepared", "backends.choice"))
        if prepared is not None:
            prepared.CALLS.prepared.clear()
        if choice is not None:
            for each in (choice.explained, choice.unusable, choice.capability, choice.load):
                each.cache_clear()

    forget()
    return forget


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Problems this small only wait for a second thread."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def primitives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small losses of torch on a host are of the primitives, whose bits all ways to call them have."""
    monkeypatch.setenv("CONTRASTILE_KEEP_MIB", "0")
