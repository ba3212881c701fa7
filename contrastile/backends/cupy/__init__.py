"""The cupy backend: CUDA C++ kernels compiled for the GPU at hand, on CuPy arrays, with no torch.

``lse`` reads X once for both directions; ``gradients`` recomputes it chunk by chunk into a fixed workspace and leaves
the two products to cuBLAS. The kernels are in ``cuda/``: Hopper's own, and others for sm_80 and newer, which
CONTRASTILE_CUPY_KERNELS=sm80 has run on Hopper too. CuPy is not imported before ``backend`` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from contrastile.backends.contract import BackendUnavailableError

if TYPE_CHECKING:
    from contrastile.backends.cupy.record import backend as backend

INSTALL = "pip install 'contrastile[cupy]'"


def __getattr__(name: str) -> Any:
    if name != "backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from contrastile.backends.cupy import record
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(f"backend 'cupy' is not available: {error}; run: {INSTALL}") from error
    return record.backend
