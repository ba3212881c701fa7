"""The properties of a correct loss on one process: its value and its gradients on a case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array
from contrastile.verify import layouts, peak
from contrastile.verify.arithmetic import Spread
from contrastile.verify.comparison import NOTHING, Comparisons, Worst, compare, identical, parts, wrong
from contrastile.verify.losses import allowed
from contrastile.verify.losses.arguments import SELF
from contrastile.verify.losses.cases import MEMORY, SIZES, LossCase, sized
from contrastile.verify.losses.claims import Claims
from contrastile.verify.losses.subject import Call, Loss, Result, prepare
from contrastile.verify.plain import compare_with_plain
from contrastile.verify.rearrange import folded
from contrastile.verify.rounding import UNIT
from contrastile.verify.sizes import COUNTS, WIDTHS
from contrastile.verify.trial import Property, SkipError
from contrastile.verify.truth import Outcome

UPSTREAM = float(np.float32(-2.718281828))
"""An upstream gradient that no 16-bit dtype represents exactly, of magnitude above 1."""
_LARGE = 65536.0
_NOISIER = 3.0
"""Largest ratio of a loss's error to that of a plain computation. This package's own losses are held to 2 on a CPU."""


@dataclass(frozen=True, slots=True)
class LossProperty(Property):
    """A named property of a loss. Its check takes a ``LossTrial``, even for a case of its own.

    Attributes:
        claim: why a loss with these claims is not held to the property; "" if it is.
    """

    claim: Callable[[Claims], str] = lambda claims: ""


@dataclass(frozen=True)
class LossTrial:
    """A loss on a case. Several properties share one result, which is computed once."""

    loss: Loss
    case: LossCase
    device: str = "cpu"

    @cached_property
    def result(self) -> Result:
        return self.run()

    def bound(self, upstream: float = 1.0) -> Outcome:
        """Error bounds of ``allowed.expected``, for a loss that may take its batch in blocks."""
        block = self.loss.block
        if block is None:
            return allowed.allowed(self.case, upstream)
        m = len(self.case.problem.rows)
        block_sizes = tuple(min(block, m - start) for start in range(0, m, block))
        return allowed.allowed(self.case, upstream, Spread(block_sizes, block_sizes * len(self.case.problem.columns)))

    def call(self, **options: Any) -> Call:
        """A call of this case's arguments; ``options`` are those of ``prepare``."""
        return prepare(self.loss, self.case.arguments, self.case.dtype, self.device, **options)

    def run(self, upstream: float | None = None, *, again: bool = False, **options: Any) -> Result:
        """The value and the gradients, times ``upstream`` through autograd; if ``again``, of a second backward pass."""
        call = self.call(**options)
        value = call()
        if again:
            call.finish(value, retain=True)
            call.forget()
        return call.finish(value, upstream)

    def train(self, leaves: Sequence[int]) -> list[bool]:
        """Whether each of features, negatives, scale and bias needs a gradient, from the indices of those that do."""
        arguments = self.case.arguments
        count = len(arguments.features) + len(arguments.negatives) + 1 + (arguments.bias is not None)
        return [index in leaves for index in range(count)]

    def only_by_autograd(self) -> None:
        if not self.result.by_autograd:
            raise SkipError("it returns its gradients: autograd takes none")

    def only_right(self, fields: Sequence[str]) -> None:
        """Skip if the plain call is already wrong, so that one defect is one failure."""
        try:
            is_right = self.compare(self.result, fields).ratio < 1
        except SkipError:
            # Without a finite bound nothing proves the result wrong.
            return
        if not is_right:
            raise SkipError("the value or the gradients are wrong already")

    def compare(self, result: Result, fields: Sequence[str], upstream: float = 1.0) -> Worst:
        """The worst element of the fields, with the names of the caller's arguments."""
        return compared(self.case, result, allowed.expected(self.case, upstream), self.bound(upstream), fields)

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows or texts, and the width of each vector."""
        features = self.case.arguments.features[0]
        return len(features), features.shape[-1]

    def other(self, case: LossCase) -> LossTrial:
        return LossTrial(self.loss, case, self.device)

    def resized(self, rows: int, width: int, seed: int = 0) -> LossTrial:
        return self.other(sized(self.loss.claims, rows, width, self.case.dtype, self.case.facts, seed=seed))

    @property
    def fields(self) -> list[str]:
        """The value and the gradients that are claimed."""
        return ["loss", *gradient_fields(self.loss.claims)]


def compared(case: LossCase, result: Result, exact: Outcome, bound: Outcome, fields: Sequence[str]) -> Worst:
    """The worst element of the fields of a result, with the names of the caller's arguments.

    Raises:
        SkipError: there is no finite bound.
    """
    if any(x is not None and np.isinf(x).any() for _, x in parts(bound, fields)):
        raise SkipError(f"a plain {case.state} computation has no finite error bound here")
    if result.unit > UNIT[case.state]:
        # The loss was rounded to the features' dtype at the end, as the gradients are.
        bound = replace(bound, loss=bound.loss + result.unit * (np.abs(exact.loss) + bound.loss))
    if not result.by_autograd:
        # A loss that returns its gradients returns none of the negatives.
        column_count = len(case.arguments.features) - 1
        exact, bound = (replace(x, columns=x.columns[:column_count]) for x in (exact, bound))
    return with_argument_names(compare(result, exact, bound, fields), case)


_NAMES = {
    "nt_xent": ("view_a", "view_b"),
    "sup_con": ("features", ""),
    "info_nce": ("query", "key"),
    "maxsim": ("query", "document"),
}


def with_argument_names(worst: Worst, case: LossCase) -> Worst:
    """Replace the truth's field name by that of the argument's gradient."""
    first, second = _NAMES.get(case.claims.objective, ("image", "text"))
    gradient_names = {"rows": f"d{first}", "columns[0]": f"d{second}", "scale": "dscale", "bias": "dbias"}
    field, *rest = worst.field.split(" ", 1)
    return replace(worst, field=" ".join([gradient_names.get(field, field), *rest]))


def value(trial: LossTrial) -> Comparisons:
    """The loss agrees with the oracle's, in training as in evaluation."""
    yield "", trial.compare(trial.result, ("loss",))
    if trial.result.by_autograd:
        import torch

        for label, mode in (("without gradients", torch.no_grad), ("in inference mode", torch.inference_mode)):
            with mode():
                call = trial.call(train=trial.train([]))
                result = call.finish(call())
                assert not torch.is_grad_enabled()
            yield label, trial.compare(result, ("loss",))


def gradients(trial: LossTrial) -> Comparisons:
    """The gradients of the features agree with the oracle's."""
    yield "", trial.compare(trial.result, ("rows", "columns"))


def scale_gradient(trial: LossTrial) -> Comparisons:
    """The gradients of the scale and of the bias agree with the oracle's."""
    yield "", trial.compare(trial.result, ("scale", "bias"))


def plain(trial: LossTrial) -> Comparisons:
    """Value and gradients have at most 3 x the error of a plain computation in the same dtype."""
    case, claims = trial.case, trial.loss.claims
    if case.dtype == "float64":
        raise SkipError("the oracle is no more exact than a plain float64 computation")
    if claims.normalises or case.oracle.late is not None:
        raise SkipError("the plain computation does not normalise, and has one vector for each text")
    trial.only_right(["loss", *gradient_fields(claims)])
    claimed_part, facts = partial(_claimed_part, claims), allowed.rounded_once(case)
    outcome: Outcome = trial.result
    if trial.result.unit > UNIT[case.state]:
        # Of a loss that was rounded at the end the error says nothing.
        outcome = replace(outcome, loss=case.oracle.outcome.loss)
    if claims.objective in SELF and claims.feature_gradients:
        # The norm of the error covers both views.
        outcome = replace(outcome, rows=np.concatenate([outcome.rows, *outcome.columns]), columns=())
    outcome = claimed_part(outcome, joined=True)
    worst = compare_with_plain(case.problem, case.oracle, outcome, facts, case.dtype, _NOISIER, claimed_part)
    yield "", with_argument_names(worst, case)


def _claimed_part(claims: Claims, outcome: Outcome, *, joined: bool = False) -> Outcome:
    """The outcome in terms of the arguments, without unclaimed gradients."""
    none: Any = None
    outcome = folded(outcome) if claims.objective in SELF and not joined else outcome
    outcome = outcome if claims.feature_gradients else replace(outcome, rows=none, columns=())
    return outcome if claims.scale_gradient else replace(outcome, scale=none, bias=none)


def upstream(trial: LossTrial) -> Comparisons:
    """The upstream gradient multiplies every gradient."""
    trial.only_by_autograd()
    fields = gradient_fields(trial.loss.claims)
    trial.only_right(fields)
    yield f"upstream {UPSTREAM}", trial.compare(trial.run(upstream=UPSTREAM), fields, UPSTREAM)
    if trial.case.state in ("float32", "float64") and trial.case.dtype != "float16":
        # A gradient scaler starts with this factor.
        yield f"upstream {_LARGE}", trial.compare(trial.run(upstream=_LARGE), fields, _LARGE)
    result = trial.run(upstream=np.nan)
    exact = allowed.expected(trial.case)
    # a gradient of 0 may be that of a loss without this argument
    pairs_of_gradients = zip(result.gradients[:-1], (exact.rows, *exact.columns, exact.scale), strict=False)
    has_finite_gradient = any(x is not None and np.any(y) and np.isfinite(x).all() for x, y in pairs_of_gradients)
    yield "upstream NaN", wrong("a gradient is finite") if has_finite_gradient else NOTHING


def gradient_fields(claims: Claims) -> list[str]:
    features = ["rows", "columns"] if claims.feature_gradients else []
    return features + (["scale", "bias"] if claims.scale_gradient else [])


def determinism(trial: LossTrial) -> Comparisons:
    """The same inputs give the same bits."""
    yield "second run", with_argument_names(identical(trial.run(), trial.result), trial.case)


def inputs_kept(trial: LossTrial) -> Comparisons:
    """The loss writes to none of its inputs."""
    call = trial.call()
    to_numpy = trial.loss.arrays.to_numpy
    arrays = [*call.leaves, *call.labels, *call.keywords.values()]
    before = [to_numpy(x).tobytes() for x in arrays]
    returned, upstream = call(), None
    value = next(iter(returned.values())) if isinstance(returned, dict) else returned
    if hasattr(value, "backward"):
        upstream = value.detach() * 0 + UPSTREAM
        arrays, before = [*arrays, upstream], [*before, to_numpy(upstream).tobytes()]
    call.finish(returned, upstream)
    for index, (x, old) in enumerate(zip(arrays, before, strict=True)):
        if to_numpy(x).tobytes() != old:
            what = "the upstream gradient" if x is upstream else f"array {index} of the arguments"
            yield "", wrong(f"{what} was changed")
    yield "", NOTHING


def strided(trial: LossTrial) -> Comparisons:
    """Transposed, every-other and reversed views give the same results as contiguous features."""
    fields = ["loss", *(["rows", "columns"] if trial.loss.claims.feature_gradients else [])]
    trial.only_right(fields)
    named_layouts = {"transposed": layouts.transposed, "every other element": layouts.every_other}
    if trial.loss.claims.library != "torch":
        # Torch has no negative strides.
        named_layouts["backwards"] = layouts.backwards
    for label, layout in named_layouts.items():
        yield label, trial.compare(trial.run(layout=partial(in_layout, layout, trial.loss.arrays)), fields)


def in_layout(layout: layouts.Layout, arrays: ArrayLibrary, x: Array) -> Array:
    _, view = layout(arrays, x, float("nan"))
    view[...] = x
    return view


_BATCHES = (2, 3, 4, 7, 8, 9, 10, 15, 16, 17, 31, 32, 33, 48, 191, 193, 1103, *(b for b in COUNTS if b <= 1025))
_BATCHES += (100, 200, 500, 1000)
_WIDTHS = (1, 2, 3, 17, 31, 33, 48, 100, 1000, *(d for d in WIDTHS if d <= 2049))
# The code between a caller and a backend needs few sizes, because the backend's own property "sizes" tries all.
_FEW_BATCHES, _FEW_WIDTHS = (1, 2, 10, 45, 100, 257), (1, 1537)
_LARGEST_BATCH = 1103


def sizes(trial: LossTrial) -> Comparisons:
    """Value and gradients are right at every size of a batch and of features."""
    claims, case = trial.loss.claims, trial.case
    batches, widths = (_BATCHES, _WIDTHS) if case.facts is None else (_FEW_BATCHES, _FEW_WIDTHS)
    tries_largest = claims.objective in ("clip_loss", "sup_con") and claims.by_autograd
    if case.facts is not None and case.dtype == "float32" and tries_largest:
        batches = *batches, _LARGEST_BATCH
    if trial.loss.block is not None:
        batches = tuple(b for b in batches if b <= 5 * trial.loss.block)
    requested = [
        *((b, 24 if b < 1000 else 3) for b in batches),
        *((6 if trial.loss.block is None else trial.loss.block + 2, d) for d in widths),
    ]
    shapes = dict.fromkeys((claims.batch(b), claims.width(d)) for b, d in requested)
    for b, d in shapes:
        if b is not None and d is not None:
            resized = trial.resized(b, d)
            try:
                yield f"b = {b}, d = {d}", resized.compare(resized.result, trial.fields)
            except SkipError:
                # A 16-bit dtype may have no finite bound.
                continue


_LARGEST = {"cpu": 1024, "cuda": 8192}


def linear_memory(trial: LossTrial) -> Comparisons:
    """Memory grows with the batch, not with its square."""
    claims, device = trial.loss.claims, trial.device
    largest, width = _LARGEST[device], trial.case.batch.width
    batches = sorted({b for k in (4, 2, 1) if (b := claims.batch(largest // k)) is not None})
    if len(batches) < 3:
        raise SkipError(f"needs batches of {largest // 4} to {largest} rows")

    def peak_of(b: int) -> float:
        call = trial.resized(b, width).call()
        return peak.peak_bytes(trial.loss.arrays.name, device, lambda: call.finish(call()))

    # The first calls fill caches and compile.
    peak_of(batches[0])
    half, one, two = (peak_of(b) for b in batches)
    limit = peak.linear_limit(half, one, (batches[2] - batches[1]) / (batches[1] - batches[0]), device)
    yield f"b = {batches[1]} and {batches[2]}", Worst(two / limit, "bytes", (), two, limit)


def claimed(claim: str | Callable[[Claims], object], reason: str) -> Callable[[Claims], str]:
    """``LossProperty.claim`` of a claim by name, or of a predicate of all claims; ``reason`` says what is unclaimed."""
    return lambda claims: "" if (getattr(claims, claim) if isinstance(claim, str) else claim(claims)) else reason


by_autograd = claimed(
    lambda claims: claims.by_autograd and (claims.feature_gradients or claims.scale_gradient),
    "gradients through autograd",
)


ONE_CALL = {
    prop.name: prop
    for prop in (
        LossProperty("value", value),
        LossProperty("gradients", gradients, claim=claimed("feature_gradients", "gradients of the features")),
        LossProperty("scale-gradient", scale_gradient, claim=claimed("scale_gradient", "the gradient of the scale")),
        LossProperty("plain", plain),
        LossProperty("upstream", upstream, claim=by_autograd),
        LossProperty("determinism", determinism, claim=claimed("deterministic", "the same bits for the same inputs")),
        LossProperty("inputs-kept", inputs_kept),
        LossProperty("strided", strided, claim=claimed("strided", "features that are not contiguous")),
        LossProperty("sizes", sizes, SIZES),
        LossProperty(
            "linear-memory", linear_memory, MEMORY, claim=claimed("linear_memory", "memory linear in the batch")
        ),
    )
}
"""The properties of a single call, by name."""
