"""The torch backend: tiles of logits through torch's own products, on any device, in any float dtype.

``products`` does the matrix products, ``tiles`` walks the block, ``pairs`` applies positives and masks to a tile,
``accumulators`` multiplies a tile's G; ``statistics``, ``gradients`` and ``sigmoid`` are the three primitives, and
``whole`` computes a whole small loss. On a CPU the tile stays in the cache and every epilogue is in place; on another
device nothing ever waits for the host.
"""

from __future__ import annotations

import torch

from contrastile.backends.arrays import TorchArrays
from contrastile.backends.contract import Accuracy, Backend, Options, Whole
from contrastile.backends.torch import gradients, sigmoid, statistics, whole
from contrastile.backends.torch.kept import keeps
from contrastile.backends.torch.products import has_mixed_product, product_rounding
from contrastile.backends.torch.tiles import footprint

__all__ = ["backend"]


def accuracy(dtype: str, device: str, options: Options | None = None) -> Accuracy:
    """The facts for the error bounds, under torch's current setting of matrix-product precision.

    Kept exponentials do not change them.
    """
    if dtype == "float64":
        return Accuracy(unit=2.0**-53, accumulate_unit=2.0**-53, shared_reference=device == "cpu")
    if device != "cpu" and dtype != "float32" and has_mixed_product():
        return Accuracy(
            unit=2.0**-24,
            accumulate_unit=2.0**-23,
            gradient_rounding=2.0**-8 if dtype == "bfloat16" else 2.0**-11,
            gradient_underflow=0.0 if dtype == "bfloat16" else 2.0**-36,
        )
    rounding = product_rounding(device)
    return Accuracy(
        unit=2.0**-24,
        accumulate_unit=2.0**-24 if rounding == 0.0 else 2.0**-23,
        # a feature of 16 bits loses nothing in tf32, but may in bfloat16
        input_rounding=rounding if dtype == "float32" or rounding > 2.0**-10 else 0.0,
        gradient_rounding=rounding,
        shared_reference=device == "cpu",
    )


_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
backend = Backend(
    name="torch",
    arrays=TorchArrays(torch),
    dtypes=_DTYPES,
    devices=frozenset({"cpu", "cuda"}),
    accuracy=accuracy,
    lse=statistics.lse,
    gradients=gradients.gradients,
    sigmoid=sigmoid.sigmoid,
    keeping=statistics.keeping,
    keeps=keeps,
    replayable=True,
    footprint=footprint,
    contract=2,
    compensated=True,
    limits=True,
    guides=_DTYPES,
    values=True,
    whole=Whole(whole.takes, whole.loss, whole.gradients),
)
