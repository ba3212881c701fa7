"""Finding backends: built in, registered by other packages, or named as ``module:attribute``.

Nothing is imported to find out what is available, and other people's code runs only when it is named.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from contrastile.backends.contract import CONTRACT, Backend, BackendUnavailableError

ENTRY_POINT_GROUP = "contrastile.backends"
INSTALL = "pip install 'contrastile[{}]'"
TORCH = "torch>=2.6"


@dataclass(frozen=True, slots=True)
class Known:
    """Where a backend lives and what it needs.

    Attributes:
        target: "module:attribute" of its Backend record.
        requires: import names of the packages that it needs; of one that may be too old "name>=version".
        install: the command that brings them.
    """

    target: str
    requires: tuple[str, ...] = ()
    install: str = ""

    def missing(self) -> str | None:
        """What is missing and the command that installs it, or None."""
        needed = [requirement.partition(">=") for requirement in self.requires]
        lacking = [name for name, _, _ in needed if not _is_there(name)]
        if lacking:
            return f"{' and '.join(lacking)} cannot be imported; run: {self.install}"
        for name, _, least in needed:
            found = installed_version(name) if least else None
            if found is not None and _numbers(found) < _numbers(least):
                return f"{name} must be {least} or newer, got {found}; run: {self.install}"
        return None


def _is_there(name: str) -> bool:
    """Whether a module can be found; the package that holds it is searched, not imported."""
    package, _, inner = name.partition(".")
    found = importlib.util.find_spec(package)
    if found is None or not inner:
        return found is not None
    return importlib.machinery.PathFinder.find_spec(inner, found.submodule_search_locations) is not None


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where none of this name is installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> list[int]:
    """Of a version's first two parts: [2, 6] for "2.6.0a0+git"."""
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


BUILT_IN = {
    "numpy": Known("contrastile.backends.numpy:backend"),
    "torch": Known("contrastile.backends.torch:backend", (TORCH,), INSTALL.format("torch")),
    "triton": Known("contrastile.backends.triton:backend", (TORCH, "triton>=3.5"), INSTALL.format("triton")),
    "cupy": Known(
        "contrastile.backends.cupy.record:backend",
        ("cupy", "cuda.bindings", "ml_dtypes"),
        INSTALL.format("cupy"),
    ),
}


def known() -> dict[str, Known]:
    """Every backend that is built in or registered under the entry-point group ``contrastile.backends``."""
    found = dict(BUILT_IN)
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        # a registered name never shadows a built-in one
        found.setdefault(point.name, Known(point.value))
    return found


def names() -> list[str]:
    """Names of all known backends, available or not."""
    return list(known())


def available() -> dict[str, str | None]:
    """For each known backend, None if it can be loaded here, else what is missing and the command that installs it."""
    return {name: entry.missing() for name, entry in known().items()}


def require(what: str, package: str) -> None:
    """Raise BackendUnavailableError unless a package that ``what`` needs can be found; its extra has its name."""
    missing = Known("", (package,), INSTALL.format(package)).missing()
    if missing:
        raise BackendUnavailableError(f"{what} is not available: {missing}")


def checked(name: Any) -> str:
    """The name of a backend; raise TypeError if it is no string. ``load`` checks whether it is known."""
    if not isinstance(name, str):
        raise TypeError(f"backend must be a string, got {type(name).__name__}; pass e.g. backend='torch', or 'auto'")
    return name


@cache
def load(name: str) -> Backend:
    """The backend of this name.

    Args:
        name: a known name ("numpy", "torch", ...), or "module:attribute" of a Backend record.

    Raises:
        ValueError: no backend has this name.
        BackendUnavailableError: what it needs cannot be imported.
        TypeError: what the name leads to is not a Backend, or one for another contract, or the name is no string.
    """
    backends = known()
    entry = backends.get(checked(name))
    if entry is None and name.partition(":")[0] and ":" in name and not name.startswith("."):
        entry = Known(name)
    if entry is None:
        raise ValueError(
            f"backend must be one of {', '.join(backends)}, 'auto' or 'module:attribute', got {name!r}; "
            "contrastile doctor says what can run here"
        )
    missing = entry.missing()
    module, _, attribute = entry.target.partition(":")
    try:
        backend = getattr(importlib.import_module(module), attribute or "backend", None)
    except (ImportError, OSError) as error:
        if isinstance(error, BackendUnavailableError) and not missing:
            raise
        raise BackendUnavailableError(f"backend {name!r} is not available: {missing or _why(error, entry)}") from error
    if not isinstance(backend, Backend):
        raise TypeError(
            f"backend {name!r} must be a contrastile.backends.contract.Backend, got {type(backend).__name__}; "
            f"name it as module:attribute"
        )
    if backend.contract != CONTRACT:
        raise TypeError(
            f"backend {name!r} must be written for contract={CONTRACT}, got {backend.contract}; "
            "docs/how-to/write-backend.md says what has changed"
        )
    if missing:
        raise BackendUnavailableError(f"backend {name!r} is not available: {missing}")
    return backend


def _why(error: Exception, entry: Known) -> str:
    """Why something that is installed does not load, and what may help."""
    if isinstance(error, ModuleNotFoundError):
        spelling = "check the spelling, or put its folder on PYTHONPATH"
        return f"{error}; {f'run: {entry.install}' if entry.install else spelling}"
    # one line: CuPy puts a frame around its own
    said = " ".join(str(error).split())
    again = f", or run: {entry.install} --force-reinstall" if entry.install else ""
    return f"it is installed, but cannot be imported ({said}); see that it fits this machine and its driver{again}"
