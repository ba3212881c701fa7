"""The properties of calls: whatever is passed, whichever gradients are wanted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np

from contrastile.backends.contract import Array, state_dtype
from contrastile.verify.comparison import NOTHING, Comparisons, Worst, wrong
from contrastile.verify.draws import FAR
from contrastile.verify.losses import allowed, repeating
from contrastile.verify.losses.arguments import rounded
from contrastile.verify.losses.cases import CALLS, HIGH, build
from contrastile.verify.losses.maxsim import MASKS
from contrastile.verify.losses.properties import ONE_CALL, LossProperty, LossTrial, by_autograd, claimed
from contrastile.verify.losses.repeating import numbered
from contrastile.verify.rounding import UNIT, round_to
from contrastile.verify.trial import SkipError

_SCALES = HIGH, HIGH - 0.4, 3.0, -14.3
_BIASES = -2.7, -3.1, 2.0, -40.1


def leaves(trial: LossTrial) -> Comparisons:
    """The gradients are right whichever of them are wanted, with a scale that is a tensor or a number."""
    case, claims = trial.case, trial.loss.claims
    rows, width = trial.shape
    # of shapes that no call has had: the first wants least
    trial = trial.resized(claims.batch(rows + 1) or rows, width, 6)
    given = trial.case.arguments
    count = len(given.features) + len(given.negatives)
    numbers = 1 + (given.bias is not None)
    places = [*(range(count) if claims.feature_gradients else ()), *(range(count, count + numbers))]
    places = places if claims.scale_gradient else places[:count]
    sizes = range(1, len(places) + 1) if len(places) < 5 else (1, 2, len(places) - 1, len(places))
    exact = allowed.expected(trial.case)
    right: list[Any] = [exact.rows, *exact.columns, exact.scale, exact.bias]
    for wanted in (x for size in sizes for x in combinations(places, size)):
        ways: dict[str, Any] = {"": None}
        if not any(place >= count for place in wanted):
            ways["numbers for scale and bias"] = float
        for label, number in ways.items():
            got = trial.run(train=trial.train(wanted), number=number)
            gradients = got.gradients
            names = "argument " + ", ".join(map(str, wanted)) + " alone" * (len(wanted) < len(places))
            label = ", ".join(filter(None, (names, label)))
            if any(gradients[place] is None for place in wanted):
                yield label, wrong("a gradient is missing")
                continue
            if any(x is not None for place, x in enumerate(gradients) if place not in wanted):
                yield label, wrong("a frozen argument has a gradient")
            # in place of those that are frozen, what is right
            rows, *columns, scale, bias = (y if x is None else x for x, y in zip(gradients, right, strict=True))
            full = replace(got, rows=rows, columns=tuple(columns), scale=scale, bias=bias, by_autograd=True)
            yield label, trial.compare(full, trial.fields)
    seen: list[str] = []
    for label, made in _of_other_types(seen).items():
        learning, fields = (places[-1:], ["loss"]) if label.endswith("alone") else (places, trial.fields)
        call = trial.call(train=trial.train(learning))
        for each in (call.leaves, call.numbers):
            each[:] = [made(x.detach()).requires_grad_(x.requires_grad) if hasattr(x, "detach") else x for x in each]
        call.passed = call.leaves
        one = trial.loss.arrays.full((), 1.0, state_dtype(case.dtype), call.leaves[0])
        found = call.finish(call(), made(one))
        missing = any(found.gradients[place] is None for place in learning)
        yield label, wrong("a gradient is missing") if missing else trial.compare(found, fields)
    if case.facts is not None and trial.loss.block is None and not any("contrastile.loss" in x for x in seen):
        yield "a subclass of tensors", wrong("it saw no loss")


def _of_other_types(seen: list[str]) -> dict[str, Callable[[Array], Array]]:
    """What makes tensors of other types of a tensor, by name; ``seen`` are functions that were called on a subclass."""
    import torch

    class Derived(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            found: Any = super()
            return found.__torch_function__(function, types, args, kwargs or {})

    return {
        "parameters": torch.nn.Parameter,
        "a subclass of tensors": lambda x: x.as_subclass(Derived),
        "a subclass of tensors, the last alone": lambda x: x.as_subclass(Derived),
        "tensors with a lazy sign": lambda x: torch.ops.aten._neg_view(-x),
    }


def numbers(trial: LossTrial) -> Comparisons:
    """Scale and bias may be numbers of Python and NumPy and tensors of any shape with one element."""
    claims, given = trial.loss.claims, trial.case.arguments
    arrays, scalars = len(given.features) + len(given.negatives), 1 + (given.bias is not None)
    # one of a sign each in other dtypes than float32, of what takes every dtype the same way
    few = 2 if trial.case.facts is not None and trial.case.dtype != "float32" else 0
    for scale, bias in [*zip(_SCALES, _BIASES, strict=True)][few:]:
        here = trial.other(numbered(trial.case, scale, bias))
        for label, make, learns in _ways(trial, whole=scale == int(scale)):
            wanted = claims.scale_gradient and learns
            train = None if wanted else [*[claims.feature_gradients] * arrays, *[False] * scalars]
            fields = trial.fields if wanted else [x for x in trial.fields if x not in ("scale", "bias")]
            found = here.run(number=make, train=train)
            yield f"scale {scale:g} as {label}", here.compare(found, fields)
    if trial.case.arguments.bias is None:
        return
    name, has_default = _fourth(trial.loss.call)
    if name == "bias":
        call = trial.call()
        named = call.finish(call(lambda *args, **more: trial.loss.call(*args[:-1], bias=args[-1], **more)))
        yield "the bias by its name", trial.compare(named, trial.fields)
    if has_default:
        here = trial.other(replace(trial.case, arguments=replace(trial.case.arguments, bias=None)))
        yield "the bias left out", here.compare(here.run(), [x for x in trial.fields if x != "bias"])


def _ways(trial: LossTrial, *, whole: bool) -> Iterator[tuple[str, Callable[[float], Any], bool]]:
    """The ways to pass a number: a label, what makes it, and whether it may have a gradient."""
    yield "a float", float, False
    if whole:
        yield "an int", round, False
    yield "a numpy.float64", np.float64, False
    arrays, case = trial.loss.arrays, trial.case
    state = state_dtype(case.dtype)
    if state == "float32":
        yield "a numpy.float32", np.float32, False
    like = trial.call().leaves[0]
    kinds: list[tuple[tuple[int, ...], str]] = [((), state)]
    # beside a tensor of 16 bits a plain computation takes the dtype of one of shape (1,), not of one of shape ()
    if state == case.dtype or case.facts is not None:
        kinds.append(((1,), state))
    if case.facts is not None:
        yield "a fraction", Fraction, False
        kinds += [((1, 1), state), ((), "float64")]
    for shape, dtype in kinds:

        def make(x: float, shape: Any = shape, dtype: str = dtype) -> Array:
            return arrays.asarray(np.full(shape, x), dtype, like)

        # torch would take no gradient of what returns its own, and gives these for every number
        learns = trial.loss.claims.library == "torch"
        yield f"an array of shape {shape} in {dtype}", make, learns
        if learns and by_autograd(trial.loss.claims) == "":
            yield f"a frozen array of shape {shape} in {dtype}", make, False


def _fourth(call: Callable[..., Any]) -> tuple[str, bool]:
    """The name of the fourth parameter, and whether it has a default."""
    try:
        parameter = [*inspect.signature(call).parameters.values()][3]
    except (IndexError, TypeError, ValueError):
        return "", False
    return parameter.name, parameter.default is not inspect.Parameter.empty


def aliases(trial: LossTrial) -> Comparisons:
    """Features that are one tensor, or share a storage, have the loss and the gradients of equal ones apart."""
    case = trial.case
    given, claims = case.arguments, trial.loss.claims
    if len(given.features) != 2:
        raise SkipError("has one array of features")
    same = trial.other(replace(case, arguments=replace(given, features=(given.features[0],) * 2)))
    call = same.call()
    call.passed = [call.leaves[0]] * 2
    found = call.finish(call())
    if not found.by_autograd:
        yield "one array twice", same.compare(found, trial.fields)
    else:
        yield "one tensor twice", same.compare(found, ("loss",))
        if claims.feature_gradients:
            both, bound = (x.rows + x.columns[0] for x in (allowed.expected(same.case), same.bound()))
            error = np.abs(found.rows - both) if found.rows is not None else np.full(both.shape, np.inf)
            size = bound + UNIT[case.dtype] * (np.abs(both) + bound)
            yield "one tensor twice", Worst(float((error / size).max()), "the gradient", (), float(error.max()), 0.0)
        call = same.call()
        call.passed = [call.leaves[0], call.leaves[0].detach()]
        found = call.finish(call())
        found = replace(found, columns=same.result.columns)
        yield "a tensor and itself detached", same.compare(found, trial.fields)
    if len({x.shape for x in given.features}) > 1:
        return
    call = trial.call()
    joined = trial.loss.arrays.concat([x.detach() if hasattr(x, "detach") else x for x in call.leaves])
    b = len(given.features[0])
    if claims.by_autograd and claims.feature_gradients:
        joined = joined.requires_grad_()
    call.passed = [joined[:b], joined[b:]]
    found = call.finish(call())
    if found.by_autograd and claims.feature_gradients:
        gradient = np.array(trial.loss.arrays.to_numpy(joined.grad), dtype=np.float64)
        found = replace(found, rows=gradient[:b], columns=(gradient[b:],))
    yield "halves of one storage", trial.compare(found, trial.fields)
    yield from _of_one_storage(trial)


_LARGE = 1088, 16
"""Products of this shape with their own transpose are not symmetric in a common BLAS."""


def _of_one_storage(trial: LossTrial) -> Comparisons:
    """Features that are views of one array. A square and its transpose have one address, and other strides."""
    case, claims, arrays = trial.case, trial.loss.claims, trial.loss.arrays
    if not claims.strided:
        return
    sizes = [case.arguments.features[0].shape]
    # a backend's product, which every interface asks for, and none in blocks: one is enough
    if (claims.objective, case.dtype) == ("clip_loss", "float64") and case.facts is not None:
        sizes += [_LARGE] * (claims.returns_gradients and trial.loss.block is None)
    for b, d in sizes:
        width = d if (b, d) == _LARGE else max(b, d)
        base = round_to(np.random.default_rng([b, d]).standard_normal((2 * b, width)) / d**0.5, case.dtype)
        memory = arrays.asarray(base.copy(), case.dtype, trial.call().leaves[0])
        for label, views in _VIEWS.items():
            expected, given = views(base, b, d), views(memory, b, d)
            if expected[0].shape != expected[1].shape or claims.width(expected[0].shape[1]) != expected[0].shape[1]:
                continue
            if (b, d) == _LARGE and label != "one storage":
                continue
            here = trial.other(replace(case, arguments=replace(case.arguments, features=expected)))
            call = here.call()
            for x, leaf in zip(given, call.leaves, strict=True):
                if getattr(leaf, "requires_grad", False):
                    x.requires_grad_()
            call.leaves = call.passed = list(given)
            yield f"{label}, {b} x {expected[0].shape[1]}", here.compare(call.finish(call()), trial.fields)


_VIEWS: dict[str, Callable[[Array, int, int], tuple[Array, Array]]] = {
    "one storage": lambda x, b, d: (x[:b, :d], x[:b, :d]),
    "one row apart": lambda x, b, d: (x[:b, :d], x[1 : b + 1, :d]),
    "every other row": lambda x, b, d: (x[: 2 * b : 2, :d], x[:b, :d]),
    "a square and its transpose": lambda x, b, d: (x[:b, :b], x[:b, :b].T),
    "a transpose and its square": lambda x, b, d: (x[:b, :b].T, x[:b, :b]),
}
"""Pairs of matrices of b rows in one array."""


def autocast(trial: LossTrial) -> Comparisons:
    """In the caller's autocast it is a computation in autocast's dtype, which leaves float64 alone."""
    import torch

    case = trial.case
    if case.dtype == "float16":
        raise SkipError("autocast here is to bfloat16")
    if case.facts is not None and trial.loss.claims.by_autograd:
        # from the third call of a signature on others may compute the gradients
        calls = [trial.call() for _ in range(3)]
        *_, value = [call() for call in calls]
        with torch.autocast(trial.device, dtype=torch.bfloat16):
            yield "the backward pass alone", trial.compare(calls[-1].finish(value), trial.fields)
    with torch.autocast(trial.device, dtype=torch.bfloat16):
        if case.dtype != "float32":
            yield "", trial.compare(trial.run(), trial.fields)
            return
        # at a scale at which its errors are bounded
        given = replace(rounded(case.arguments, "bfloat16"), scale=2.0)
        narrow = trial.other(replace(case, arguments=given))
        # the second time its signature is known
        for call in (narrow.call(), narrow.call()):
            found = call.finish(call())
        returned = call.returned[1:] if isinstance(call.returned, tuple | list) else ()
        if any(x is not None and x.dtype != y.dtype for x, y in zip(returned, call.leaves, strict=False)):
            yield "", wrong("a gradient has another dtype than its argument")
        if not torch.is_autocast_enabled(trial.device):
            yield "", wrong("the caller's autocast is off")
    if case.facts is not None:
        features = [x for x in (found.rows, *found.columns) if x is not None]
        same = all(np.array_equal(x, round_to(x, "bfloat16"), equal_nan=True) for x in features)
        yield "", NOTHING if same else wrong("a gradient has bits that bfloat16 has not: nothing was narrowed")
    fields = trial.fields
    as_bfloat16 = replace(narrow.case, dtype="bfloat16", facts=None, claims=replace(case.claims, state=None))
    try:
        yield "", trial.other(as_bfloat16).compare(found, fields)
    except SkipError:
        yield "", NOTHING


def integers(trial: LossTrial) -> Comparisons:
    """Ids, positives and labels of each dtype, with its least and its largest numbers, are what they are in int64."""
    case, claims = trial.case, trial.loss.claims
    given = case.arguments
    for dtype in claims.integers:
        try:
            trial.loss.arrays.asarray(np.zeros(1, np.int64), dtype, trial.call().leaves[0])
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
            if claims.positives:
                changed = replace(changed, keywords={**changed.keywords, "positives": np.arange(b)[::-1].copy()})
        here = trial.other(replace(case, arguments=changed))
        yield dtype, here.compare(here.run(integers=dtype), trial.fields)
        yield f"{dtype}, every other element", here.compare(here.run(integers=dtype, step=2), trial.fields)


def refusals(trial: LossTrial) -> Comparisons:
    """A positive that is no column is an error, or makes NaN of the loss and of every gradient.

    So is a document of which no token counts; else the loss is no finite number.
    """
    given, masks = trial.case.arguments, trial.loss.claims.masks
    b, bad = len(given.features[0]), dict[str, dict[str, np.ndarray]]()
    for place in () if masks else (-1, b, -b):
        bad[f"a positive of {place} among {b} columns"] = {
            "positives": np.where(np.arange(b) == b // 2, place, np.arange(b))
        }
    if masks:
        counted = [np.ones(x.shape[:2], np.int64) for x in given.features]
        counted[1][b // 2] = 0
        bad["a document without tokens"] = dict(zip(MASKS, counted, strict=True))
    for label, keywords in bad.items():
        try:
            found = trial.other(replace(trial.case, arguments=replace(given, keywords=keywords))).run()
        except (ValueError, IndexError, RuntimeError):
            yield label, NOTHING
            continue
        numbers = [np.asarray(x) for x in (found.loss, *found.gradients) if x is not None]
        said = not np.isfinite(found.loss) if masks else all(np.isnan(x).any() for x in numbers)
        yield label, NOTHING if said else wrong("a number, where nothing is right")


def ties(trial: LossTrial) -> Comparisons:
    """Of a token that a document has twice, both gradients together are that of one."""
    query, document = trial.case.arguments.features
    given = replace(trial.case.arguments, features=(query, np.concatenate([document, document], axis=1)))
    found = trial.other(replace(trial.case, arguments=given)).run()
    if found.columns and found.columns[0] is not None:
        b, t, d = document.shape
        found = replace(found, columns=(found.columns[0].reshape(b, 2, t, d).sum(axis=1).reshape(b * t, d),))
    yield "", trial.compare(found, trial.fields)


def queues(trial: LossTrial) -> Comparisons:
    """Negatives may be a tuple, one array twice, the key again, or empty, and learn whatever the query does."""
    case = trial.case
    rows, width = trial.shape
    hard = build("negatives", case.dtype, case.claims, case.facts).arguments.negatives[0]
    first, second = (hard[at : at + rows, :width] for at in (0, 2))
    key, nothing = case.arguments.features[1], np.zeros((0, width))
    ways: dict[str, tuple[Any, Sequence[int]]] = {
        "a tuple": ((first, second), (0, 1)),
        "one array twice": ((first, first), (0, 0)),
        "the key again": ((key,), (-1,)),
        "an empty sequence": ((), ()),
        "a queue that is empty": ((nothing,), (0,)),
    }
    for label, (negatives, which) in ways.items():
        here = trial.other(replace(case, arguments=replace(case.arguments, negatives=negatives)))
        call = here.call()
        own = call.leaves[call.count :]
        call.passed = [*call.leaves[: call.count], *(own[i] if i >= 0 else call.leaves[1] for i in which)]
        call.sequence = tuple
        found = call.finish(call())
        if len(set(which)) < len(which) or -1 in which:
            # its gradients are sums
            yield label, here.compare(found, ("loss", "rows", "scale"))
            continue
        yield label, here.compare(found, trial.fields)
        if found.by_autograd and which:
            frozen = here.run(train=here.train([2]))
            yield f"{label}, the query frozen", NOTHING if frozen.columns[1] is not None else wrong("no gradient")


PROPERTIES = ONE_CALL | {
    each.name: each
    for each in (
        LossProperty("leaves", leaves, CALLS, claim=by_autograd),
        LossProperty("numbers", numbers, CALLS, claim=claimed("numbers", "numbers, or tensors of shape (1,)")),
        LossProperty("interleaved", repeating.interleaved, CALLS),
        LossProperty("rewritten", repeating.rewritten, CALLS),
        LossProperty(
            "retained",
            *(repeating.retained, CALLS),
            claim=lambda x: by_autograd(x) or claimed("retains", "a graph that is retained")(x),
        ),
        LossProperty("aliases", aliases, CALLS),
        LossProperty(
            "autocast",
            *(autocast, CALLS),
            claim=claimed(lambda x: x.autocast and x.library == "torch", "torch tensors and the caller's autocast"),
        ),
        LossProperty(
            "settings", repeating.settings, CALLS, claim=claimed("deterministic", "the same bits for the same inputs")
        ),
        LossProperty("repeats", repeating.repeats, CALLS),
        LossProperty("leaks", repeating.leaks, CALLS),
        LossProperty(
            "integers", integers, CALLS, claim=claimed(lambda x: x.ids or x.objective == "sup_con", "integers")
        ),
        LossProperty("queues", queues, CALLS, claim=claimed("negatives", "negatives")),
        LossProperty("threads", repeating.threads, CALLS),
        LossProperty(
            "refusals", refusals, CALLS, claim=claimed(lambda x: x.positives or x.masks, "positives, or masks")
        ),
        LossProperty("ties", ties, CALLS, claim=claimed(lambda x: x.objective == "maxsim", "tokens")),
    )
}
"""All properties on one process, by name: those of one call, and of several."""
