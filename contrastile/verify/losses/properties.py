"""The properties of a correct loss on one process: what is true of its value and of its gradients on a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from contrastile.backends.contract import Array
from contrastile.oracle.arrays import FloatArray
from contrastile.verify import peak
from contrastile.verify.comparison import NOTHING, Comparisons, Worst, compare, wrong
from contrastile.verify.losses import allowed
from contrastile.verify.losses.cases import MEMORY, SELF, SIZES, LossCase, of_arguments, sized
from contrastile.verify.losses.claims import Claims
from contrastile.verify.losses.subject import Loss, Result, prepare
from contrastile.verify.plain import compare_with_plain
from contrastile.verify.sizes import COUNTS, WIDTHS
from contrastile.verify.trial import Property, SkipError
from contrastile.verify.truth import Outcome

UPSTREAM = -2.5
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
    """A loss on a case. The result that several properties need is computed once.

    Attributes:
        loss: the loss under test.
        case: the case, made for its claims.
        device: kind of device.
    """

    loss: Loss
    case: LossCase
    device: str = "cpu"

    @cached_property
    def result(self) -> Result:
        return self.run()

    @cached_property
    def expected(self) -> Outcome:
        return allowed.expected(self.case)

    @cached_property
    def bound(self) -> Outcome:
        return allowed.allowed(self.case)

    def run(self, **how: Any) -> Result:
        """``Loss.evaluate`` on this case."""
        return self.loss.evaluate(self.case.arguments, self.case.dtype, self.device, **how)

    def evaluated(self) -> Result:
        """The value alone, of a loss through autograd, where nothing needs a gradient and none is recorded."""
        import torch

        with torch.no_grad():
            return self.run(train=[False] * len(self.case.arguments.features))

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
        exact = self.expected if upstream == 1.0 else allowed.expected(self.case, upstream)
        bound = self.bound if upstream == 1.0 else allowed.allowed(self.case, upstream)
        return compared(self.case, found, exact, bound, fields)


def compared(case: LossCase, found: Result, exact: Outcome, bound: Outcome, fields: Sequence[str]) -> Worst:
    """The worst element of the fields of a result, with the names that the caller knows.

    Raises:
        SkipError: no finite bound can be derived.
    """
    unbounded = [name for name, x in _arrays(bound, fields) if np.isinf(x).any()]
    if unbounded:
        raise SkipError(f"a plain {case.claims.state or case.dtype} computation has no finite error bound here")
    return named(compare(outcome(case, found), exact, bound, fields), case)


def outcome(case: LossCase, found: Result) -> Outcome:
    """A result in the fields of the truth; one that is None is missing."""
    given = found.features
    if case.claims.objective in SELF and all(x is not None for x in given):
        given = (np.concatenate([x for x in given if x is not None]),)
    rows, *columns = given
    missing: Any = None
    return Outcome(
        loss=found.loss,
        rows=missing if rows is None else rows,
        columns=tuple(missing if x is None else x for x in columns),
        scale=missing if found.scale is None else found.scale,
        bias=found.bias,
    )


def named(worst: Worst, case: LossCase) -> Worst:
    """With the names of gradients for those of the truth's fields."""
    first, second = {"nt_xent": ("views", ""), "sup_con": ("features", ""), "info_nce": ("query", "key")}.get(
        case.claims.objective, ("image", "text")
    )
    words = {"rows": f"d{first}", "columns[0]": f"d{second}", "scale": "dscale", "bias": "dbias"}
    name, *rest = worst.field.split(" ", 1)
    return replace(worst, field=" ".join([words.get(name, name), *rest]))


def _arrays(x: Outcome, fields: Sequence[str]) -> Iterator[tuple[str, FloatArray]]:
    for name in fields:
        value = getattr(x, name)
        for each in value if isinstance(value, tuple) else (value,):
            if each is not None:
                yield name, each


def value(trial: LossTrial) -> Comparisons:
    """The loss agrees with the oracle's, in training as in evaluation."""
    yield "", trial.compare(trial.result, ("loss",))
    if trial.result.by_autograd:
        yield "without gradients", trial.compare(trial.evaluated(), ("loss",))


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
    if claims.normalises:
        raise SkipError("the plain computation does not normalise")
    trial.only_right(["loss", *_gradient_fields(claims)])
    view, facts = partial(_claimed_part, claims), allowed.rounded_once(case)
    got = view(outcome(case, trial.result), joined=True)
    beside = compare_with_plain(case.problem, case.oracle, got, facts, case.dtype, _NOISIER, view)
    yield "", named(beside, case)


def _claimed_part(claims: Claims, x: Outcome, *, joined: bool = False) -> Outcome:
    """An outcome in terms of the arguments, without the gradients that are not claimed."""
    none: Any = None
    x = x if joined else of_arguments(x, claims.objective)
    x = x if claims.feature_gradients else replace(x, rows=none, columns=())
    return x if claims.scale_gradient else replace(x, scale=none, bias=none)


def upstream(trial: LossTrial) -> Comparisons:
    """The upstream gradient multiplies every gradient."""
    trial.only_by_autograd()
    fields = _gradient_fields(trial.loss.claims)
    trial.only_right(fields)
    yield f"upstream {UPSTREAM}", trial.compare(trial.run(upstream=UPSTREAM), fields, UPSTREAM)


def _gradient_fields(claims: Claims) -> list[str]:
    features = ["rows", "columns"] if claims.feature_gradients else []
    return features + (["scale", "bias"] if claims.scale_gradient else [])


def frozen(trial: LossTrial) -> Comparisons:
    """A gradient is right where the others are not asked for."""
    trial.only_by_autograd()
    count = len(trial.case.arguments.features)
    if count == 1:
        raise SkipError("has one array of features")
    if trial.case.claims.objective in SELF:
        raise SkipError("both views belong to one gradient")
    trial.only_right(("loss", "rows", "columns"))
    for one in range(count):
        train = [place == one for place in range(count)]
        found = trial.run(train=train)
        name = ("rows", "columns")[one]
        yield f"{name} alone", trial.compare(found, ("loss", name))


def determinism(trial: LossTrial) -> Comparisons:
    """The same inputs give the same bits."""
    again = trial.run()
    for name, a, b in zip(("loss", "features", "scale", "bias"), _values(again), _values(trial.result), strict=True):
        for x, y in zip(a, b, strict=True):
            if (x is None) != (y is None) or np.asarray(x).tobytes() != np.asarray(y).tobytes():
                yield "second run", wrong(f"other bits in {'the gradient of ' * (name != 'loss')}{name}")
    yield "second run", NOTHING


def _values(x: Result) -> tuple[tuple[Any, ...], ...]:
    return (x.loss,), x.features, (x.scale,), (x.bias,)


def inputs_kept(trial: LossTrial) -> Comparisons:
    """The loss writes to none of its inputs."""
    call = prepare(trial.loss, trial.case.arguments, trial.case.dtype, trial.device)
    take = trial.loss.arrays.to_numpy
    before = [np.array(take(_bare(x))) for x in call.features]
    call.finish(call(trial.loss.call))
    for place, (x, old) in enumerate(zip(call.features, before, strict=True)):
        if np.array(take(_bare(x))).tobytes() != old.tobytes():
            yield "", wrong(f"features[{place}] were changed")
    yield "", NOTHING


def _bare(x: Array) -> Array:
    return x.detach() if hasattr(x, "detach") else x


def strided(trial: LossTrial) -> Comparisons:
    """Transposed and every-other views give the same results as contiguous features."""
    fields = ["loss", *(["rows", "columns"] if trial.loss.claims.feature_gradients else [])]
    trial.only_right(fields)
    ways: dict[str, Callable[[Any, Array], Array]] = {"transposed": _transposed, "every other column": _every_other}
    for label, layout in ways.items():
        yield label, trial.compare(trial.run(layout=partial(layout, trial.loss.arrays)), fields)


def _transposed(arrays: Any, x: Array) -> Array:
    """Equal to x, with its columns one after the other in memory."""
    return arrays.contiguous(x.T).T


def _every_other(arrays: Any, x: Array) -> Array:
    """Equal to x, a view of an array that is twice as wide."""
    b, d = x.shape
    wide = arrays.concat([x.reshape(b * d, 1).T, x.reshape(b * d, 1).T])
    return arrays.contiguous(wide.T).reshape(b, 2 * d)[:, ::2]


_BATCHES = (2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 191, 193, *(b for b in COUNTS if b <= 1025))
_WIDTHS = (1, 2, 3, 17, 31, 33, 48, *(d for d in WIDTHS if d <= 1024))


def sizes(trial: LossTrial) -> Comparisons:
    """Value and gradients are right at every size of a batch and of features."""
    claims, dtype, fields = trial.loss.claims, trial.case.dtype, ["loss", *_gradient_fields(trial.loss.claims)]
    wished = [*((b, 24) for b in _BATCHES), *((6, d) for d in _WIDTHS)]
    shapes = dict.fromkeys((claims.batch(b), claims.width(d)) for b, d in wished)
    for b, d in shapes:
        if b is not None and d is not None:
            here = LossTrial(trial.loss, sized(claims, b, d, dtype), trial.device)
            try:
                yield f"b = {b}, d = {d}", here.compare(here.result, fields)
            except SkipError:
                # 16 bits: no finite bound
                continue


_LARGEST = {"cpu": 1024, "cuda": 8192}


def linear_memory(trial: LossTrial) -> Comparisons:
    """Memory grows with the batch, not with its square."""
    claims, device, dtype = trial.loss.claims, trial.device, trial.case.dtype
    largest, width = _LARGEST[device], trial.case.batch.width
    batches = sorted({b for k in (4, 2, 1) if (b := claims.batch(largest // k)) is not None})
    if len(batches) < 3:
        raise SkipError(f"needs batches of {largest // 4} to {largest} rows")

    def measured(b: int) -> float:
        call = prepare(trial.loss, sized(claims, b, width, dtype).arguments, dtype, device)
        return peak.peak_bytes(trial.loss.arrays, device, lambda: call.finish(call(trial.loss.call)))

    # first calls fill caches and compile
    measured(batches[0])
    half, one, two = (measured(b) for b in batches)
    limit = peak.linear_limit(half, one, (batches[2] - batches[1]) / (batches[1] - batches[0]), device)
    yield f"b = {batches[1]} and {batches[2]}", Worst(two / limit, "bytes", (), two, limit)


def _claimed(name: str, what: str) -> Callable[[Claims], str]:
    return lambda claims: "" if getattr(claims, name) else what


def _by_autograd(claims: Claims) -> str:
    return (
        ""
        if claims.by_autograd and (claims.feature_gradients or claims.scale_gradient)
        else "gradients through autograd"
    )


def _of_features_by_autograd(claims: Claims) -> str:
    return _by_autograd(claims) or _claimed("feature_gradients", "gradients of the features")(claims)


PROPERTIES = {
    each.name: each
    for each in (
        LossProperty("value", value),
        LossProperty("gradients", gradients, claim=_claimed("feature_gradients", "gradients of the features")),
        LossProperty("scale-gradient", scale_gradient, claim=_claimed("scale_gradient", "the gradient of the scale")),
        LossProperty("plain", plain),
        LossProperty("upstream", upstream, claim=_by_autograd),
        LossProperty("frozen", frozen, claim=_of_features_by_autograd),
        LossProperty("determinism", determinism, claim=_claimed("deterministic", "the same bits for the same inputs")),
        LossProperty("inputs-kept", inputs_kept),
        LossProperty("strided", strided, claim=_claimed("strided", "features that are not contiguous")),
        LossProperty("sizes", sizes, SIZES),
        LossProperty(
            "linear-memory", linear_memory, MEMORY, claim=_claimed("linear_memory", "memory linear in the batch")
        ),
    )
}
"""All properties on one process, by name."""
