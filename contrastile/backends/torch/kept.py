"""Kept exponentials: ``2^(x - r)`` of a small problem on the host, which the backward pass reuses.

The forward pass forms them against a shared reference r. Where the gradients' coefficients can use that reference,
G is one product with them; otherwise the logits are computed again.
"""

from __future__ import annotations

import torch

from contrastile.backends.contract import Options
from contrastile.backends.settings import kept_bytes

CPU_KEEP_MIB = 64
"""The default on a host: float32 exponentials of 4,096 rows and columns."""


def keeps(m: int, n: int, dtype: str, device: str, options: Options) -> int:
    """See ``contract.Backend``: all exponentials where they fit, else none.

    On another device the host would have to wait for r. A tile that the caller requests also bounds the memory in use.
    """
    if device != "cpu" or options.tile is not None:
        return 0
    itemsize = 8 if dtype == "float64" else 4
    return (m * n + 1) * itemsize if m * n * itemsize <= kept_bytes(options, CPU_KEEP_MIB) else 0


def kept_buffer(rows: torch.Tensor, columns: torch.Tensor, state: torch.dtype) -> torch.Tensor:
    """Memory for the exponentials of a block, tile after tile, and then the reference, 1-d: ``Statistics.kept``.

    Pairs that are not admitted and positives that an index names have 0 there. Pairs beyond a limit have their
    exponential. The reference is an integer that the state dtype holds exactly.
    """
    return rows.new_empty(rows.shape[0] * columns.shape[0] + 1, dtype=state)
