# pyright: reportAttributeAccessIssue=false
"""The GPUs that CuPy reaches."""

from __future__ import annotations


def gpus() -> list[tuple[str, int]]:
    """Name and bytes of memory of each GPU; none where there is no driver.

    Raises:
        ImportError: CuPy is not installed, or cannot be imported.
    """
    from cupy.cuda import runtime

    try:
        properties = [runtime.getDeviceProperties(i) for i in range(runtime.getDeviceCount())]
    except runtime.CUDARuntimeError:
        return []
    return [(device["name"].decode(), int(device["totalGlobalMem"])) for device in properties]
