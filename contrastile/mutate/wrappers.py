"""Defects at the level of the block contract: each wraps a correct backend, and any backend can be wrapped.

A wrapped backend is named ``contrastile.mutate.wrappers:DEFECT@BACKEND``.
"""

from __future__ import annotations

from contrastile.backends import registry
from contrastile.backends.contract import Backend
from contrastile.mutate import blocks, results
from contrastile.mutate.wrapping import WRAPPERS

__all__ = ["WRAPPERS", "blocks", "results"]


def __getattr__(name: str) -> Backend:
    """The backend that ``DEFECT@BACKEND`` names."""
    defect, at, backend = name.partition("@")
    if not at or defect not in WRAPPERS:
        raise AttributeError(name)
    return WRAPPERS[defect].plant(registry.load(backend))
