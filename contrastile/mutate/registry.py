"""All mutants. Each is a patch of the package's source, listed in ``patches/COMPONENT.txt``.

A patch is written like this, below the ``==`` line that names its file in the package::

    == schedules/ring.py

    last-shard-skipped: a rank never sees its successor's shard
    - for step in range(n):
    + for step in range(max(1, n - 1)):
    checks: --case hot --dtype float32
    equivalent: why no check can see it
    device: cuda
    package: sentence_transformers

The text after ``-`` must occur exactly once in the file; it may begin and end anywhere in a line. The text after ``+``
replaces it. The last four lines are optional. ``checks`` below the ``==`` line are the default of all patches of the
file.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from contrastile.reporting import CannotRunError

PACKAGE = Path(__file__).parents[1]
PATCHES = Path(__file__).parent / "patches"

FACE = "front-door", "training", "integrations"
EXCHANGE = "exchange"
COMPONENTS = (*FACE, "schedule", EXCHANGE, "numpy", "torch", "triton", "cupy")
"""The code that has the defect: the public functions, the schedule of one process or of several ranks, or a backend."""

_BACKENDS = {"schedule": "numpy", EXCHANGE: "numpy", **dict.fromkeys(FACE, "torch")}
"""The backend with which verify runs a component that is not a backend."""


class PatchError(CannotRunError):
    """A patch does not fit its source, or is malformed; the message says which, and the fix."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A known defect, from a patch in the format above; its name is "COMPONENT:DEFECT".

    Attributes:
        checks: arguments of ``contrastile verify`` that select the checks; none for all. Under Triton's interpreter,
            which takes a second for a small problem, ``run.INTERPRETED`` has the defaults.
        equivalent: why no check can catch it, if none can.
        device: the only kind of device on which it changes anything; "" for any.
        package: the package that the changed file imports besides those of the backends; "" for none.
    """

    name: str
    about: str
    file: str
    before: str
    after: str
    checks: tuple[str, ...] = ()
    equivalent: str | None = None
    device: str = ""
    package: str = ""

    @property
    def component(self) -> str:
        return self.name.partition(":")[0]

    @property
    def defect(self) -> str:
        return self.name.partition(":")[2]

    @property
    def backend(self) -> str:
        return _BACKENDS.get(self.component, self.component)

    def applied(self, package: Path = PACKAGE) -> str:
        """The file's text with the change.

        Raises:
            PatchError: the file does not hold ``before`` exactly once.
        """
        try:
            text = (package / self.file).read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        count = text.count(self.before)
        if count != 1:
            raise PatchError(f"{self.file} must hold {self.before!r} once, found it {count} times; update the patch")
        return text.replace(self.before, self.after)


def every() -> Iterator[Mutant]:
    """All mutants, component by component.

    Raises:
        PatchError: a list of patches is malformed.
    """
    for component in COMPONENTS:
        yield from read(component, (PATCHES / f"{component}.txt").read_text(encoding="utf-8"))


def read(component: str, text: str) -> Iterator[Mutant]:
    """The mutants of a component's list.

    Raises:
        PatchError: it is malformed.
    """
    file = default_checks = ""
    for entry in filter(None, (paragraph.strip("\n") for paragraph in text.split("\n\n"))):
        if entry.startswith("== "):
            file, _, default_checks = entry.removeprefix("== ").partition("\nchecks: ")
            continue
        first, *lines = entry.splitlines()
        name, colon, about = first.partition(": ")
        changes: dict[str, list[str]] = {"-": [], "+": []}
        fields: dict[str, str] = {}
        for line in lines:
            if line[:1] in changes:
                changes[line[0]].append(line[2:])
                continue
            key, _, value = line.partition(": ")
            fields[key] = value
        if not (
            file and colon and all(changes.values()) and fields.keys() <= {"checks", "equivalent", "device", "package"}
        ):
            raise PatchError(f"a patch must be written as in contrastile/mutate/registry.py, got {entry!r}")
        before, after = ("\n".join(change) for change in changes.values())
        checks = tuple(shlex.split(fields.pop("checks", default_checks)))
        yield Mutant(f"{component}:{name}", about, file, before, after, checks, **fields)
