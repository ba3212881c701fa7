"""Compiled kernels on disk: in the user's cache folder, readable and writable by the user alone.

A cubin is code that will run with the user's rights. So nothing is loaded from a folder or a file that others own or
may write, and a digest beside each cubin verifies its bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

VARIABLE = "CONTRASTILE_CACHE_DIR"
"""The environment variable that names another folder."""


def folder() -> Path:
    """Where compiled kernels are kept: $CONTRASTILE_CACHE_DIR, else ``contrastile`` in the user's cache folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "contrastile"


def _scratch() -> Path:
    """A folder of this process, which replaces an unusable user's folder and is deleted with the process."""
    if not _held:
        _held.append(tempfile.TemporaryDirectory(prefix="contrastile-"))
    return Path(_held[0].name)


_held: list[tempfile.TemporaryDirectory[str]] = []


def load(key: str) -> tuple[Path, str] | None:
    """The cubin's path and its kernel's name; None where there is no trustworthy cubin."""
    for directory in (folder(), *(Path(held.name) for held in _held)):
        cubin, note = _paths(directory, key)
        try:
            if not all(_is_private(path) for path in (directory, cubin, note)):
                continue
            facts = json.loads(note.read_text(encoding="utf-8"))
            if hashlib.sha256(cubin.read_bytes()).hexdigest() == facts["sha256"]:
                return cubin, str(facts["kernel"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def store(key: str, cubin: bytes, kernel: str) -> Path:
    """Store a cubin and the name of its kernel, and return the cubin's path.

    Files are replaced atomically, so that several processes may store at once.
    """
    note = json.dumps({"kernel": kernel, "sha256": hashlib.sha256(cubin).hexdigest()}).encode()
    directory = _user_folder() or _scratch()
    for path, content in zip(_paths(directory, key), (cubin, note), strict=True):
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    return _paths(directory, key)[0]


def _paths(directory: Path, key: str) -> tuple[Path, Path]:
    return directory / f"{key}.cubin", directory / f"{key}.json"


def _user_folder() -> Path | None:
    """The user's folder, created if it does not exist; None where it is not writable or others may write it."""
    directory = folder()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory if _is_private(directory) and os.access(directory, os.W_OK) else None
    except OSError:
        return None


def _is_private(path: Path) -> bool:
    """Whether the path is this user's and nobody else may write it."""
    if not hasattr(os, "getuid"):
        return path.exists()
    status = path.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022
