"""The checks of losses: one for each case and property, and one for each missing claim."""

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
from contrastile.verify.process import exact_products
from contrastile.verify.runner import Check, Row, Run

CASES = {**{name: batch.about for name, batch in BATCHES.items()}, **OWN, **ranks.SHARDS}
ABOUT = {name: prop.about for name, prop in PROPERTIES.items()}
ABOUT |= {name: about for name, (_, about) in ranks.DISTRIBUTED.items()}
"""The cases and the properties, each with its description."""


@dataclass(frozen=True, slots=True)
class LossSelection:
    """The checks to run, selected by the options of ``options.OPTIONS``. Iteration yields the checks.

    An unclaimed dtype is listed once.
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
        options = {
            "loss": loss.name,
            "objective": loss.claims.objective,
            "dtype": dtype,
            "property": name,
            "device": None if self.device == "cpu" else self.device,
            "seed": self.seed or None,
        }
        return Check(loss.name, name, case, dtype, compare, options, **more)

    def __iter__(self) -> Iterator[Check]:
        for loss in self.losses:
            if self.device not in loss.claims.devices:
                yield self._check(loss, "all", reason=f"the device {self.device}")
                continue
            for dtype in self.dtypes:
                if dtype not in loss.claims.dtypes:
                    yield self._check(loss, dtype, reason=f"{dtype} features")
                    continue
                yield from self._dtype_checks(loss, dtype)
            yield from self._rank_checks(loss)

    def _dtype_checks(self, loss: Loss, dtype: str) -> Iterator[Check]:
        chosen = [prop for name, prop in PROPERTIES.items() if self.properties is None or name in self.properties]
        for prop in chosen:
            missing = prop.claim(loss.claims)
            if missing:
                yield self._check(loss, dtype, prop.name, reason=missing)
        claimed = [prop for prop in chosen if not prop.claim(loss.claims)]
        for name in [*BATCHES, *OWN]:
            applicable = [prop for prop in claimed if cases.concerns(name, prop.name, prop.case, loss.claims.objective)]
            if not applicable or (self.cases is not None and name not in self.cases):
                continue
            try:
                cases.build(name, dtype, loss.claims, loss.facts, self.seed)
            except ValueError as missing:
                yield self._check(loss, dtype, case=name, reason=str(missing))
                continue
            for prop in applicable:
                comparisons = partial(_compare, prop, loss, name, dtype, self.device, self.seed)
                yield self._check(loss, dtype, prop.name, name, comparisons, device=self.device)

    def _rank_checks(self, loss: Loss) -> Iterator[Check]:
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
                    missing = PROPERTIES[name.removeprefix("ddp-")].claim(loss.claims)
                    if missing:
                        yield self._check(loss, dtype, name, case, reason=missing, world=size)
                        continue
                    compare = partial(ranks.check, loss, case, size, ranks.DISTRIBUTED[name][0])
                    yield self._check(loss, dtype, name, case, compare, world=size)


@lru_cache(maxsize=1)
def _trial(loss: Loss, name: str, dtype: str, device: str, seed: int) -> LossTrial:
    """The trial that consecutive checks of a case share. The next case replaces it."""
    return LossTrial(loss, cases.build(name, dtype, loss.claims, loss.facts, seed), device)


def _compare(prop: LossProperty, loss: Loss, name: str, dtype: str, device: str, seed: int) -> Comparisons:
    with one_thread(loss.arrays, device == "cpu"), exact_products():
        yield from prop.check(_trial(loss, name, dtype, device, seed))


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
