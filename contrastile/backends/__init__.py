"""Backends: implementations of the block contract, and how to find them.

``contract`` says what a backend is; ``arrays`` has the array operations that code above the backends needs;
``registry`` finds backends without importing them; each subpackage is one backend.
"""

from contrastile.backends.registry import available, load, names

__all__ = ["available", "load", "names"]
