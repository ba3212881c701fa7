"""The properties of calls: whatever is passed, whichever gradients are wanted, whatever else is called meanwhile."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from contrastile.backends.contract import Array, state_dtype
from contrastile.verify import peak, process
from contrastile.verify.comparison import NOTHING, Comparisons, Worst, wrong
from contrastile.verify.draws import FAR
from contrastile.verify.losses.cases import CALLS, HIGH, LossCase, rounded, sized
from contrastile.verify.losses.claims import Claims
from contrastile.verify.losses.properties import (
    ONE_CALL,
    UPSTREAM,
    LossProperty,
    LossTrial,
    by_autograd,
    claimed,
    gradient_fields,
)
from contrastile.verify.losses.subject import Call, Result, prepare
from contrastile.verify.rounding import UNIT
from contrastile.verify.trial import SkipError
from contrastile.verify.truth import Outcome

_SCALES = HIGH, 3.0, 0.07, -14.3
_BIASES = -2.7, 2.0, 0.3, -40.1
_MANY = 520
_LARGE = 211, 8
"""More than 40,000 logits, and more than 200 rows."""


def leaves(trial: LossTrial) -> Comparisons:
    """The gradients are right whichever of them are wanted, with a scale that is a tensor or a number."""
    case, claims = trial.case, trial.loss.claims
    given, whole = case.arguments, trial.result
    count = len(given.features) + len(given.negatives)
    numbers = 1 + (given.bias is not None)
    places = [*(range(count) if claims.feature_gradients else ()), *(range(count, count + numbers))]
    places = places if claims.scale_gradient else places[:count]
    sizes = range(1, len(places) + 1) if len(places) < 5 else (1, 2, len(places) - 1, len(places))
    for wanted in (x for size in sizes for x in combinations(places, size)):
        ways: dict[str, Any] = {"": None}
        if not any(place >= count for place in wanted):
            ways["numbers for scale and bias"] = float
        for label, number in ways.items():
            got = trial.run(train=trial.train(wanted), number=number)
            gradients = [*got.features, got.scale, got.bias]
            names = "argument " + ", ".join(map(str, wanted)) + " alone" * (len(wanted) < len(places))
            label = ", ".join(filter(None, (names, label)))
            if any(gradients[place] is None for place in wanted):
                yield label, wrong("a gradient is missing")
                continue
            if any(x is not None for place, x in enumerate(gradients) if place not in wanted):
                yield label, wrong("a frozen argument has a gradient")
            # in place of those that are frozen, what was right before
            *features, scale, bias = (y if x is None else x for x, y in zip(gradients, _gradients(whole), strict=True))
            full = replace(whole, loss=got.loss, features=tuple(features), scale=scale, bias=bias)
            yield label, trial.compare(full, trial.fields)


def _gradients(x: Result) -> list[Any]:
    return [*x.features, x.scale, x.bias]


def numbers(trial: LossTrial) -> Comparisons:
    """Scale and bias may be numbers of Python and NumPy and tensors of any shape with one element."""
    claims = trial.loss.claims
    for scale, bias in zip(_SCALES, _BIASES, strict=True):
        here = trial.other(_numbered(trial.case, scale, bias))
        for label, make, learns in _ways(trial, whole=scale == int(scale)):
            wanted = claims.scale_gradient and learns
            train = None if wanted else [*[claims.feature_gradients] * _arrays(trial.case), *[False] * _scalars(here)]
            fields = trial.fields if wanted else [x for x in trial.fields if x not in ("scale", "bias")]
            found = here.run(number=make, train=train)
            yield f"scale {scale:g} as {label}", here.compare(found, fields)
    if trial.case.arguments.bias is None:
        return
    name, has_default = _fourth(trial.loss.call)
    if name == "bias":
        call = _prepared(trial)
        named = call.finish(call(lambda *args, **more: trial.loss.call(*args[:-1], bias=args[-1], **more)))
        yield "the bias by its name", trial.compare(named, trial.fields)
    if has_default:
        here = trial.other(replace(trial.case, arguments=replace(trial.case.arguments, bias=None)))
        yield "the bias left out", here.compare(here.run(), [x for x in trial.fields if x != "bias"])


def _numbered(case: LossCase, scale: float, bias: float) -> LossCase:
    given = replace(case.arguments, scale=scale, bias=None if case.arguments.bias is None else bias)
    return replace(case, arguments=rounded(given, case.dtype))


def _arrays(case: LossCase) -> int:
    return len(case.arguments.features) + len(case.arguments.negatives)


def _scalars(trial: LossTrial) -> int:
    return 1 + (trial.case.arguments.bias is not None)


def _ways(trial: LossTrial, *, whole: bool) -> Iterator[tuple[str, Callable[[float], Any], bool]]:
    """The ways to pass a number: a label, what makes it, and whether it may have a gradient."""
    yield "a float", float, False
    if whole:
        yield "an int", round, False
    yield "a numpy.float64", np.float64, False
    yield "a numpy.float32", np.float32, False
    arrays, case = trial.loss.arrays, trial.case
    state = state_dtype(case.dtype)
    like = prepare(trial.loss, case.arguments, case.dtype, trial.device).leaves[0]
    # beside a tensor of 16 bits a plain computation takes the dtype of one of shape (1,), not of one of shape ()
    shapes = ((), (1,)) if state == case.dtype or case.facts is not None else ((),)
    for shape in shapes:

        def make(x: float, shape: Any = shape) -> Array:
            return arrays.asarray(np.full(shape, x), state, like)

        # torch would take no gradient of what returns its own, and gives these for every number
        learns = trial.loss.claims.library == "torch"
        yield f"an array of shape {shape}", make, learns
        if learns and by_autograd(trial.loss.claims) == "":
            yield f"a frozen array of shape {shape}", make, False


def _fourth(call: Callable[..., Any]) -> tuple[str, bool]:
    """The name of the fourth parameter, and whether it has a default."""
    try:
        parameter = [*inspect.signature(call).parameters.values()][3]
    except (IndexError, TypeError, ValueError):
        return "", False
    return parameter.name, parameter.default is not inspect.Parameter.empty


def interleaved(trial: LossTrial) -> Comparisons:
    """Neither another call, nor its backward pass, nor who writes to its results changes those of a call."""
    case, claims = trial.case, trial.loss.claims
    b, d = claims.batch(_LARGE[0]), claims.width(_LARGE[1])
    rows, width = case.arguments.features[0].shape
    sizes = [(rows, width)]
    if b is not None and d is not None and case.dtype == "float32":
        sizes.append((b, d))
    for rows, width in sizes:
        two = [trial.other(sized(claims, rows, width, case.dtype, case.facts, seed=seed)) for seed in (1, 2)]
        calls = [_prepared(each) for each in two]
        returned = [call() for call in calls]
        label = f"b = {rows}, d = {width}: "
        before = [call.bits() for call in calls]
        found = [call.finish(x) for call, x in zip(calls, returned, strict=True)]
        for name, each, result in zip(("first", "second"), two, found, strict=True):
            yield f"{label}the {name} of two calls, then their backward passes", each.compare(result, trial.fields)
        after = [call.bits() for call in calls]
        again = _prepared(two[1])
        again.finish(again())
        same = all(x[: len(y)] == y for x, y in zip(after, before, strict=True)) and [c.bits() for c in calls] == after
        yield f"{label}results after another call", NOTHING if same else wrong("they were changed")
        for x in _arrays_of(calls[0]):
            x[...] = 7
        yield f"{label}after results were written to", two[1].compare(two[1].run(), trial.fields)


def _prepared(trial: LossTrial) -> Call:
    return prepare(trial.loss, trial.case.arguments, trial.case.dtype, trial.device)


def _arrays_of(call: Call) -> list[Array]:
    """Gradients, as they were returned or as autograd has left them."""
    returned = list(call.returned[1:]) if isinstance(call.returned, tuple | list) else []
    gradients = [*returned, *(getattr(x, "grad", None) for x in call.leaves)]
    return [x for x in gradients if getattr(x, "shape", ())]


def rewritten(trial: LossTrial) -> Comparisons:
    """New values in the same arrays count; written between the passes they are an error, or their old ones count."""
    case = trial.case
    rows, width = case.arguments.features[0].shape
    other = trial.other(sized(trial.loss.claims, rows, width, case.dtype, case.facts, seed=3))
    call, new = _prepared(trial), _prepared(other)
    call.finish(call())
    for x, y in zip([*call.leaves, *call.labels], [*new.leaves, *new.labels], strict=True):
        _written(x, y)
    _forget(call)
    yield "new values in the same arrays", other.compare(call.finish(call()), trial.fields)
    if not trial.loss.claims.by_autograd:
        return
    call = _prepared(trial)
    value = call()
    _written(call.leaves[0], new.leaves[0])
    try:
        found = call.finish(value)
    except RuntimeError:
        yield "written between the passes", NOTHING
        return
    yield "written between the passes", trial.compare(found, gradient_fields(trial.loss.claims))


def _written(x: Array, y: Array) -> None:
    if hasattr(x, "detach"):
        import torch

        with torch.no_grad():
            x.copy_(y)
        return
    x[...] = y


def _forget(call: Call) -> None:
    """Gradients of the backward passes so far, to which the next would add."""
    for x in (*call.leaves, *call.numbers):
        if hasattr(x, "grad"):
            x.grad = None


def retained(trial: LossTrial) -> Comparisons:
    """A graph that is retained gives the same gradients a second time, with another upstream gradient too."""
    trial.only_by_autograd()
    call = _prepared(trial)
    value = call()
    call.finish(value, retain=True)
    fields = gradient_fields(trial.loss.claims)
    for label, upstream in (("a second backward pass", UPSTREAM), ("a third, upstream 1 / 30", 1.0)):
        _forget(call)
        found = call.finish(value, upstream, retain=True)
        yield label, trial.compare(found, fields, upstream)


def aliases(trial: LossTrial) -> Comparisons:
    """Features that are one tensor, or share a storage, have the loss and the gradients of equal ones apart."""
    case = trial.case
    given, claims = case.arguments, trial.loss.claims
    if len(given.features) != 2:
        raise SkipError("has one array of features")
    same = trial.other(replace(case, arguments=replace(given, features=(given.features[0],) * 2)))
    call = _prepared(same)
    call.passed = [call.leaves[0]] * 2
    found = call.finish(call())
    if not found.by_autograd:
        yield "one array twice", same.compare(found, trial.fields)
    else:
        yield "one tensor twice", same.compare(found, ("loss",))
        if claims.feature_gradients:
            both, bound = _added(same.expected), _added(same.bound)
            error = np.abs(found.features[0] - both) if found.features[0] is not None else np.full(both.shape, np.inf)
            size = bound + UNIT[case.dtype] * (np.abs(both) + bound)
            yield "one tensor twice", Worst(float((error / size).max()), "the gradient", (), float(error.max()), 0.0)
        call = _prepared(same)
        call.passed = [call.leaves[0], call.leaves[0].detach()]
        found = call.finish(call())
        found = replace(found, features=(found.features[0], same.result.features[1]))
        yield "a tensor and itself detached", same.compare(found, trial.fields)
    call = _prepared(trial)
    joined = trial.loss.arrays.concat([x.detach() if hasattr(x, "detach") else x for x in call.leaves])
    b = len(given.features[0])
    if claims.by_autograd and claims.feature_gradients:
        joined = joined.requires_grad_()
    call.passed = [joined[:b], joined[b:]]
    found = call.finish(call())
    if found.by_autograd and claims.feature_gradients:
        gradient = np.array(trial.loss.arrays.to_numpy(joined.grad), dtype=np.float64)
        found = replace(found, features=(gradient[:b], gradient[b:]))
    yield "halves of one storage", trial.compare(found, trial.fields)


def _added(x: Outcome) -> Any:
    return x.rows + x.columns[0]


def autocast(trial: LossTrial) -> Comparisons:
    """In the caller's autocast it is a computation in autocast's dtype, which leaves float64 alone."""
    import torch

    case = trial.case
    if case.dtype == "float16":
        raise SkipError("autocast here is to bfloat16")
    with torch.autocast(trial.device, dtype=torch.bfloat16):
        if case.dtype != "float32":
            yield "", trial.compare(trial.run(), trial.fields)
            return
        narrow = trial.other(_narrow(case))
        found = narrow.run()
    fields = trial.fields
    as_bfloat16 = replace(narrow.case, dtype="bfloat16", facts=None, claims=replace(case.claims, state=None))
    try:
        yield "", trial.other(as_bfloat16).compare(found, fields)
    except SkipError:
        yield "", NOTHING


def _narrow(case: LossCase) -> LossCase:
    """The case with features that bfloat16 holds, at a scale at which its errors are bounded."""
    return replace(case, arguments=replace(rounded(case.arguments, "bfloat16"), scale=2.0))


def settings(trial: LossTrial) -> Comparisons:
    """A call moves no generator, and changes no setting of the process."""
    import random

    # a generator that is seeded anew must not happen to be where it was
    random.random()
    np.random.random()
    if trial.loss.claims.library == "torch":
        import torch

        torch.rand(())
    before = process.state()
    trial.run()
    changed = process.changed(before, process.state())
    yield "", NOTHING if changed is None else wrong(changed)


def repeats(trial: LossTrial) -> Comparisons:
    """After 520 calls a call gives what the first gave."""
    small = trial.other(sized(trial.loss.claims, *_few(trial), trial.case.dtype, trial.case.facts))
    call = _prepared(small)
    first = call.finish(call())
    for _ in range(_MANY):
        call()
    again = small.run()
    yield f"call {_MANY}", small.compare(again, trial.fields)
    if trial.loss.claims.deterministic:
        same = all(np.array_equal(x, y, equal_nan=True) for x, y in zip(_all(first), _all(again), strict=True))
        yield f"call {_MANY}", NOTHING if same else wrong("it has other bits than the first")


def _few(trial: LossTrial) -> tuple[int, int]:
    claims = trial.loss.claims
    return claims.batch(4) or 1, claims.width(3) or 1


def _all(x: Result) -> list[Any]:
    return [y for y in (x.loss, *_gradients(x)) if y is not None]


def leaks(trial: LossTrial) -> Comparisons:
    """What a call allocates is freed with its results."""
    claims, case = trial.loss.claims, trial.case
    b = claims.batch(64)
    if b is None:
        raise SkipError("needs a batch of 64 rows")
    arguments = sized(claims, b, case.batch.width, case.dtype, case.facts).arguments

    def step() -> None:
        call = prepare(trial.loss, arguments, case.dtype, trial.device)
        call.finish(call())

    def steps(times: int) -> Callable[[], object]:
        def several() -> None:
            for _ in range(times):
                step()

        return several

    # first calls fill caches
    steps(2)()
    few, many = (peak.peak_bytes(trial.loss.arrays, trial.device, steps(times)) for times in (1, 5))
    # less than the logits of one of them
    limit = few + 2 * b * b
    yield "5 calls", Worst(many / limit, "bytes", (), many, limit)


def integers(trial: LossTrial) -> Comparisons:
    """Ids, positives and labels of each dtype, with its least and its largest numbers, are what they are in int64."""
    case, claims = trial.case, trial.loss.claims
    given = case.arguments
    for dtype in claims.integers:
        try:
            trial.loss.arrays.asarray(np.zeros(1, np.int64), dtype, _prepared(trial).leaves[0])
        except (AttributeError, TypeError):
            # this version of the library has none
            continue
        info = np.iinfo(dtype)
        edges = [info.min, info.min + 1, info.max, info.max - 1, info.max // 2, info.max // 2 + 1]
        more = FAR.tolist() if dtype == "int64" else []
        table = np.array(list(dict.fromkeys([*edges, *more, *range(3, 60)])), np.int64 if info.max < 2**63 else dtype)
        b = len(given.features[0])
        names = table[np.arange(b) * 7 % (b // 2 + 1) % len(table)]
        if claims.objective == "sup_con":
            changed = replace(given, labels=names)
        else:
            keys = ("row_ids", "column_ids") if claims.objective == "info_nce" else ("ids",)
            changed = replace(given, keywords=dict.fromkeys(keys, names))
        here = trial.other(replace(case, arguments=changed))
        yield dtype, here.compare(here.run(integers=dtype), trial.fields)


def refusals(trial: LossTrial) -> Comparisons:
    """A positive that is no column is an error, or makes NaN of the loss and of every gradient."""
    given = trial.case.arguments
    b = len(given.features[0])
    for bad in (-1, b, -b):
        positives = np.arange(b)
        positives[b // 2] = bad
        label = f"a positive of {bad} among {b} columns"
        here = trial.other(replace(trial.case, arguments=replace(given, keywords={"positives": positives})))
        try:
            found = here.run()
        except (ValueError, IndexError, RuntimeError):
            yield label, NOTHING
            continue
        numbers = [np.asarray(x) for x in _all(found)]
        yield label, NOTHING if all(np.isnan(x).any() for x in numbers) else wrong("a number, where nothing is right")


def _takes_integers(claims: Claims) -> str:
    return "" if claims.ids or claims.objective == "sup_con" else "integers"


def _several(claims: Claims) -> str:
    return by_autograd(claims) or claimed("retains", "a graph that is retained")(claims)


def _in_autocast(claims: Claims) -> str:
    return by_autograd(claims) or claimed("autocast", "the caller's autocast")(claims)


REPEATED = {
    each.name: each
    for each in (
        LossProperty("leaves", leaves, CALLS, claim=by_autograd),
        LossProperty("numbers", numbers, CALLS, claim=claimed("numbers", "numbers, or tensors of shape (1,)")),
        LossProperty("interleaved", interleaved, CALLS),
        LossProperty("rewritten", rewritten, CALLS),
        LossProperty("retained", retained, CALLS, claim=_several),
        LossProperty("aliases", aliases, CALLS),
        LossProperty("autocast", autocast, CALLS, claim=_in_autocast),
        LossProperty("settings", settings, CALLS, claim=claimed("deterministic", "the same bits for the same inputs")),
        LossProperty("repeats", repeats, CALLS),
        LossProperty("leaks", leaks, CALLS),
        LossProperty("integers", integers, CALLS, claim=_takes_integers),
        LossProperty("refusals", refusals, CALLS, claim=claimed("positives", "positives")),
    )
}
"""The properties of several calls, by name."""

PROPERTIES = ONE_CALL | REPEATED
"""All properties on one process, by name."""
