"""A pytest plugin: where a conftest.py names losses, each of their cases and properties is a test.

``docs/how-to/verify-loss.md`` shows how. pytest loads every installed plugin in every project, so this module
stands outside of the package, which it imports only where a conftest.py names losses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from contrastile.verify.losses.plugin import LossFile


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> LossFile | None:
    """The tests of the losses in a conftest.py's ``contrastile_losses``."""
    if file_path.name != "conftest.py":
        return None
    for module in parent.config.pluginmanager.get_plugins():
        if getattr(module, "__file__", None) == str(file_path) and hasattr(module, "contrastile_losses"):
            from contrastile.verify.losses.plugin import LossFile

            return LossFile.from_parent(parent, path=file_path, module=module)
    return None
