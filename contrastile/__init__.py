"""Contrastive losses at any batch size: exact, memory linear in the batch, verified against a float64 oracle.

``import contrastile`` is fast: the first call of a loss loads torch and the backends, and the first access loads the
subpackages ``backends``, ``comm``, ``nn``, ``oracle``, ``retrieval``, ``schedules``, ``training`` and ``verify``.
"""

import importlib
from typing import Any

from contrastile.evaluation import value_and_grad
from contrastile.losses import clip_loss, info_nce, nt_xent, sigmoid_loss, statistics, sup_con

__all__ = [
    "__version__",
    "clip_loss",
    "info_nce",
    "nt_xent",
    "sigmoid_loss",
    "statistics",
    "sup_con",
    "value_and_grad",
]
__version__ = "0.1.0"

_SUBPACKAGES = ("backends", "comm", "nn", "oracle", "retrieval", "schedules", "training", "verify")


def __getattr__(name: str) -> Any:
    if name in _SUBPACKAGES:
        return importlib.import_module(f"contrastile.{name}")
    raise AttributeError(f"module 'contrastile' has no attribute {name!r}")
