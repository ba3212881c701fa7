"""Compiled kernels on disk: in the user's cache folder, readable and writable by the user alone.

A cubin is code that will run with the user's rights, so nothing is loaded from a folder or a file that others own or
may write, and what is read is what was written: its digest is kept beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

VARIABLE = "CONTRASTILE_CACHE_DIR"
"""Environment variable that names another folder."""


def folder() -> Path:
    """Where compiled kernels are kept: $CONTRASTILE_CACHE_DIR, else ``contrastile`` in the user's cache folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "contrastile"


def _scratch() -> Path:
    """A folder of this process alone, for where the user's own cannot be used; it goes with the process."""
    if not _held:
        _held.append(tempfile.TemporaryDirectory(prefix="contrastile-"))
    return Path(_held[0].name)


_held: list[tempfile.TemporaryDirectory[str]] = []


def load(key: str) -> tuple[Path, str] | None:
    """The cubin's path and its kernel's name in it; None where there is none that can be trusted."""
    for place in (folder(), *(Path(held.name) for held in _held)):
        cubin, note = _names(place, key)
        try:
            if not all(_private(path) for path in (place, cubin, note)):
                continue
            said = json.loads(note.read_text(encoding="utf-8"))
            if hashlib.sha256(cubin.read_bytes()).hexdigest() == said["sha256"]:
                return cubin, str(said["kernel"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def store(key: str, cubin: bytes, kernel: str) -> Path:
    """Keep a cubin and the name of its kernel; the path it has from now on.

    Each file appears whole or not at all, so that several processes may do this at once.
    """
    note = json.dumps({"kernel": kernel, "sha256": hashlib.sha256(cubin).hexdigest()}).encode()
    place = _usable() or _scratch()
    for path, content in zip(_names(place, key), (cubin, note), strict=True):
        with tempfile.NamedTemporaryFile(dir=place, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    return _names(place, key)[0]


def _names(place: Path, key: str) -> tuple[Path, Path]:
    return place / f"{key}.cubin", place / f"{key}.json"


def _usable() -> Path | None:
    """The user's folder, made if it is not there; None where it cannot be written or others may write it."""
    place = folder()
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        return place if _private(place) and os.access(place, os.W_OK) else None
    except OSError:
        return None


def _private(path: Path) -> bool:
    """Whether the path is this user's and nobody else may write it."""
    if not hasattr(os, "getuid"):
        return path.exists()
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022
