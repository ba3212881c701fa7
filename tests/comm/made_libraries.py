"""A library of CUDA's that is made up: it notes what is passed, and its calls succeed unless told not to."""

from __future__ import annotations

from typing import Any


class Call:
    """One function of the library."""

    def __init__(self, library: Made, name: str) -> None:
        self.library, self.name = library, name

    def __call__(self, *arguments: Any) -> Any:
        given = [getattr(x, "value", x) for x in arguments]
        self.library.calls.append((self.name, given))
        if self.name == "ncclGetErrorString":
            return b"unhandled system error"
        if self.name == "cuStreamIsCapturing":
            arguments[1]._obj.value = int(self.library.capturing)
        if self.name == "cuEventCreate":
            self.library.events += 1
            arguments[0]._obj.value = self.library.events
        return self.library.codes.get(self.name, 0)


class Made:
    """CUDA's driver and NCCL in one; every call succeeds, but for those that are told not to."""

    def __init__(self, lacks: str = "", capturing: bool = False, **codes: int) -> None:
        self.lacks, self.capturing, self.codes, self.events = lacks, capturing, codes, 100
        self.calls: list[tuple[str, list[Any]]] = []
        self.made: dict[str, Call] = {}

    def __getattr__(self, name: str) -> Call:
        if name == self.lacks:
            raise AttributeError(name)
        return self.made.setdefault(name, Call(self, name))

    def named(self, *names: str) -> list[str]:
        """These calls, in their order."""
        return [name for name, _ in self.calls if name in names]
