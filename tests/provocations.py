"""What is refused, from ``contrastile/verify/calls.txt``, and what the errors say: docs/reference/errors.md has them.

No package that is installed here shows in the messages.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed.tensor  # noqa: F401 - calls name it

from contrastile.backends import registry
from contrastile.verify.calls import TEXT, Call, Each, namespace, read

CALLS = read(TEXT.read_text(encoding="utf-8"))
# those with options are others' second calls
_REFUSED = {title: [x for x in calls if x.error and "each(" not in x.text] for title, calls in CALLS.items()}
PROVOCATIONS = {title: calls for title, calls in _REFUSED.items() if calls}


def message(call: Call, library: str = "torch") -> str:
    """The error's text. Other errors propagate; AssertionError if nothing is raised."""
    assert call.error is not None
    # torch has deprecated some functions in these calls
    with _world(call.without), warnings.catch_warnings(action="ignore"):
        try:
            call.evaluate(namespace(library, each=Each(99)))
        except call.error as error:
            if type(error) is call.error:
                return str(error)
            raise
    raise AssertionError(f"nothing raised by {call.line}")


@contextlib.contextmanager
def _world(without: str) -> Iterator[None]:
    """No backends of other packages, and no package of this name, but all others: what is installed must not show."""
    there, points = registry._can_find, importlib.metadata.entry_points

    def is_there(name: str) -> bool:
        return name.partition(".")[0] != without if without else there(name)

    def entry_points(**which: str) -> Any:
        return () if which == {"group": registry.ENTRY_POINT_GROUP} else points(**which)

    registry.load.cache_clear()
    with (
        mock.patch.object(importlib.metadata, "entry_points", entry_points),
        mock.patch.object(registry, "_can_find", is_there),
    ):
        yield
    registry.load.cache_clear()
