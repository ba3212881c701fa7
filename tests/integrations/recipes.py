"""The recipes of docs/how-to/integrations.md, as written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pages import defined, read, sections

SECTIONS = sections(read("docs/how-to/integrations.md"))


def recipe(section: str) -> dict[str, Any]:
    """What the Python blocks of a section define."""
    return defined(SECTIONS[section])


def by_lightning(module: Any, batches: list[Any], **settings: Any) -> None:
    """One step of Lightning's trainer on a CPU, without what it writes and prints."""
    import lightning

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, **dict.fromkeys(quiet, False), **settings)
    trainer.fit(module, Batches(batches))


class Batches:
    """Batches that a trainer takes as they are."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)
