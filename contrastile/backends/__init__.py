"""Backends: implementations of the block contract, and how to find them.

``contract`` says what a backend is; ``arrays`` is the small vocabulary that code above the backends shares;
``registry`` finds backends without importing them; each other module here is one backend and nothing else.
"""

from contrastile.backends.registry import available, load, names

__all__ = ["available", "load", "names"]
