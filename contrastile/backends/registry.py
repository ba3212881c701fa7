"""Finding backends: built in, registered by other packages, or named as ``module:attribute``.

Listing backends imports none of them, and the code of other packages runs only when a caller names their backend.
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
        requires: import names of the packages that it needs; "name>=version" where a package may be too old.
        install: the command that installs them.
    """

    target: str
    requires: tuple[str, ...] = ()
    install: str = ""

    def missing(self) -> str | None:
        """What is missing and the command that installs it, or None."""
        needed = [requirement.partition(">=") for requirement in self.requires]
        missing = [name for name, _, _ in needed if not _can_find(name)]
        if missing:
            return f"{' and '.join(missing)} cannot be imported; run: {self.install}"
        for name, _, minimum in needed:
            version = installed_version(name) if minimum else None
            if version is not None and _release(version) < _release(minimum):
                return f"{name} must be {minimum} or newer, got {version}; run: {self.install}"
        return None


def _can_find(name: str) -> bool:
    """Whether a module can be found; its package is searched, not imported."""
    package, _, inner = name.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not inner:
        return spec is not None
    return importlib.machinery.PathFinder.find_spec(inner, spec.submodule_search_locations) is not None


def installed_version(name: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> list[int]:
    """The first two numbers of a version: [2, 6] for "2.6.0a0+git"."""
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
    backends = dict(BUILT_IN)
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        # a registered name never shadows a built-in one
        backends.setdefault(entry_point.name, Known(entry_point.value))
    return backends


def names() -> list[str]:
    """Names of all known backends, available or not."""
    return list(known())


def available() -> dict[str, str | None]:
    """For each known backend, None if it can be loaded here, else what is missing and the command that installs it."""
    return {name: entry.missing() for name, entry in known().items()}


def require(what: str, package: str) -> None:
    """Raise BackendUnavailableError unless the package that ``what`` needs can be found; its extra has its name."""
    missing = Known("", (package,), INSTALL.format(package)).missing()
    if missing:
        raise BackendUnavailableError(f"{what} is not available: {missing}")


def checked(name: Any) -> str:
    """The name of a backend; raise TypeError if it is not a string. ``load`` checks whether it is known."""
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
        BackendUnavailableError: a package that it needs cannot be imported.
        TypeError: the named object is not a Backend, or one for another contract, or the name is not a string.
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
    """Why an installed backend does not load, and what may help."""
    if isinstance(error, ModuleNotFoundError):
        spelling = "check the spelling, or put its folder on PYTHONPATH"
        return f"{error}; {f'run: {entry.install}' if entry.install else spelling}"
    # one line, because CuPy puts a frame around its messages
    text = " ".join(str(error).split())
    retry = f", or run: {entry.install} --force-reinstall" if entry.install else ""
    return f"it is installed, but cannot be imported ({text}); see that it fits this machine and its driver{retry}"
