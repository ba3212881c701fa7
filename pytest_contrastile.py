"""A pytest plugin: the checks of ``pytest --pyargs contrastile.verify``, and of losses that a conftest.py names.

``docs/how-to/verify.md`` and ``docs/how-to/verify-loss.md`` show how. pytest loads every installed plugin in every
project, so this module stands outside of the package, which it imports only where its checks are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from contrastile.verify.plugin import LossFile


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """The options of the checks and their collector, where an argument names the package."""
    if "contrastile.verify" in args:
        early_config.pluginmanager.import_plugin("contrastile.verify.plugin")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> LossFile | None:
    """The tests of the losses in a conftest.py's ``contrastile_losses``."""
    if file_path.name != "conftest.py":
        return None
    for module in parent.config.pluginmanager.get_plugins():
        if getattr(module, "__file__", None) == str(file_path) and hasattr(module, "contrastile_losses"):
            from contrastile.verify import plugin

            # it runs its own items
            if not parent.config.pluginmanager.is_registered(plugin):
                parent.config.pluginmanager.register(plugin)
            return plugin.LossFile.from_parent(parent, path=file_path, module=module)
    return None
