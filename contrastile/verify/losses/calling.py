"""The properties of calls: a loss is right for every kind of argument and every choice of gradients."""

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
    """Every subset of the gradients is right, with a scale that is a tensor or a number."""
    case, claims = trial.case, trial.loss.claims
    b, width = trial.shape
    # Use a shape that no earlier call had, because the first call of a shape wants the fewest gradients.
    trial = trial.resized(claims.batch(b + 1) or b, width, 6)
    arguments = trial.case.arguments
    count = len(arguments.features) + len(arguments.negatives)
    scalars = 1 + (arguments.bias is not None)
    indices = [*(range(count) if claims.feature_gradients else ()), *(range(count, count + scalars))]
    indices = indices if claims.scale_gradient else indices[:count]
    sizes = range(1, len(indices) + 1) if len(indices) < 5 else (1, 2, len(indices) - 1, len(indices))
    expected = allowed.expected(trial.case)
    exact: list[Any] = [expected.rows, *expected.columns, expected.scale, expected.bias]
    for trained in (x for size in sizes for x in combinations(indices, size)):
        conversions: dict[str, Any] = {"": None}
        if not any(index >= count for index in trained):
            conversions["numbers for scale and bias"] = float
        for label, convert in conversions.items():
            result = trial.run(train=trial.train(trained), number=convert)
            gradients = result.gradients
            description = "argument " + ", ".join(map(str, trained)) + " alone" * (len(trained) < len(indices))
            label = ", ".join(filter(None, (description, label)))
            if any(gradients[index] is None for index in trained):
                yield label, wrong("a gradient is missing")
                continue
            if any(x is not None for index, x in enumerate(gradients) if index not in trained):
                yield label, wrong("a frozen argument has a gradient")
            # The exact gradients stand in for those of frozen arguments.
            rows, *columns, scale, bias = (y if x is None else x for x, y in zip(gradients, exact, strict=True))
            full = replace(result, rows=rows, columns=tuple(columns), scale=scale, bias=bias, by_autograd=True)
            yield label, trial.compare(full, trial.fields)
    functions: list[str] = []
    for label, convert in _tensor_conversions(functions).items():
        selected, fields = (indices[-1:], ["loss"]) if label.endswith("alone") else (indices, trial.fields)
        call = trial.call(train=trial.train(selected))
        for xs in (call.leaves, call.numbers):
            xs[:] = [convert(x.detach()).requires_grad_(x.requires_grad) if hasattr(x, "detach") else x for x in xs]
        call.passed = call.leaves
        upstream = trial.loss.arrays.full((), 1.0, state_dtype(case.dtype), call.leaves[0])
        result = call.finish(call(), convert(upstream))
        is_missing = any(result.gradients[index] is None for index in selected)
        yield label, wrong("a gradient is missing") if is_missing else trial.compare(result, fields)
    if case.facts is not None and trial.loss.block is None and not any("contrastile.loss" in x for x in functions):
        yield "a subclass of tensors", wrong("it saw no loss")


def _tensor_conversions(functions: list[str]) -> dict[str, Callable[[Array], Array]]:
    """Conversions of a tensor to other types, by name; the subclass adds each torch function that it sees."""
    import torch

    class Derived(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            functions.append(str(function))
            parent: Any = super()
            return parent.__torch_function__(function, types, args, kwargs or {})

    return {
        "parameters": torch.nn.Parameter,
        "a subclass of tensors": lambda x: x.as_subclass(Derived),
        "a subclass of tensors, the last alone": lambda x: x.as_subclass(Derived),
        "tensors with a lazy sign": lambda x: torch.ops.aten._neg_view(-x),
    }


def numbers(trial: LossTrial) -> Comparisons:
    """Scale and bias may be numbers of Python and NumPy and tensors of any shape with one element."""
    claims, arguments = trial.loss.claims, trial.case.arguments
    count, scalars = len(arguments.features) + len(arguments.negatives), 1 + (arguments.bias is not None)
    # The package treats all dtypes alike: beyond float32, one scale of each sign is enough.
    first = 2 if trial.case.facts is not None and trial.case.dtype != "float32" else 0
    for scale, bias in [*zip(_SCALES, _BIASES, strict=True)][first:]:
        variant = trial.other(numbered(trial.case, scale, bias))
        for label, convert, is_trainable in _number_conversions(trial, is_integer=scale == int(scale)):
            has_gradient = claims.scale_gradient and is_trainable
            train = None if has_gradient else [*[claims.feature_gradients] * count, *[False] * scalars]
            fields = trial.fields if has_gradient else [x for x in trial.fields if x not in ("scale", "bias")]
            result = variant.run(number=convert, train=train)
            yield f"scale {scale:g} as {label}", variant.compare(result, fields)
    if trial.case.arguments.bias is None:
        return
    name, has_default = _fourth_parameter(trial.loss.call)
    if name == "bias":
        call = trial.call()
        result = call.finish(call(lambda *args, **keywords: trial.loss.call(*args[:-1], bias=args[-1], **keywords)))
        yield "the bias by its name", trial.compare(result, trial.fields)
    if has_default:
        variant = trial.other(replace(trial.case, arguments=replace(trial.case.arguments, bias=None)))
        yield "the bias left out", variant.compare(variant.run(), [x for x in trial.fields if x != "bias"])


def _number_conversions(trial: LossTrial, *, is_integer: bool) -> Iterator[tuple[str, Callable[[float], Any], bool]]:
    """The ways to pass a number: a label, a conversion from float, and whether the result may have a gradient."""
    yield "a float", float, False
    if is_integer:
        yield "an int", round, False
    yield "a numpy.float64", np.float64, False
    arrays, case = trial.loss.arrays, trial.case
    state = state_dtype(case.dtype)
    if state == "float32":
        yield "a numpy.float32", np.float32, False
    like = trial.call().leaves[0]
    shapes_and_dtypes: list[tuple[tuple[int, ...], str]] = [((), state)]
    # Beside a 16-bit tensor, a number of shape (1,) changes the dtype of a plain computation; one of shape () does not.
    if state == case.dtype or case.facts is not None:
        shapes_and_dtypes.append(((1,), state))
    if case.facts is not None:
        yield "a fraction", Fraction, False
        shapes_and_dtypes += [((1, 1), state), ((), "float64")]
    for shape, dtype in shapes_and_dtypes:

        def make(x: float, shape: Any = shape, dtype: str = dtype) -> Array:
            return arrays.asarray(np.full(shape, x), dtype, like)

        # A torch loss that returns its gradients returns one for every tensor, frozen or not.
        is_trainable = trial.loss.claims.library == "torch"
        yield f"an array of shape {shape} in {dtype}", make, is_trainable
        if is_trainable and by_autograd(trial.loss.claims) == "":
            yield f"a frozen array of shape {shape} in {dtype}", make, False


def _fourth_parameter(call: Callable[..., Any]) -> tuple[str, bool]:
    """The name of the fourth parameter, and whether it has a default."""
    try:
        parameter = [*inspect.signature(call).parameters.values()][3]
    except (IndexError, TypeError, ValueError):
        return "", False
    return parameter.name, parameter.default is not inspect.Parameter.empty


def aliases(trial: LossTrial) -> Comparisons:
    """Features that are one tensor, or share a storage, have the loss and the gradients of separate equal features."""
    case = trial.case
    arguments, claims = case.arguments, trial.loss.claims
    if len(arguments.features) != 2:
        raise SkipError("has one array of features")
    shared = trial.other(replace(case, arguments=replace(arguments, features=(arguments.features[0],) * 2)))
    call = shared.call()
    call.passed = [call.leaves[0]] * 2
    result = call.finish(call())
    if not result.by_autograd:
        yield "one array twice", shared.compare(result, trial.fields)
    else:
        yield "one tensor twice", shared.compare(result, ("loss",))
        if claims.feature_gradients:
            exact, bound = (x.rows + x.columns[0] for x in (allowed.expected(shared.case), shared.bound()))
            error = np.abs(result.rows - exact) if result.rows is not None else np.full(exact.shape, np.inf)
            size = bound + UNIT[case.dtype] * (np.abs(exact) + bound)
            yield "one tensor twice", Worst(float((error / size).max()), "the gradient", (), float(error.max()), 0.0)
        call = shared.call()
        call.passed = [call.leaves[0], call.leaves[0].detach()]
        result = call.finish(call())
        result = replace(result, columns=shared.result.columns)
        yield "a tensor and itself detached", shared.compare(result, trial.fields)
    if len({x.shape for x in arguments.features}) > 1:
        return
    call = trial.call()
    storage = trial.loss.arrays.concat([x.detach() if hasattr(x, "detach") else x for x in call.leaves])
    b = len(arguments.features[0])
    if claims.by_autograd and claims.feature_gradients:
        storage = storage.requires_grad_()
    call.passed = [storage[:b], storage[b:]]
    result = call.finish(call())
    if result.by_autograd and claims.feature_gradients:
        d_storage = np.array(trial.loss.arrays.to_numpy(storage.grad), dtype=np.float64)
        result = replace(result, rows=d_storage[:b], columns=(d_storage[b:],))
    yield "halves of one storage", trial.compare(result, trial.fields)
    yield from _views_of_one_array(trial)


_LARGE = 1088, 16
"""A common BLAS computes the product of a matrix of this shape with its own transpose asymmetrically."""


def _views_of_one_array(trial: LossTrial) -> Comparisons:
    """Features that are views of one array. A square matrix and its transpose differ in their strides alone."""
    case, claims, arrays = trial.case, trial.loss.claims, trial.loss.arrays
    if not claims.strided:
        return
    sizes = [case.arguments.features[0].shape]
    # Every interface uses the backend's product, and blocks never have this shape: test it once.
    if (claims.objective, case.dtype) == ("clip_loss", "float64") and case.facts is not None:
        sizes += [_LARGE] * (claims.returns_gradients and trial.loss.block is None)
    for b, d in sizes:
        width = d if (b, d) == _LARGE else max(b, d)
        base = round_to(np.random.default_rng([b, d]).standard_normal((2 * b, width)) / d**0.5, case.dtype)
        storage = arrays.asarray(base.copy(), case.dtype, trial.call().leaves[0])
        for label, views in _VIEWS.items():
            features, tensors = views(base, b, d), views(storage, b, d)
            if features[0].shape != features[1].shape or claims.width(features[0].shape[1]) != features[0].shape[1]:
                continue
            if (b, d) == _LARGE and label != "one storage":
                continue
            variant = trial.other(replace(case, arguments=replace(case.arguments, features=features)))
            call = variant.call()
            for x, leaf in zip(tensors, call.leaves, strict=True):
                if getattr(leaf, "requires_grad", False):
                    x.requires_grad_()
            call.leaves = call.passed = list(tensors)
            yield f"{label}, {b} x {features[0].shape[1]}", variant.compare(call.finish(call()), trial.fields)


_VIEWS: dict[str, Callable[[Array, int, int], tuple[Array, Array]]] = {
    "one storage": lambda x, b, d: (x[:b, :d], x[:b, :d]),
    "one row apart": lambda x, b, d: (x[:b, :d], x[1 : b + 1, :d]),
    "every other row": lambda x, b, d: (x[: 2 * b : 2, :d], x[:b, :d]),
    "a square and its transpose": lambda x, b, d: (x[:b, :b], x[:b, :b].T),
    "a transpose and its square": lambda x, b, d: (x[:b, :b].T, x[:b, :b]),
}
"""Pairs of matrices of b rows that are views of one array."""


def autocast(trial: LossTrial) -> Comparisons:
    """Under the caller's autocast the loss computes in the dtype of autocast, except that float64 stays float64."""
    import torch

    case = trial.case
    if case.dtype == "float16":
        raise SkipError("autocast here is to bfloat16")
    if case.facts is not None and trial.loss.claims.by_autograd:
        # From the third call of a signature on, another path may compute the gradients.
        calls = [trial.call() for _ in range(3)]
        *_, value = [call() for call in calls]
        with torch.autocast(trial.device, dtype=torch.bfloat16):
            yield "the backward pass alone", trial.compare(calls[-1].finish(value), trial.fields)
    with torch.autocast(trial.device, dtype=torch.bfloat16):
        if case.dtype != "float32":
            yield "", trial.compare(trial.run(), trial.fields)
            return
        # At this scale the error bounds of bfloat16 are finite.
        arguments = replace(rounded(case.arguments, "bfloat16"), scale=2.0)
        variant = trial.other(replace(case, arguments=arguments))
        # The second call has a known signature.
        for call in (variant.call(), variant.call()):
            result = call.finish(call())
        returned = call.returned[1:] if isinstance(call.returned, tuple | list) else ()
        if any(x is not None and x.dtype != y.dtype for x, y in zip(returned, call.leaves, strict=False)):
            yield "", wrong("a gradient has another dtype than its argument")
        if not torch.is_autocast_enabled(trial.device):
            yield "", wrong("the caller's autocast is off")
    if case.facts is not None:
        features = [x for x in (result.rows, *result.columns) if x is not None]
        is_bfloat16 = all(np.array_equal(x, round_to(x, "bfloat16"), equal_nan=True) for x in features)
        yield "", NOTHING if is_bfloat16 else wrong("a gradient has bits that bfloat16 has not: nothing was narrowed")
    fields = trial.fields
    bfloat16_case = replace(variant.case, dtype="bfloat16", facts=None, claims=replace(case.claims, state=None))
    try:
        yield "", trial.other(bfloat16_case).compare(result, fields)
    except SkipError:
        yield "", NOTHING


def integers(trial: LossTrial) -> Comparisons:
    """Ids, positives and labels of each dtype, up to its smallest and largest numbers, give the results of int64."""
    case, claims = trial.case, trial.loss.claims
    arguments = case.arguments
    for dtype in claims.integers:
        try:
            trial.loss.arrays.asarray(np.zeros(1, np.int64), dtype, trial.call().leaves[0])
        except (AttributeError, TypeError):
            # This version of the library lacks the dtype.
            continue
        info = np.iinfo(dtype)
        limits = [info.min, info.min + 1, info.max, info.max - 1, info.max // 2, info.max // 2 + 1]
        far = FAR.tolist() if dtype == "int64" else []
        table = np.array(list(dict.fromkeys([*limits, *far, *range(3, 60)])), np.int64 if info.max < 2**63 else dtype)
        b = len(arguments.features[0])
        ids = table[np.arange(b) * 7 % (b // 2 + 1) % len(table)]
        if claims.objective == "sup_con":
            changed = replace(arguments, labels=ids)
        else:
            names = ("row_ids", "column_ids") if claims.objective == "info_nce" else ("ids",)
            changed = replace(arguments, keywords=dict.fromkeys(names, ids))
            if claims.positives:
                changed = replace(changed, keywords={**changed.keywords, "positives": np.arange(b)[::-1].copy()})
        variant = trial.other(replace(case, arguments=changed))
        yield dtype, variant.compare(variant.run(integers=dtype), trial.fields)
        yield f"{dtype}, every other element", variant.compare(variant.run(integers=dtype, step=2), trial.fields)


def refusals(trial: LossTrial) -> Comparisons:
    """A positive that is no column is an error, or turns the loss and every gradient into NaN.

    A document in which no token counts is an error, or makes the loss infinite or NaN.
    """
    arguments, masks = trial.case.arguments, trial.loss.claims.masks
    b, invalid = len(arguments.features[0]), dict[str, dict[str, np.ndarray]]()
    for position in () if masks else (-1, b, -b):
        invalid[f"a positive of {position} among {b} columns"] = {
            "positives": np.where(np.arange(b) == b // 2, position, np.arange(b))
        }
    if masks:
        token_masks = [np.ones(x.shape[:2], np.int64) for x in arguments.features]
        token_masks[1][b // 2] = 0
        invalid["a document without tokens"] = dict(zip(MASKS, token_masks, strict=True))
    for label, keywords in invalid.items():
        try:
            result = trial.other(replace(trial.case, arguments=replace(arguments, keywords=keywords))).run()
        except (ValueError, IndexError, RuntimeError):
            yield label, NOTHING
            continue
        numbers = [np.asarray(x) for x in (result.loss, *result.gradients) if x is not None]
        is_refused = not np.isfinite(result.loss) if masks else all(np.isnan(x).any() for x in numbers)
        yield label, NOTHING if is_refused else wrong("a number, where nothing is right")


def ties(trial: LossTrial) -> Comparisons:
    """Where a document has each token twice, the gradients of both copies add up to that of one token."""
    query, document = trial.case.arguments.features
    arguments = replace(trial.case.arguments, features=(query, np.concatenate([document, document], axis=1)))
    result = trial.other(replace(trial.case, arguments=arguments)).run()
    if result.columns and result.columns[0] is not None:
        b, t, d = document.shape
        result = replace(result, columns=(result.columns[0].reshape(b, 2, t, d).sum(axis=1).reshape(b * t, d),))
    yield "", trial.compare(result, trial.fields)


def queues(trial: LossTrial) -> Comparisons:
    """Negatives may be a tuple, one array twice, the key again, or empty, and have gradients if the query is frozen."""
    case = trial.case
    rows, width = trial.shape
    hard_negatives = build("negatives", case.dtype, case.claims, case.facts).arguments.negatives[0]
    first, second = (hard_negatives[start : start + rows, :width] for start in (0, 2))
    key, empty = case.arguments.features[1], np.zeros((0, width))
    variants: dict[str, tuple[Any, Sequence[int]]] = {
        "a tuple": ((first, second), (0, 1)),
        "one array twice": ((first, first), (0, 0)),
        "the key again": ((key,), (-1,)),
        "an empty sequence": ((), ()),
        "a queue that is empty": ((empty,), (0,)),
    }
    for label, (negatives, indices) in variants.items():
        variant = trial.other(replace(case, arguments=replace(case.arguments, negatives=negatives)))
        call = variant.call()
        queue = call.leaves[call.count :]
        call.passed = [*call.leaves[: call.count], *(queue[i] if i >= 0 else call.leaves[1] for i in indices)]
        call.sequence = tuple
        result = call.finish(call())
        if len(set(indices)) < len(indices) or -1 in indices:
            # An array that is passed twice has the sum of two gradients.
            yield label, variant.compare(result, ("loss", "rows", "scale"))
            continue
        yield label, variant.compare(result, trial.fields)
        if result.by_autograd and indices:
            frozen = variant.run(train=variant.train([2]))
            yield f"{label}, the query frozen", NOTHING if frozen.columns[1] is not None else wrong("no gradient")


PROPERTIES = ONE_CALL | {
    prop.name: prop
    for prop in (
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
"""All properties of a loss on one process, by name: those of one call and of several calls."""
