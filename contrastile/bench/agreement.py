"""Before an implementation is timed, the same call must agree with the oracle, within derived bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from contrastile.backends.arrays import library_of
from contrastile.backends.contract import state_dtype
from contrastile.bench.peers import CHECK_ROWS, Implementation
from contrastile.bench.workloads import Workload, arguments, features
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import compare, parts
from contrastile.verify.losses.arguments import Arguments, stated
from contrastile.verify.rounding import UNIT, round_to
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
    """Compare loss and all gradients of one implementation with the oracle, at a ragged size, with and without ids.

    An infinite bound proves nothing: where one is infinite, fewer pairs are tried (sums in bfloat16).

    Args:
        implementation: what will be timed.
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
        workloads = [Workload(variant, pairs, CHECK_WIDTH) for variant in ("aligned", "ids")]
        found = [_compare(implementation, workload, dtype, device, scale) for workload in workloads]
        if all(each is not None for each in found):
            ratio, reason = max(each for each in found if each is not None)
            return Agreement(implementation.name, ratio, pairs, reason)
    return Agreement(implementation.name, None, rows, f"no finite bound in {dtype} at scale {scale:g}")


def _compare(
    implementation: Implementation, workload: Workload, dtype: str, device: str, scale: float
) -> tuple[float, str] | None:
    """The worst element's ratio and description; None where the bounds are not finite."""
    drawn = features(workload)
    image, text = (round_to(x, dtype) for x in (drawn.image, drawn.text))
    keywords = {} if drawn.ids is None else {"ids": drawn.ids}
    problem = stated("clip_loss", Arguments((image, text), scale, keywords=keywords))
    exact = truth(problem)
    accuracy = implementation.accuracy(dtype, device)
    # the loss is returned in the state dtype, however exact the backend is
    accuracy = replace(accuracy, unit=max(accuracy.unit, UNIT[state_dtype(dtype)]))
    # a peer may include the positive in its log-sum-exp, as the formula is written
    allowed = bounds(problem, exact, accuracy, dtype, separate_positives=implementation.separate_positives)
    if not all(bound is None or np.isfinite(bound).all() for _, bound in parts(allowed, FIELDS)):
        return None
    # exact: the features were drawn in float32
    given = replace(drawn, image=image.astype(np.float32), text=text.astype(np.float32))
    loss, gradients = implementation.step(arguments(given, implementation.library, dtype, device, scale))()
    values = [library_of(x).to_numpy(x) if hasattr(x, "shape") else x for x in (loss, *gradients)]
    value, rows, columns, d_scale = (np.array(x, dtype=np.float64) for x in values)
    outcome = Outcome(loss=value, rows=rows, columns=(columns,), scale=d_scale)
    worst = compare(outcome, exact.outcome, allowed, FIELDS)
    return worst.ratio, f"{worst} ({workload.variant}, b = {workload.batch}, d = {workload.width})"
