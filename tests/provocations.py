"""The refused calls of ``contrastile/verify/calls.txt`` and their error messages, as in docs/reference/errors.md.

The messages do not depend on the packages that are installed.
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
# a call with each() is the second call of another one
_REFUSED = {title: [x for x in calls if x.error and "each(" not in x.text] for title, calls in CALLS.items()}
PROVOCATIONS = {title: calls for title, calls in _REFUSED.items() if calls}


def message(call: Call, library: str = "torch") -> str:
    """The message of the call's error. Other errors propagate; AssertionError if the call raises none."""
    assert call.error is not None
    # torch has deprecated some functions in these calls
    with _environment(call.without), warnings.catch_warnings(action="ignore"):
        try:
            call.evaluate(namespace(library, each=Each(99)))
        except call.error as error:
            if type(error) is call.error:
                return str(error)
            raise
    raise AssertionError(f"nothing raised by {call.line}")


@contextlib.contextmanager
def _environment(without: str) -> Iterator[None]:
    """While open, no other package provides backends, the package of this name is missing, and all others are there."""
    real_can_find, real_entry_points = registry._can_find, importlib.metadata.entry_points

    def can_find(name: str) -> bool:
        return name.partition(".")[0] != without if without else real_can_find(name)

    def entry_points(**selection: str) -> Any:
        return () if selection == {"group": registry.ENTRY_POINT_GROUP} else real_entry_points(**selection)

    registry.load.cache_clear()
    with (
        mock.patch.object(importlib.metadata, "entry_points", entry_points),
        mock.patch.object(registry, "_can_find", can_find),
    ):
        yield
    registry.load.cache_clear()
