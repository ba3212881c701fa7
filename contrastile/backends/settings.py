"""Settings, from a call's options, else environment variables, else defaults: sizes in MiB, and graphs."""

from __future__ import annotations

import os

from contrastile.backends.contract import Options

WORKSPACE, KEEP = "CONTRASTILE_WORKSPACE_MIB", "CONTRASTILE_KEEP_MIB"
CUPY_KERNELS, GRAPHS = "CONTRASTILE_CUPY_KERNELS", "CONTRASTILE_GRAPHS"
VARIABLES = WORKSPACE, KEEP, CUPY_KERNELS
"""The environment variables that a backend reads in each call."""

WORKSPACE_MIB = 512
"""The default workspace for G."""

WORK, FEATURES = 1 << 38, 1 << 26
"""Largest problem that is replayed from CUDA graphs: rows x columns x width, and elements of its features."""


def fits(m: int, columns: int, d: int) -> bool:
    """Whether a problem of m rows and so many columns of width d is small enough to be replayed."""
    return 0 < m * columns * d <= WORK and (m + columns) * d <= FEATURES


def workspace_bytes(options: Options) -> int:
    """Bytes of the workspace for G.

    Raises:
        ValueError: see ``mebibytes``.
    """
    return mebibytes(WORKSPACE, WORKSPACE_MIB) if options.workspace is None else options.workspace * 2**20


def kept_bytes(options: Options, default: int = 0) -> int:
    """Most bytes of exponentials that are kept for a backward pass; ``default`` is in MiB.

    Raises:
        ValueError: see ``mebibytes``.
    """
    return mebibytes(KEEP, default) if options.keep is None else options.keep * 2**20


def is_keep_given(options: Options) -> bool:
    """Whether the call or the environment sets how much is kept."""
    return options.keep is not None or KEEP in os.environ


def check() -> None:
    """Raise ValueError for an environment variable that is invalid: see ``mebibytes`` and ``are_graphs_on``."""
    for variable in (WORKSPACE, KEEP):
        mebibytes(variable, 0)
    are_graphs_on()


def are_graphs_on() -> bool:
    """Whether small calls may be replayed from CUDA graphs.

    Raises:
        ValueError: the environment says neither 0 nor 1.
    """
    value = os.environ.get(GRAPHS, "1")
    if value not in ("0", "1"):
        raise ValueError(f"{GRAPHS} must be 0 or 1, got {value!r}; set {GRAPHS}=0, or leave it unset for graphs")
    return value == "1"


def mebibytes(variable: str, default: int) -> int:
    """Bytes, from an environment variable that counts MiB.

    Args:
        variable: its name.
        default: MiB where it is not set.

    Raises:
        ValueError: it is not a whole number, or below 0.
    """
    value = os.environ.get(variable)
    if value is None:
        return default * 2**20
    if not (value.strip().isascii() and value.strip().isdigit()):
        raise ValueError(
            f"{variable} must be a whole number of MiB, 0 or more, got {value!r}; set e.g. {variable}=2048"
        )
    return int(value) * 2**20
