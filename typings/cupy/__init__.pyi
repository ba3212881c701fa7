"""CuPy, where it is not installed: not the package's own backend of this name."""

from typing import Any

def __getattr__(name: str) -> Any: ...
