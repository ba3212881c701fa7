"""The check before timing: the call that is timed must agree with the oracle within derived bounds."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from contrastile.bench.peers import Implementation, Workload, features
from contrastile.verify.comparison import Worst
from contrastile.verify.losses.arguments import rounded
from contrastile.verify.losses.cases import Batch, LossCase
from contrastile.verify.losses.properties import LossTrial
from contrastile.verify.trial import SkipError

CHECK_ROWS = 1031
"""Pairs of the check against the oracle: prime, and more than one chunk of any backend."""
CHECK_WIDTH = 43
FEW_ROWS = 67


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an implementation compares with the oracle.

    Attributes:
        ratio: largest error / bound over loss and gradients, with and without ids; None when it could not be run.
        reason: the worst element, or why it could not be run.
    """

    implementation: str
    ratio: float | None
    rows: int
    reason: str

    @property
    def agrees(self) -> bool:
        """Whether its speed may be printed."""
        return self.ratio is not None and self.ratio < 1


def check(implementation: Implementation, dtype: str, device: str, scale: float, rows: int = CHECK_ROWS) -> Agreement:
    """Compare loss and all gradients of one implementation with the oracle, at a ragged size, with and without ids.

    An infinite bound proves nothing. If a bound is infinite (sums in bfloat16), the check tries fewer pairs.
    """
    refusal = implementation.refuses(dtype, device)
    if refusal:
        return Agreement(implementation.name, None, rows, refusal)
    loss = implementation.loss(dtype, device)
    for pairs in sorted({rows, min(rows, FEW_ROWS)}, reverse=True):
        errors = dict[str, Worst]()
        for variant in ("aligned", "ids"):
            arguments = rounded(features(Workload(variant, pairs, CHECK_WIDTH), scale), dtype, loss.facts)
            batch = Batch(variant, "", pairs, CHECK_WIDTH, scale)
            trial = LossTrial(loss, LossCase(batch, dtype, arguments, loss.claims, loss.facts), device)
            with suppress(SkipError):
                errors[variant] = trial.compare(trial.result, trial.fields)
        if len(errors) == 2:
            variant, worst = max(errors.items(), key=lambda item: item[1].ratio)
            reason = f"{worst} ({variant}, b = {pairs}, d = {CHECK_WIDTH})"
            return Agreement(implementation.name, worst.ratio, pairs, reason)
    return Agreement(implementation.name, None, rows, f"no finite bound in {dtype} at scale {scale:g}")
