"""Invalid input, call by call, read from provocations.txt: each expression must raise. The tests run them.

docs/reference/errors.md is made from them. In the text a title follows ``==``; an error stands above its calls, with
the array libraries to try and a package to hide while they run.
Expressions see ``contrastile``, ``torch``, ``np``, ``InProcessGroup``, ``distributed`` and, from one array library,
``image`` and ``text`` (6, 5), ``key`` (11, 5) and ``labels`` (6,).
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.metadata
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed.tensor

import contrastile
from contrastile.backends import registry
from contrastile.backends.contract import BackendUnavailableError, UnsupportedProblemError
from contrastile.comm.inprocess import InProcessGroup


@dataclass(frozen=True)
class Provocation:
    """An expression, the error it raises, the array libraries to try, and a package to hide while it runs."""

    call: str
    error: type[Exception]
    libraries: tuple[str, ...] = ("torch",)
    without: str = ""

    def message(self, library: str = "torch") -> str:
        """The error's text. Other errors propagate; AssertionError if nothing is raised."""
        # torch has deprecated some functions in these calls
        with _world(self.without), warnings.catch_warnings(action="ignore"):
            try:
                # the expressions are the ones in this file
                eval(self.call, namespace(library))
            except self.error as error:
                if type(error) is self.error:
                    return str(error)
                raise
        raise AssertionError(f"nothing raised by {self.call}")


def namespace(library: str) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    arrays = {
        name: rng.standard_normal((rows, 5)).astype("float32")
        for name, rows in (("image", 6), ("text", 6), ("key", 11))
    }
    arrays["labels"] = np.array([0, 1, 0, 2, 2, 7])
    if library == "torch":
        arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
    made = {"InProcessGroup": InProcessGroup, "distributed": distributed}
    return {"contrastile": contrastile, "torch": torch, "np": np, **made, **arrays}


def distributed(x: torch.Tensor) -> torch.Tensor:
    """A DTensor, on a mesh of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    made = torch.distributed.tensor.distribute_tensor(x, mesh, [torch.distributed.tensor.Shard(0)])
    torch.distributed.destroy_process_group()
    return made


@contextlib.contextmanager
def _world(without: str) -> Iterator[None]:
    """No backends of other packages, and no package of this name, but all others: what is installed must not show."""
    there, points = registry._is_there, importlib.metadata.entry_points

    def is_there(name: str) -> bool:
        return name.partition(".")[0] != without if without else there(name)

    def entry_points(**which: str) -> Any:
        return () if which == {"group": registry.ENTRY_POINT_GROUP} else points(**which)

    older = SimpleNamespace(backend=replace(registry.load("numpy"), contract=1))
    registry.load.cache_clear()
    with (
        mock.patch.object(importlib.metadata, "entry_points", entry_points),
        mock.patch.object(registry, "_is_there", is_there),
    ):
        # no copy of the table is put back: what is imported meanwhile stays
        sys.modules["written_before"] = older  # type: ignore[assignment]
        yield
        del sys.modules["written_before"]
    registry.load.cache_clear()


def read(text: str) -> dict[str, list[Provocation]]:
    """The provocations of a text by their titles."""
    known = {error.__name__: error for error in (BackendUnavailableError, UnsupportedProblemError)}
    found: dict[str, list[Provocation]] = {}
    title, raising = "", Provocation("", Exception)
    for line in filter(None, text.splitlines()):
        if line.startswith(" "):
            found[title].append(replace(raising, call=line.strip()))
        elif line.startswith("== "):
            title = line[3:]
            found[title] = []
        else:
            name, libraries, without = re.findall(r"^(\w+) \(([\w, ]+)(?:; without (\w+))?\)$", line)[0]
            error = known.get(name) or getattr(builtins, name)
            raising = Provocation("", error, tuple(libraries.split(", ")), without)
    return found


PROVOCATIONS = read(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
