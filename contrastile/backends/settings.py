"""What a call's options say, else environment variables, else the package's defaults: sizes in MiB, and graphs."""

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
"""Largest problem that is replayed from CUDA graphs: rows x columns x width, and numbers in its features."""


def fits(m: int, columns: int, d: int) -> bool:
    """Whether a problem of so many rows and columns of this width is small enough to be replayed."""
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
    """Whether somebody has said how much is kept: the call or the environment."""
    return options.keep is not None or KEEP in os.environ


def check() -> None:
    """Raise ValueError for a variable of the environment that no call could use: see what reads each."""
    for variable in (WORKSPACE, KEEP):
        mebibytes(variable, 0)
    are_graphs_on()


def are_graphs_on() -> bool:
    """Whether small calls may be replayed from CUDA graphs.

    Raises:
        ValueError: the environment says neither 0 nor 1.
    """
    given = os.environ.get(GRAPHS, "1")
    if given not in ("0", "1"):
        raise ValueError(f"{GRAPHS} must be 0 or 1, got {given!r}; set {GRAPHS}=0, or leave it unset for graphs")
    return given == "1"


def mebibytes(variable: str, default: int) -> int:
    """Bytes, from an environment variable that counts MiB.

    Args:
        variable: its name.
        default: MiB where it is not set.

    Raises:
        ValueError: it is not a whole number, or below 0.
    """
    given = os.environ.get(variable)
    if given is None:
        return default * 2**20
    if not (given.strip().isascii() and given.strip().isdigit()):
        raise ValueError(
            f"{variable} must be a whole number of MiB, 0 or more, got {given!r}; set e.g. {variable}=2048"
        )
    return int(given) * 2**20
