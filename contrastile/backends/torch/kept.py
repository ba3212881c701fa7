"""Kept exponentials: ``2^(x - r)`` of a small problem on the host, which the backward pass need not compute again.

The forward pass has formed them against a shared reference r. Where the gradients' coefficients can use that reference,
G is one product with them; the logits of those that cannot are computed again.
"""

from __future__ import annotations

import torch

from contrastile.backends.contract import Options
from contrastile.backends.settings import kept_bytes

CPU_KEEP_MIB = 64
"""What is kept on a host where nobody says how much: float32 exponentials of 4,096 rows and columns."""


def keeps(m: int, n: int, dtype: str, device: str, options: Options) -> int:
    """See ``contract.Backend``: everything where it fits, else nothing.

    On another device the host would have to wait to learn r. A tile that the caller names caps what is alive at a time.
    """
    if device != "cpu" or options.tile is not None:
        return 0
    size = 8 if dtype == "float64" else 4
    return (m * n + 1) * size if m * n * size <= kept_bytes(options, CPU_KEEP_MIB) else 0


def room(rows: torch.Tensor, columns: torch.Tensor, state: torch.dtype) -> torch.Tensor:
    """Where the exponentials of a block go, tile after tile, and behind them the reference, 1-d: ``Statistics.kept``.

    Of a pair that is not admitted, and of a positive that an index names, there is 0; of one beyond a limit what it is.
    The reference is an integer, which the state dtype holds.
    """
    return rows.new_empty(rows.shape[0] * columns.shape[0] + 1, dtype=state)
