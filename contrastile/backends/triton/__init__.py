"""The triton backend: fused tile kernels, Hopper first, Ampere and newer kept working.

``lse`` forms the logits X once for both directions; ``gradients`` forms them again, chunk by chunk, turns them into G
in a fixed workspace, and leaves the two products to cuBLAS. Kernels know no autograd, the host code knows no kernel's
insides, and nothing waits for the device. Under Triton's interpreter (TRITON_INTERPRET=1) the kernels run on the CPU.
"""

from __future__ import annotations

from contrastile.backends.contract import PRECISIONS, Accuracy, Backend, Options, Search
from contrastile.backends.passes import own_references, supports
from contrastile.backends.triton.arrays import ARRAYS
from contrastile.backends.triton.backward_pass import finished, finished_columns, gradients
from contrastile.backends.triton.configs import INTERPRETED
from contrastile.backends.triton.forward_pass import lse
from contrastile.backends.triton.operands import footprint
from contrastile.backends.triton.search import most, nearest, own, ranks
from contrastile.backends.triton.sigmoid_pass import sigmoid_loss


def accuracy(dtype: str, device: str, options: Options = Options()) -> Accuracy:  # noqa: B008 (frozen)
    """Tensor cores truncate as they add (2^-23); G is rounded to the features' dtype before the second products.

    float16: G carries a power of two that puts the largest weight above 2^12 / (1 + largest target), so entries below
    float16's subnormals are less than 2^-32 of that weight for targets up to 31.
    float32 by "tf32": features are rounded to nearest (2^-11); G and the features have two parts, which round G to
    2^-17, and the omitted products are far smaller. By "split": three parts, which are exact, and six products that
    omit 2^-23.9; six sums are added to one, which lengthens the chain of additions.
    """
    precision = options.precision if dtype == "float32" else "ieee"
    tensor_cores = dtype in ("float16", "bfloat16") or precision != "ieee"
    return Accuracy(
        unit=2.0**-24,
        accumulate_unit=2.0**-23 if tensor_cores else 2.0**-24,
        input_rounding={"tf32": 2.0**-11, "split": 2.0**-24}.get(precision, 0.0),
        gradient_rounding={"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 2.0**-17 if precision == "tf32" else 0),
        gradient_underflow=2.0**-32 if dtype == "float16" else 0.0,
        shared_reference=not own_references(dtype),
        depth=int if precision == "ieee" else lambda terms: 3 * terms,
        tile=lambda size: min(size, 16 if INTERPRETED else 64),
    )


# the interpreter computes wrong products of bfloat16
_DTYPES = frozenset({"float16", "float32"} if INTERPRETED else {"float16", "bfloat16", "float32"})
backend = Backend(
    name="triton",
    arrays=ARRAYS,
    dtypes=_DTYPES,
    devices=frozenset({"cpu"} if INTERPRETED else {"cuda"}),
    accuracy=accuracy,
    lse=lse,
    gradients=gradients,
    sigmoid=sigmoid_loss,
    supports=supports,
    # without tensor cores the kernels would take twice cuBLAS's time
    precisions=frozenset(PRECISIONS if INTERPRETED else ("tf32", "split")),
    auto_precision="ieee" if INTERPRETED else "split",
    finished=finished,
    finished_columns=finished_columns,
    replayable=True,
    footprint=footprint,
    contract=2,
    limits=True,
    guides=_DTYPES,
    values=True,
    search=Search(own, ranks, nearest, most),
)
