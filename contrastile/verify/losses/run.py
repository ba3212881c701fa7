"""Runs the cases of losses and yields one row for each case and property."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from contrastile.reporting import ProgressCallback
from contrastile.verify.comparison import Checks
from contrastile.verify.losses import cases, ranks
from contrastile.verify.losses.cases import BATCHES, MEMORY
from contrastile.verify.losses.claims import Claims
from contrastile.verify.losses.properties import PROPERTIES, LossProperty, LossTrial
from contrastile.verify.losses.subject import Loss
from contrastile.verify.memory import one_thread
from contrastile.verify.runner import DTYPES, Failure, Row, silent_worst_of

UNCLAIMED = "unclaimed"
"""The status of what is not tested because the loss does not claim it."""


@dataclass(frozen=True, slots=True)
class LossSelection:
    """What to run.

    Attributes:
        losses: in their order.
        cases: names; None for all.
        properties: names; None for all.
        dtypes: of the features; those that a loss does not claim are listed once.
        device: kind of device.
    """

    losses: Sequence[Loss]
    cases: Sequence[str] | None = None
    properties: Sequence[str] | None = None
    dtypes: Sequence[str] = DTYPES
    device: str = "cpu"

    def command(self, check: LossCheck) -> str:
        """The command that runs one check again."""
        words = ["contrastile", "verify", "--loss", check.loss.name, "--objective", check.loss.claims.objective]
        words += ["--dtype", check.dtype, "--property", check.property, "--case", check.case]
        words += [] if self.device == "cpu" else ["--device", self.device]
        return shlex.join(words)

    def checks(self) -> Iterator[LossCheck]:
        """All checks, in a fixed order."""
        for loss in self.losses:
            if self.device not in loss.claims.devices:
                yield _unclaimed(loss, f"the device {self.device}", "all")
                continue
            for dtype in self.dtypes:
                if dtype not in loss.claims.dtypes:
                    yield _unclaimed(loss, f"{dtype} features", dtype)
                    continue
                yield from self._of_dtype(loss, dtype)
            yield from self._of_ranks(loss)

    def _of_dtype(self, loss: Loss, dtype: str) -> Iterator[LossCheck]:
        chosen = [each for name, each in PROPERTIES.items() if self.properties is None or name in self.properties]
        for each in chosen:
            missing = each.claim(loss.claims)
            if missing:
                yield _unclaimed(loss, missing, dtype, each.name)
        held = [each for each in chosen if not each.claim(loss.claims)]
        for name in [*BATCHES, MEMORY]:
            own = [each for each in held if cases.concerns(name, each.name, each.case, loss.claims.objective)]
            if not own or (self.cases is not None and name not in self.cases):
                continue
            try:
                cases.build(name, dtype, loss.claims)
            except ValueError as missing:
                yield _unclaimed(loss, str(missing), dtype, case=name)
                continue
            for each in own:
                held_by = partial(_held, each, loss, name, dtype, self.device)
                yield LossCheck(loss, each.name, name, dtype, held_by, device=self.device)

    def _of_ranks(self, loss: Loss) -> Iterator[LossCheck]:
        names = [name for name in ranks.SHARDS if self.cases is None or name in self.cases]
        chosen = [name for name in ranks.DISTRIBUTED if self.properties is None or name in self.properties]
        if not (names and chosen) or self.device != "cpu":
            return
        missing = ranks.missing(loss.claims)
        if missing:
            yield _unclaimed(loss, missing, "all", case="shards")
            return
        dtype, world = ranks.dtype_of(loss.claims), ranks.World(loss)
        if dtype not in self.dtypes:
            return
        for size in loss.claims.ranks:
            for case in names:
                try:
                    ranks.shared(case, loss.claims, size)
                except ValueError as reason:
                    yield _unclaimed(loss, str(reason), dtype, case=case, world=size)
                    continue
                for name in chosen:
                    what = PROPERTIES[name.removeprefix("ddp-")].claim(loss.claims)
                    if what:
                        yield _unclaimed(loss, what, dtype, name, case, size)
                        continue
                    check = partial(world.check, case, size, ranks.DISTRIBUTED[name][0])
                    yield LossCheck(loss, name, case, dtype, check, world=size)


@dataclass(frozen=True, slots=True)
class LossCheck:
    """One check, which yields one row.

    Attributes:
        loss: the loss under test.
        property: the property's name.
        case: the case's name.
        dtype: the features'.
        check: makes the comparisons; None for what is not claimed.
        reason: what is not claimed.
        world: the number of ranks.
        device: kind of device.
    """

    loss: Loss
    property: str
    case: str
    dtype: str
    check: Callable[[], Checks] | None = None
    reason: str = ""
    world: int = 1
    device: str = "cpu"

    def row(self, status: str, ratio: float | None = None, reason: str = "", excess: float | None = None) -> Row:
        return Row(
            backend=self.loss.name,
            property=self.property,
            case=self.case,
            dtype=self.dtype,
            device=self.device,
            world=self.world,
            ratio=ratio,
            excess=excess,
            status=status,
            reason=reason,
        )


def _unclaimed(loss: Loss, what: str, dtype: str, name: str = "all", case: str = "all", world: int = 1) -> LossCheck:
    return LossCheck(loss, name, case, dtype, None, what, world)


@lru_cache(maxsize=1)
def _trial(loss: Loss, name: str, dtype: str, device: str) -> LossTrial:
    """The trial of the checks that follow one another; the next case takes its place."""
    return LossTrial(loss, cases.build(name, dtype, loss.claims), device)


def _held(each: LossProperty, loss: Loss, name: str, dtype: str, device: str) -> Checks:
    with one_thread(loss.arrays, device == "cpu"):
        yield from each.check(_trial(loss, name, dtype, device))


@dataclass(slots=True)
class LossRun:
    """A run in progress: iterate over ``rows`` once; ``failures`` fills as it goes. See ``runner.Run``."""

    selection: LossSelection
    progress: ProgressCallback = lambda done, total, what: None
    failures: list[Failure] = field(default_factory=list)
    begin: Callable[[int, int, Row, str], None] = lambda number, total, row, command: None
    printed: Callable[[], str] = str
    start: int = 0
    excluded: Mapping[str, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(1 for _ in self.selection.checks())

    def rows(self) -> Iterator[Row]:
        for _, row in self.numbered():
            yield row

    def numbered(self) -> Iterator[tuple[int, Row]]:
        total = self.total
        for number, check in enumerate(self.selection.checks()):
            if number < self.start:
                continue
            row = self._row(number, total, check)
            self.progress(number + 1, total, f"{row['backend']} {row['dtype']} {row['case']} {row['property']}")
            yield number, row

    def _row(self, number: int, total: int, check: LossCheck) -> Row:
        if check.check is None:
            return check.row(UNCLAIMED, reason=check.reason)
        if check.loss.name in self.excluded:
            return check.row("untested", reason=self.excluded[check.loss.name])
        command = self.selection.command(check)
        self.begin(number, total, check.row("untested", reason="the check did not return"), command)
        found = silent_worst_of(check.check, self.printed)
        ratio, excess = (found.worst.ratio, found.excess) if found.status in ("pass", "fail") else (None, None)
        if found.status != "fail":
            return check.row(found.status, ratio, found.reason, excess)
        failed = check.row("fail", ratio, ": ".join(filter(None, (found.label, str(found.worst)))), excess)
        self.failures.append(Failure(failed, found.worst, found.label, command))
        return failed


def check(loss: Any, claims: Claims | Mapping[str, Any] | None = None, **chosen: Any) -> Iterator[Row]:
    """Run the cases on a loss, in this process, and yield a row for each case and property.

    Args:
        loss: see ``Loss.of``.
        claims: see ``Loss.of``.
        **chosen: ``cases``, ``properties``, ``dtypes``, ``device``: see ``LossSelection``.

    Returns:
        Rows as of ``contrastile verify``: ``backend`` is the loss's name, ``ratio`` the largest error over its bound,
        and ``status`` "pass", "fail", "skip" (the property does not apply), "untested", or "unclaimed", whose
        ``reason`` says what is not claimed.

    Raises:
        CannotRunError, TypeError, ValueError: see ``Loss.of``.
    """
    return LossRun(LossSelection([Loss.of(loss, claims)], **chosen)).rows()
