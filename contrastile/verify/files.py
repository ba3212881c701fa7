"""Files that a command will write when its work is done: asked about before the work begins."""

from __future__ import annotations

from pathlib import Path


def why_not_writable(*paths: Path | None) -> str | None:
    """Why one of some files cannot be written, or None. All are left as they are; None is no file."""
    for path in paths:
        if path is None:
            continue
        try:
            there = path.exists()
            if there and not path.is_file() and not path.is_dir():
                # a pipe: whoever reads it would take the opening and closing for all there is
                continue
            with path.open("ab"):
                pass
            if not there:
                path.unlink()
        except OSError as error:
            return f"cannot write {path}: {error.strerror}"
    return None
