"""The cupy backend: CUDA C++ kernels compiled for the GPU at hand, on CuPy arrays, with no torch.

``lse`` reads X once for both directions; ``gradients`` recomputes it chunk by chunk into a fixed workspace and leaves
the two products to cuBLAS. The kernels are in ``cuda/``: Hopper's own, and others for sm_80 and newer. ``backend``
takes what is best for the GPU, ``ampere`` the sm_80 kernels anywhere, ``workspace_2048`` (any number of MiB) has a
workspace of that size, and ``keeping_2048`` keeps up to that much of the forward pass's exponentials for the backward
where it can. CuPy is not imported before one is asked for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from contrastile.backends.contract import BackendUnavailableError

if TYPE_CHECKING:
    from contrastile.backends.cupy.record import ampere as ampere
    from contrastile.backends.cupy.record import backend as backend

INSTALL = "pip install 'contrastile[cupy]'"


def __getattr__(name: str) -> Any:
    sized = re.fullmatch(r"(workspace|keeping)_([1-9]\d{0,6})", name)
    if name not in ("backend", "ampere") and sized is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from contrastile.backends.cupy import record
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(f"backend 'cupy' is not available: {error}; run: {INSTALL}") from error
    if sized is None:
        return getattr(record, name)
    return (record.roomy if sized[1] == "workspace" else record.keeping)(int(sized[2]))
