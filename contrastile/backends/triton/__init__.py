"""The triton backend: fused tile kernels, Hopper first, Ampere and newer kept working.

``lse`` reads X once for both directions; ``gradients`` recomputes it chunk by chunk into a fixed workspace and leaves
the two products to cuBLAS. Kernels know no autograd, the host code knows no kernel's insides, and nothing waits for
the device. Under Triton's interpreter (TRITON_INTERPRET=1) the same kernels run on the CPU.
"""

from __future__ import annotations

from contrastile.backends.contract import Accuracy, Backend, Block
from contrastile.backends.triton.additive import sigmoid_loss
from contrastile.backends.triton.arrays import TritonArrays
from contrastile.backends.triton.configs import INTERPRETED
from contrastile.backends.triton.gradients import gradients
from contrastile.backends.triton.statistics import lse


def accuracy(dtype: str, device: str) -> Accuracy:
    """Tensor cores truncate as they add (2^-23); G is rounded to the features' dtype before the second products.

    float16: G carries a power of two that puts the largest weight above 2^12 / (1 + largest target), so what falls
    under its subnormals is less than 2^-32 of that weight for targets up to 31.
    """
    half = dtype in ("float16", "bfloat16")
    return Accuracy(
        unit=2.0**-24,
        accumulate_unit=2.0**-23 if half else 2.0**-24,
        gradient_rounding={"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 0.0),
        gradient_underflow=2.0**-32 if dtype == "float16" else 0.0,
        shared_reference=True,
        tile=lambda size: min(size, 16 if INTERPRETED else 64),
    )


def supports(block: Block) -> str | None:
    """What the kernels cannot do."""
    if block.rows.shape[1] == 0:
        return "features must have at least one column, got 0"
    return None


backend = Backend(
    name="triton",
    arrays=TritonArrays(),
    # the interpreter gets products of bfloat16 wrong
    dtypes=frozenset({"float16", "float32"} if INTERPRETED else {"float16", "bfloat16", "float32"}),
    devices=frozenset({"cpu"} if INTERPRETED else {"cuda"}),
    accuracy=accuracy,
    lse=lse,
    gradients=gradients,
    sigmoid=sigmoid_loss,
    supports=supports,
)
