"""What the environment says: sizes in MiB, checked as arguments are."""

from __future__ import annotations

import os


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
