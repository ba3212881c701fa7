"""The properties of a correct loss on one process: what is true of its value and of its gradients on a case."""

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
from contrastile.verify.sizes import COUNTS, WIDTHS
from contrastile.verify.trial import Property, SkipError
from contrastile.verify.truth import Outcome

UPSTREAM = float(np.float32(-2.718281828))
"""Exact in no 16 bits, and beyond 1."""
_LARGE = 65536.0
_NOISIER = 3.0
"""Largest ratio of a loss's error to a plain computation's. This package's own are held to 2 on a CPU."""


@dataclass(frozen=True, slots=True)
class LossProperty(Property):
    """A named property of a loss, whose check takes a ``LossTrial``, of its own case too.

    Attributes:
        claim: why a loss with these claims is not held to it, "" where it is.
    """

    claim: Callable[[Claims], str] = lambda claims: ""


@dataclass(frozen=True)
class LossTrial:
    """A loss on a case. The result that several properties need is computed once."""

    loss: Loss
    case: LossCase
    device: str = "cpu"

    @cached_property
    def result(self) -> Result:
        return self.run()

    def bound(self, upstream: float = 1.0) -> Outcome:
        """Bounds of the errors of ``allowed.expected``, of a loss that may take its batch in blocks."""
        block = self.loss.block
        if block is None:
            return allowed.allowed(self.case, upstream)
        m = len(self.case.problem.rows)
        pieces = tuple(min(block, m - start) for start in range(0, m, block))
        return allowed.allowed(self.case, upstream, Spread(pieces, pieces * len(self.case.problem.columns)))

    def call(self, **how: Any) -> Call:
        """A call of this case's arguments, made as ``prepare`` makes it."""
        return prepare(self.loss, self.case.arguments, self.case.dtype, self.device, **how)

    def run(self, upstream: float | None = None, **how: Any) -> Result:
        """The value and the gradients, times ``upstream`` through autograd."""
        call = self.call(**how)
        return call.finish(call(), upstream)

    def train(self, leaves: Sequence[int]) -> list[bool]:
        """Which of features, negatives, scale and bias need a gradient."""
        given = self.case.arguments
        count = len(given.features) + len(given.negatives) + 1 + (given.bias is not None)
        return [place in leaves for place in range(count)]

    def only_by_autograd(self) -> None:
        if not self.result.by_autograd:
            raise SkipError("it returns its gradients: autograd takes none")

    def only_right(self, fields: Sequence[str]) -> None:
        """Skip where the call alone is wrong already: one defect is one failure."""
        try:
            right = self.compare(self.result, fields).ratio < 1
        except SkipError:
            # no finite bound: nothing says that it is wrong
            return
        if not right:
            raise SkipError("the value or the gradients are wrong already")

    def compare(self, found: Result, fields: Sequence[str], upstream: float = 1.0) -> Worst:
        """The worst element, with the names that the caller knows."""
        return compared(self.case, found, allowed.expected(self.case, upstream), self.bound(upstream), fields)

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows or texts there are, and features of each vector."""
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


def compared(case: LossCase, found: Result, exact: Outcome, bound: Outcome, fields: Sequence[str]) -> Worst:
    """The worst element of the fields of a result, with the names that the caller knows.

    Raises:
        SkipError: no finite bound can be derived.
    """
    if any(x is not None and np.isinf(x).any() for _, x in parts(bound, fields)):
        raise SkipError(f"a plain {case.state} computation has no finite error bound here")
    if not found.by_autograd:
        # of the negatives no gradient is returned
        last = len(case.arguments.features) - 1
        exact, bound = (replace(x, columns=x.columns[:last]) for x in (exact, bound))
    return named(compare(found, exact, bound, fields), case)


_NAMES = {
    "nt_xent": ("view_a", "view_b"),
    "sup_con": ("features", ""),
    "info_nce": ("query", "key"),
    "maxsim": ("query", "document"),
}


def named(worst: Worst, case: LossCase) -> Worst:
    """With the names of gradients for those of the truth's fields."""
    first, second = _NAMES.get(case.claims.objective, ("image", "text"))
    words = {"rows": f"d{first}", "columns[0]": f"d{second}", "scale": "dscale", "bias": "dbias"}
    name, *rest = worst.field.split(" ", 1)
    return replace(worst, field=" ".join([words.get(name, name), *rest]))


def value(trial: LossTrial) -> Comparisons:
    """The loss agrees with the oracle's, in training as in evaluation."""
    yield "", trial.compare(trial.result, ("loss",))
    if trial.result.by_autograd:
        import torch

        for label, mode in (("without gradients", torch.no_grad), ("in inference mode", torch.inference_mode)):
            with mode():
                call = trial.call(train=trial.train([]))
                found = call.finish(call())
                assert not torch.is_grad_enabled()
            yield label, trial.compare(found, ("loss",))


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
    view, facts = partial(_claimed_part, claims), allowed.rounded_once(case)
    got: Outcome = trial.result
    if claims.objective in SELF and claims.feature_gradients:
        # norms are of both views
        got = replace(got, rows=np.concatenate([got.rows, *got.columns]), columns=())
    got = view(got, joined=True)
    beside = compare_with_plain(case.problem, case.oracle, got, facts, case.dtype, _NOISIER, view)
    yield "", named(beside, case)


def _claimed_part(claims: Claims, x: Outcome, *, joined: bool = False) -> Outcome:
    """An outcome in terms of the arguments, without the gradients that are not claimed."""
    none: Any = None
    x = folded(x) if claims.objective in SELF and not joined else x
    x = x if claims.feature_gradients else replace(x, rows=none, columns=())
    return x if claims.scale_gradient else replace(x, scale=none, bias=none)


def upstream(trial: LossTrial) -> Comparisons:
    """The upstream gradient multiplies every gradient."""
    trial.only_by_autograd()
    fields = gradient_fields(trial.loss.claims)
    trial.only_right(fields)
    yield f"upstream {UPSTREAM}", trial.compare(trial.run(upstream=UPSTREAM), fields, UPSTREAM)
    if trial.case.state in ("float32", "float64") and trial.case.dtype != "float16":
        # as a gradient scaler begins with
        yield f"upstream {_LARGE}", trial.compare(trial.run(upstream=_LARGE), fields, _LARGE)
    found = trial.run(upstream=np.nan)
    swallowed = any(x is not None and x.size and np.isfinite(x).all() for x in found.gradients[:-1])
    yield "upstream NaN", wrong("a gradient is finite") if swallowed else NOTHING


def gradient_fields(claims: Claims) -> list[str]:
    features = ["rows", "columns"] if claims.feature_gradients else []
    return features + (["scale", "bias"] if claims.scale_gradient else [])


def determinism(trial: LossTrial) -> Comparisons:
    """The same inputs give the same bits."""
    yield "second run", named(identical(trial.run(), trial.result), trial.case)


def inputs_kept(trial: LossTrial) -> Comparisons:
    """The loss writes to none of its inputs."""
    call = trial.call()
    take = trial.loss.arrays.to_numpy
    given = [*call.leaves, *call.labels, *call.keywords.values()]
    before = [take(x).tobytes() for x in given]
    call.finish(call())
    for place, (x, old) in enumerate(zip(given, before, strict=True)):
        if take(x).tobytes() != old:
            yield "", wrong(f"array {place} of the arguments was changed")
    yield "", NOTHING


def strided(trial: LossTrial) -> Comparisons:
    """Transposed, every-other and reversed views give the same results as contiguous features."""
    fields = ["loss", *(["rows", "columns"] if trial.loss.claims.feature_gradients else [])]
    trial.only_right(fields)
    ways = {"transposed": layouts.transposed, "every other element": layouts.every_other}
    if trial.loss.claims.library != "torch":
        # torch has no negative strides
        ways["backwards"] = layouts.backwards
    for label, layout in ways.items():
        yield label, trial.compare(trial.run(layout=partial(placed, layout, trial.loss.arrays)), fields)


def placed(layout: layouts.Layout, arrays: ArrayLibrary, x: Array) -> Array:
    _, view = layout(arrays, x, float("nan"))
    view[...] = x
    return view


_BATCHES = (2, 3, 4, 7, 8, 9, 10, 15, 16, 17, 31, 32, 33, 48, 191, 193, 1103, *(b for b in COUNTS if b <= 1025))
_BATCHES += (100, 200, 500, 1000)
_WIDTHS = (1, 2, 3, 17, 31, 33, 48, 100, 1000, *(d for d in WIDTHS if d <= 2049))
# of a backend, of which "sizes" tries all: what lies between its caller and it
_FEW_BATCHES, _FEW_WIDTHS = (1, 2, 10, 45, 100, 257), (1, 1537)
_LARGEST_BATCH = 1103


def sizes(trial: LossTrial) -> Comparisons:
    """Value and gradients are right at every size of a batch and of features."""
    claims, case = trial.loss.claims, trial.case
    batches, widths = (_BATCHES, _WIDTHS) if case.facts is None else (_FEW_BATCHES, _FEW_WIDTHS)
    many = claims.objective in ("clip_loss", "sup_con") and claims.by_autograd
    if case.facts is not None and case.dtype == "float32" and many:
        batches = *batches, _LARGEST_BATCH
    if trial.loss.block is not None:
        batches = tuple(b for b in batches if b <= 5 * trial.loss.block)
    wished = [
        *((b, 24 if b < 1000 else 3) for b in batches),
        *((6 if trial.loss.block is None else trial.loss.block + 2, d) for d in widths),
    ]
    shapes = dict.fromkeys((claims.batch(b), claims.width(d)) for b, d in wished)
    for b, d in shapes:
        if b is not None and d is not None:
            here = trial.resized(b, d)
            try:
                yield f"b = {b}, d = {d}", here.compare(here.result, trial.fields)
            except SkipError:
                # 16 bits: no finite bound
                continue


_LARGEST = {"cpu": 1024, "cuda": 8192}


def linear_memory(trial: LossTrial) -> Comparisons:
    """Memory grows with the batch, not with its square."""
    claims, device = trial.loss.claims, trial.device
    largest, width = _LARGEST[device], trial.case.batch.width
    batches = sorted({b for k in (4, 2, 1) if (b := claims.batch(largest // k)) is not None})
    if len(batches) < 3:
        raise SkipError(f"needs batches of {largest // 4} to {largest} rows")

    def measured(b: int) -> float:
        call = trial.resized(b, width).call()
        return peak.peak_bytes(trial.loss.arrays.name, device, lambda: call.finish(call()))

    # first calls fill caches and compile
    measured(batches[0])
    half, one, two = (measured(b) for b in batches)
    limit = peak.linear_limit(half, one, (batches[2] - batches[1]) / (batches[1] - batches[0]), device)
    yield f"b = {batches[1]} and {batches[2]}", Worst(two / limit, "bytes", (), two, limit)


def claimed(held: str | Callable[[Claims], object], what: str) -> Callable[[Claims], str]:
    """``LossProperty.claim`` of a claim by its name, or of what must be true of them."""
    return lambda claims: "" if (getattr(claims, held) if isinstance(held, str) else held(claims)) else what


by_autograd = claimed(
    lambda claims: claims.by_autograd and (claims.feature_gradients or claims.scale_gradient),
    "gradients through autograd",
)


ONE_CALL = {
    each.name: each
    for each in (
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
"""The properties of one call, by name."""
