"""The Backend record for the GPU at hand."""

from __future__ import annotations

from functools import partial

import cupy

from contrastile.backends.contract import Accuracy, Backend, BackendUnavailableError, Footprint, Options
from contrastile.backends.cupy.arrays import ARRAYS
from contrastile.backends.cupy.backward_pass import finished, finished_columns, gradients
from contrastile.backends.cupy.build import nvrtc_version
from contrastile.backends.cupy.configs import footprint, kernel_family, narrow, uses_hopper_kernels
from contrastile.backends.cupy.forward_pass import lse
from contrastile.backends.cupy.instances import ARITHMETICS, ELEMENTS, KEPT_DTYPE
from contrastile.backends.cupy.keeping import most_rows, size_of
from contrastile.backends.cupy.launch import capability
from contrastile.backends.cupy.sigmoid_pass import sigmoid_loss
from contrastile.backends.passes import own_references, supports
from contrastile.backends.settings import is_keep_given, kept_bytes


def require_gpu() -> None:
    """Raise BackendUnavailableError where CuPy cannot reach a GPU of compute capability 8.0 at least."""
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        reason = "" if count else "CuPy finds no NVIDIA GPU"
        if count and int(cupy.cuda.Device(0).compute_capability) < 80:
            reason = "the GPU's compute capability must be 8.0 or more"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        reason = f"CuPy reaches no NVIDIA GPU ({error})"
    if reason:
        # no command can install what is missing: CuPy is installed
        raise BackendUnavailableError(
            f"backend 'cupy' is not available: {reason}; use a machine with such a GPU and its driver"
        )


def require_nvrtc() -> None:
    """Raise ImportError where NVRTC cannot be loaded: the cache finds every cubin by NVRTC's version."""
    try:
        nvrtc_version()
    except RuntimeError as error:
        raise ImportError(f"NVRTC cannot be loaded: {error}") from error


def accuracy(dtype: str, device: str, options: Options = Options()) -> Accuracy:  # noqa: B008 (frozen)
    """Tensor cores truncate as they add (2^-23); G is rounded to the features' dtype before the second products.

    float16: G carries a power of two that puts the largest weight above 2^12 / (1 + largest target), so entries below
    float16's subnormals are less than 2^-32 of that weight for targets up to 31. A lane adds at most 48 numbers of a
    tile in float32, and shuffles two more; tiles are added in float64.

    float32: tf32 rounds the features to nearest only in the tile kernels: the second products are in float32.

    bfloat16, where exponentials may be kept: kept exponentials are rounded once, and G, their product with the factors,
    is rounded again, ``(1 + 2^-8)^2 - 1`` together.
    """
    may_keep = dtype == KEPT_DTYPE and uses_hopper_kernels() and (not is_keep_given(options) or kept_bytes(options) > 0)
    precision = options.precision
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-7 + 2.0**-16 if may_keep else 2.0**-8}.get(dtype, 0.0)
    is_exact = dtype == "float32" and precision == "ieee"
    return Accuracy(
        unit=2.0**-24,
        accumulate_unit=2.0**-24 if is_exact else 2.0**-23,
        input_rounding=2.0**-11 if dtype == "float32" and precision == "tf32" else 0.0,
        gradient_rounding=rounding,
        gradient_underflow=2.0**-32 if dtype == "float16" else 0.0,
        shared_reference=not own_references(dtype),
        tile=lambda size: min(size, 64),
    )


def _footprint(m: int, n: int, width: int, dtype: str, device: str, options: Options) -> Footprint:
    """See ``contract.Backend``: the footprint on the current GPU."""
    return footprint(m, n, width, dtype, capability(cupy.cuda.get_device_id()), options)


def _keeps(m: int, n: int, dtype: str, device: str, options: Options) -> int:
    """See ``contract.Backend``: for features that are not narrow, on Hopper. See ``keeping.rows_to_keep``."""
    return size_of(most_rows(m, n, dtype, options), n)


def _rows_alone(width: int, dtype: str, options: Options) -> bool:
    """See ``contract.Backend``: true for narrow features on Hopper."""
    family = kernel_family(dtype, capability(cupy.cuda.get_device_id()), hopper=uses_hopper_kernels())
    return options.tile is None and narrow(width, family)


def _guides() -> frozenset[str]:
    """The dtypes of features whose tile kernels are Hopper's own."""
    current = capability(cupy.cuda.get_device_id())
    return frozenset(dtype for dtype in ELEMENTS if kernel_family(dtype, current, hopper=uses_hopper_kernels()).maps)


require_gpu()
require_nvrtc()
backend = Backend(
    name="cupy",
    arrays=ARRAYS,
    dtypes=frozenset({"float16", "bfloat16", "float32"}),
    devices=frozenset({"cuda"}),
    accuracy=accuracy,
    lse=lse,
    gradients=gradients,
    sigmoid=sigmoid_loss,
    supports=supports,
    precisions=frozenset(ARITHMETICS),
    finished=finished,
    finished_columns=finished_columns,
    keeping=partial(lse, keep=True),
    keeps=_keeps,
    rows_alone=_rows_alone,
    replayable=True,
    footprint=_footprint,
    limits=True,
    values=True,
    guides=_guides(),
    contract=2,
)
