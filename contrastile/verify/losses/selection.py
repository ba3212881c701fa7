"""The checks of losses: one for each case and property, and one for each thing that is not claimed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from contrastile.verify.comparison import Comparisons
from contrastile.verify.execution import DTYPES, one_thread
from contrastile.verify.losses import cases, ranks
from contrastile.verify.losses.calling import PROPERTIES
from contrastile.verify.losses.cases import BATCHES, OWN
from contrastile.verify.losses.claims import Claims
from contrastile.verify.losses.properties import LossProperty, LossTrial
from contrastile.verify.losses.subject import Loss
from contrastile.verify.runner import Check, Row, Run

CASES = {**{name: each.about for name, each in BATCHES.items()}, **OWN, **ranks.SHARDS}
ABOUT = {name: each.about for name, each in PROPERTIES.items()}
ABOUT |= {name: about for name, (_, about) in ranks.DISTRIBUTED.items()}
"""The cases and the properties, and what they are."""


@dataclass(frozen=True, slots=True)
class LossSelection:
    """What to run, as ``options.OPTIONS`` says of each: iterating over it gives the checks.

    Dtypes that a loss does not claim are listed once.
    """

    losses: Sequence[Loss]
    cases: Sequence[str] | None = None
    properties: Sequence[str] | None = None
    dtypes: Sequence[str] = DTYPES
    device: str = "cpu"
    seed: int = 0

    def _check(
        self,
        loss: Loss,
        dtype: str,
        name: str = "all",
        case: str = "all",
        compare: Callable[[], Comparisons] | None = None,
        **more: Any,
    ) -> Check:
        given = {
            "loss": loss.name,
            "objective": loss.claims.objective,
            "dtype": dtype,
            "property": name,
            "device": None if self.device == "cpu" else self.device,
            "seed": self.seed or None,
        }
        return Check(loss.name, name, case, dtype, compare, given, **more)

    def __iter__(self) -> Iterator[Check]:
        for loss in self.losses:
            if self.device not in loss.claims.devices:
                yield self._check(loss, "all", reason=f"the device {self.device}")
                continue
            for dtype in self.dtypes:
                if dtype not in loss.claims.dtypes:
                    yield self._check(loss, dtype, reason=f"{dtype} features")
                    continue
                yield from self._of_dtype(loss, dtype)
            yield from self._of_ranks(loss)

    def _of_dtype(self, loss: Loss, dtype: str) -> Iterator[Check]:
        chosen = [each for name, each in PROPERTIES.items() if self.properties is None or name in self.properties]
        for each in chosen:
            missing = each.claim(loss.claims)
            if missing:
                yield self._check(loss, dtype, each.name, reason=missing)
        held = [each for each in chosen if not each.claim(loss.claims)]
        for name in [*BATCHES, *OWN]:
            own = [each for each in held if cases.concerns(name, each.name, each.case, loss.claims.objective)]
            if not own or (self.cases is not None and name not in self.cases):
                continue
            try:
                cases.build(name, dtype, loss.claims, loss.facts, self.seed)
            except ValueError as missing:
                yield self._check(loss, dtype, case=name, reason=str(missing))
                continue
            for each in own:
                held_by = partial(_held, each, loss, name, dtype, self.device, self.seed)
                yield self._check(loss, dtype, each.name, name, held_by, device=self.device)

    def _of_ranks(self, loss: Loss) -> Iterator[Check]:
        names = [name for name in ranks.SHARDS if self.cases is None or name in self.cases]
        chosen = [name for name in ranks.DISTRIBUTED if self.properties is None or name in self.properties]
        if not (names and chosen) or self.device != "cpu":
            return
        missing = ranks.missing(loss.claims)
        if missing:
            yield self._check(loss, "all", case="shards", reason=missing)
            return
        dtype = ranks.dtype_of(loss.claims)
        if dtype not in self.dtypes:
            return
        for size in loss.claims.ranks:
            for case in names:
                try:
                    ranks.shared(case, loss.claims, size)
                except ValueError as reason:
                    yield self._check(loss, dtype, case=case, reason=str(reason), world=size)
                    continue
                for name in chosen:
                    what = PROPERTIES[name.removeprefix("ddp-")].claim(loss.claims)
                    if what:
                        yield self._check(loss, dtype, name, case, reason=what, world=size)
                        continue
                    compare = partial(ranks.check, loss, case, size, ranks.DISTRIBUTED[name][0])
                    yield self._check(loss, dtype, name, case, compare, world=size)


@lru_cache(maxsize=1)
def _trial(loss: Loss, name: str, dtype: str, device: str, seed: int) -> LossTrial:
    """The trial of the checks that follow one another; the next case takes its place."""
    return LossTrial(loss, cases.build(name, dtype, loss.claims, loss.facts, seed), device)


def _held(each: LossProperty, loss: Loss, name: str, dtype: str, device: str, seed: int) -> Comparisons:
    with one_thread(loss.arrays, device == "cpu"):
        yield from each.check(_trial(loss, name, dtype, device, seed))


def check(loss: Any, claims: Claims | Mapping[str, Any] | None = None, **chosen: Any) -> Iterator[Row]:
    """Run the cases on a loss, in this process, and yield a row for each case and property.

    Args:
        loss: see ``Loss.of``.
        claims: see ``Loss.of``.
        **chosen: ``cases``, ``properties``, ``dtypes``, ``device``, ``seed``: see ``LossSelection``.

    Returns:
        Rows as of ``contrastile verify``: ``backend`` is the loss's name, ``ratio`` the largest error over its bound,
        and ``status`` "pass", "fail", "skip" (the property does not apply), "untested", or "unclaimed", whose
        ``reason`` says what is not claimed.

    Raises:
        CannotRunError, TypeError, ValueError: see ``Loss.of``.
    """
    return Run(LossSelection([Loss.of(loss, claims)], **chosen)).rows()
