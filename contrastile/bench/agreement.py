"""No speed without agreement: the very call that will be timed, against the oracle, within derived bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from contrastile import problems
from contrastile.backends.arrays import library_of
from contrastile.backends.contract import state_dtype
from contrastile.bench.cases import Case, Features, arguments, features
from contrastile.bench.peers import CHECK_ROWS, Implementation
from contrastile.verify.bounds import bounds
from contrastile.verify.rounding import UNIT, round_to
from contrastile.verify.run import compare, parts
from contrastile.verify.truth import Outcome, truth

CHECK_WIDTH = 43
FEW_ROWS = 67
FIELDS = ("loss", "rows", "columns", "scale")


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an implementation compares with the oracle.

    Attributes:
        implementation: its name.
        ratio: largest error / bound over loss and gradients, with and without ids; below 1 agrees. None when it
            could not be run.
        rows: pairs of the check.
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
    """Loss and all gradients of one implementation at a ragged size, without ids and with them.

    A size at which some bound is infinite proves nothing: fewer pairs are taken then (bfloat16 sums).

    Args:
        implementation: what is to be timed.
        dtype: of the features.
        device: "cpu" or "cuda".
        scale: rounded to the state dtype first.
        rows: number of pairs.
    """
    refusal = implementation.refuses(dtype, device)
    if refusal:
        return Agreement(implementation.name, None, rows, refusal)
    scale = float(round_to(scale, state_dtype(dtype)))
    for pairs in sorted({rows, min(rows, FEW_ROWS)}, reverse=True):
        cases = [Case(variant, pairs, CHECK_WIDTH) for variant in ("aligned", "ids")]
        found = [_compare(implementation, case, dtype, device, scale) for case in cases]
        if all(each is not None for each in found):
            ratio, reason = max(each for each in found if each is not None)
            return Agreement(implementation.name, ratio, pairs, reason)
    return Agreement(implementation.name, None, rows, f"no finite bound in {dtype} at scale {scale:g}")


def _compare(
    implementation: Implementation, case: Case, dtype: str, device: str, scale: float
) -> tuple[float, str] | None:
    """The worst element's ratio and description; None where the bounds are not finite."""
    drawn = features(case)
    image, text = (round_to(x, dtype) for x in (drawn.image, drawn.text))
    problem = problems.clip(image, text, scale, ids=drawn.ids).problem
    exact = truth(problem)
    accuracy = implementation.accuracy(dtype, device)
    # the front door hands the loss out in the state dtype, however exact the backend
    accuracy = replace(accuracy, unit=max(accuracy.unit, UNIT[state_dtype(dtype)]))
    # a peer may subtract its positives from its sums, as the formula is written
    allowed = bounds(problem, exact, accuracy, dtype, apart=implementation.apart)
    if not all(bound is None or np.isfinite(bound).all() for _, bound in parts(allowed, FIELDS)):
        return None
    # float32 holds every feature dtype's values that matter here: the features were drawn in it
    given = Features(image.astype(np.float32), text.astype(np.float32), drawn.ids)
    loss, gradients = implementation.step(arguments(given, implementation.library, dtype, device, scale))()
    worst = compare(_outcome(loss, gradients), exact.outcome, allowed, FIELDS)
    return worst.ratio, f"{worst} ({case.variant}, b = {case.batch}, d = {case.width})"


def _outcome(loss: Any, gradients: tuple[Any, Any, Any]) -> Outcome:
    def widened(x: Any) -> Any:
        return np.array(library_of(x).to_numpy(x) if hasattr(x, "shape") else x, dtype=np.float64)

    d_image, d_text, d_scale = (widened(x) for x in gradients)
    return Outcome(
        loss=widened(loss),
        rows=d_image,
        columns=(d_text,),
        scale=d_scale,
        bias=None,
    )
