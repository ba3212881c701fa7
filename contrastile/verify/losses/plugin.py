"""The tests that ``pytest_contrastile`` collects: one for each case and property of the losses in a conftest.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from contrastile.verify.losses.selection import LossSelection
from contrastile.verify.losses.subject import Loss
from contrastile.verify.runner import Check, worst_of


@dataclass(slots=True)
class Skip:
    """A line of the author's file of skips.

    Attributes:
        pattern: of the tests' names, as of the shell.
        reason: why they are not run.
        place: file and line.
        used: whether a test has matched.
    """

    pattern: str
    reason: str
    place: str
    used: bool = False


def read_skips(path: Path) -> list[Skip]:
    """The lines ``PATTERN: REASON`` of a file; empty lines and those that start with # are left out.

    Raises:
        UsageError: there is no such file, or a line has no reason.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise pytest.UsageError(f"contrastile_skips: cannot read {path}: {error.strerror}") from error
    skips = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, colon, reason = line.partition(": ")
        if not (colon and reason.strip()):
            raise pytest.UsageError(f"{path}:{number}: must be PATTERN: REASON, got {line!r}")
        skips.append(Skip(pattern.strip(), reason.strip(), f"{path}:{number}"))
    return skips


class LossFile(pytest.File):
    """A conftest.py that names losses.

    ``contrastile_losses`` is a loss, a list of them, or a mapping of names to them: see ``Loss.of``.
    ``contrastile_skips``, if there is one, is the path of a file of skips, relative to the conftest.py: see
    ``read_skips``.
    """

    def __init__(self, *, module: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.module = module

    def collect(self) -> Iterator[pytest.Item]:
        """One test for each case and property, and one that is skipped for what is not claimed."""
        given = self.module.contrastile_losses
        path = getattr(self.module, "contrastile_skips", None)
        skips = [] if path is None else read_skips(self.path.parent / path)
        losses = [given] if isinstance(given, str) or callable(given) else given
        named = losses.items() if isinstance(losses, Mapping) else ((None, loss) for loss in losses)
        for name, target in named:
            loss = Loss.of(target)
            short = name or loss.name.rpartition(":")[2]
            for check in LossSelection([loss]).checks():
                words = [short, check.case, check.property, check.dtype]
                words += [f"{check.world}-ranks"] if check.world > 1 else []
                test = "/".join(words)
                reasons = [skip for skip in skips if fnmatchcase(test, skip.pattern)]
                for skip in reasons:
                    skip.used = True
                yield LossTest.from_parent(self, name=test, check=check, skip=reasons[0].reason if reasons else None)
        unused = [f"{skip.place}: {skip.pattern}" for skip in skips if not skip.used]
        if unused:
            raise self.CollectError("no test has a name that matches " + ", ".join(unused))


class LossTest(pytest.Item):
    """One case and property of a loss."""

    def __init__(self, *, check: Check, skip: str | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check, self.skip = check, skip

    def runtest(self) -> None:
        """Make the comparisons, or skip."""
        if self.skip is not None:
            pytest.skip(self.skip)
        if self.check.compare is None:
            pytest.skip(f"not claimed: {self.check.reason}")
        found = worst_of(self.check.compare)
        if found.status == "fail":
            raise LossError(found.said, found.worst.ratio)
        if found.status != "pass":
            pytest.skip(found.reason)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What is wrong, without a traceback of the harness."""
        if isinstance(excinfo.value, LossError):
            return f"{self.check.backend}, {self.check.property}: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Where the test is from."""
        return self.path, None, self.name


class LossError(AssertionError):
    """A loss is wrong."""

    def __init__(self, reason: str, ratio: float) -> None:
        super().__init__(f"{reason}\nerror / bound = {ratio:.3g}")
