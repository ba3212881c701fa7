"""Every public loss in a process alone, by each of its interfaces: nothing above the backends may be wrong either."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from contrastile import evaluation
from contrastile.backends.arrays import NumpyArrays
from contrastile.backends.contract import Array
from contrastile.oracle.arrays import IntArray
from contrastile.problems import FEW
from contrastile.validation import INTEGERS
from contrastile.verify import frontdoor
from contrastile.verify.arithmetic import Spread
from contrastile.verify.comparison import NOTHING, Comparisons, Worst, wrong
from contrastile.verify.draws import FAR
from contrastile.verify.frontdoor import BATCH, FORMS, Call, Leaves
from contrastile.verify.trial import Property, Subject
from contrastile.verify.truth import Outcome

CASE = "public-losses"
UPSTREAM = -2.5
_BLOCK = 9


def _check(name: str, subject: Subject) -> Comparisons:
    for call in _calls(name, subject):
        checks = [_by_value_and_grad, _held]
        if subject.backend.arrays.name == "torch":
            checks += [_by_autograd, _rewritten, _of_numpy]
        for check in checks:
            yield from ((f"{call.label}, {label}", worst) for label, worst in check(call, subject))


def _calls(name: str, subject: Subject) -> Iterator[Call]:
    random = np.random.default_rng([subject.seed, zlib.crc32(name.encode())])
    yield from FORMS[name](random, [BATCH], subject.dtype)
    if name == "sup-con" and subject.dtype == "float32":
        # more samples than are taken in any order
        yield from (replace(call, label="many") for call in FORMS[name](random, [FEW + 7], subject.dtype))


def _judged(call: Call, subject: Subject, found: Outcome, *, autograd: bool = False, **how: Any) -> Worst:
    return frontdoor.judge(call, subject, [found], how.pop("spread", None), autograd=autograd, **how)


def _by_value_and_grad(call: Call, subject: Subject) -> Comparisons:
    arrays, given, put = subject.backend.arrays, call.cut.problem, frontdoor.putter(subject)

    def computed(put: frontdoor.Putter, call: Call = call) -> Worst:
        return _judged(call, subject, frontdoor.by_value_and_grad(call, call.cut.problem, subject, put))

    def transposed(x: Any) -> Array:
        if isinstance(x, list):
            return [transposed(each) for each in x]
        return arrays.contiguous(put(x).T).T if getattr(x, "ndim", 0) == 2 else put(x)

    yield "value_and_grad", computed(put)
    yield "transposed features", computed(transposed)
    if given.row_ids is None or given.column_ids is None:
        return
    for dtype in INTEGERS:
        try:
            put(np.zeros(1, np.int64), dtype)
        except (AttributeError, TypeError):
            # this version of the library has none
            continue
        table, names = _ids(dtype), np.unique(np.concatenate([given.row_ids, given.column_ids]))
        if len(names) > len(table):
            continue
        row_ids, column_ids = (table[np.searchsorted(names, x)] for x in (given.row_ids, given.column_ids))
        other = replace(call.cut, problem=replace(given, row_ids=row_ids, column_ids=column_ids))
        yield f"ids of {dtype}", computed(put, replace(call, cut=other))


def _ids(dtype: str) -> IntArray:
    """Different integers of a dtype, its least and its largest among them."""
    info = np.iinfo(dtype)
    edges = [info.min, info.min + 1, info.max, info.max - 1, info.max // 2, info.max // 2 + 1]
    more = FAR if dtype == "int64" else np.arange(3, 60)
    # an array of this dtype: the public function is given no other
    return np.array(list(dict.fromkeys([*edges, *more.tolist(), *range(3, 60)])), dtype=dtype)


def _held(call: Call, subject: Subject) -> Comparisons:
    """Neither another call nor the caller, who may write to what he was given, changes results or arguments."""
    arrays, part, put = subject.backend.arrays, call.cut.problem, frontdoor.putter(subject)
    features, labels, named = call.arguments(part)
    numbers = [put(np.asarray(x).reshape(1), "float32") for x in (part.scale, part.bias) if x is not None]
    others, given = {k: put(x) for k, x in named.items()}, [*map(put, (*features, *labels)), *numbers]
    both = evaluation.value_and_grad(call.loss, backend=subject.name, **subject.settings)

    def bits(found: Any) -> list[bytes]:
        return [arrays.to_numpy(x).tobytes() for x in found]

    before = bits(given)
    value, gradients = both(*given, **others)
    results = [value, *gradients]
    yield "a scale of shape (1,)", _judged(call, subject, _outcome(call, subject, value, list(gradients)))
    first = bits(results)
    both(*(put(x[::-1].copy()) for x in features), *given[len(features) :], **others)
    yield "results after another call", NOTHING if bits(results) == first else wrong("they were changed")
    for x in gradients:
        if x.shape:
            x[...] = 7
    yield "arguments", NOTHING if bits(given) == before else wrong("they were changed")
    value, gradients = both(*given, **others)
    same = bits([value, *gradients]) == first
    yield "after its results were written to", NOTHING if same else wrong("a call gives other bits")


def _outcome(call: Call, subject: Subject, value: Array, gradients: list[Array]) -> Outcome:
    features, *_ = call.arguments(call.cut.problem)
    return frontdoor.outcome(subject, call, value, gradients, len(features))


def _by_autograd(call: Call, subject: Subject) -> Comparisons:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """A mode that must see operators."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    leaves = Leaves.of(call, call.cut.problem, subject)

    def judged(value: Array, gradients: list[Array], **how: Any) -> Worst:
        found = leaves.outcome(subject, value, gradients)
        return _judged(call, subject, found, autograd=True, upstream=UPSTREAM, **how)

    def differentiated(train: list[Array], **settings: Any) -> tuple[Array, list[Array]]:
        for x in leaves.every:
            x.grad = None
            x.requires_grad_(any(x is each for each in train))
        value = leaves.loss(*leaves.every, **settings)
        (UPSTREAM * value).backward()
        return value.detach(), [x.grad for x in leaves.every]

    value, whole = differentiated(leaves.every)
    yield "autograd", judged(value, whole)
    for place, leaf in enumerate(leaves.every):
        # of the others, which are frozen, what was right before
        found = [*whole]
        found[place] = differentiated([leaf])[1][place]
        label = f"argument {place} alone"
        yield label, wrong("it has no gradient") if found[place] is None else judged(value, found)
    with Seen():  # type: ignore[no-untyped-call]
        seen = differentiated(leaves.every)
    yield "autograd under a dispatch mode", judged(*seen)
    size = len(call.cut.problem.rows)
    pieces = tuple(min(_BLOCK, size - start) for start in range(0, size, _BLOCK))
    blocks = differentiated(leaves.every, block=_BLOCK)
    yield f"blocks of {_BLOCK}", judged(*blocks, spread=Spread(pieces, pieces * len(call.cut.problem.columns)))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            alone = leaves.loss(*leaves.every)
        yield mode.__name__, judged(alone, whole, fields=("loss",))
    if subject.dtype in ("float64", "bfloat16"):
        # which autocast leaves as they are
        with torch.autocast(subject.device, dtype=torch.bfloat16):
            narrow = differentiated(leaves.every)
        yield "autocast", judged(*narrow)
    tensors = [x.detach() for x in leaves.every]
    scaled: Callable[..., Array] = lambda *given: UPSTREAM * leaves.loss(*given)  # noqa: E731
    yield "torch.func.grad", judged(value, list(torch.func.grad(scaled, tuple(range(len(tensors))))(*tensors)))


def _rewritten(call: Call, subject: Subject) -> Comparisons:
    """Features that are written to between the passes are an error, or have the gradients of their old values."""
    import torch

    leaves = Leaves.of(call, call.cut.problem, subject)
    value = leaves.loss(*(x.requires_grad_() for x in leaves.every))
    with torch.no_grad():
        leaves.features[0].mul_(1.5)
    label = "features written to before the backward pass"
    try:
        value.backward()
    except RuntimeError:
        yield label, NOTHING
        return
    found = leaves.outcome(subject, value, [x.grad for x in leaves.every])
    yield label, _judged(call, subject, found, autograd=True)


def _of_numpy(call: Call, subject: Subject) -> Comparisons:
    if subject.device != "cpu" or subject.dtype == "bfloat16":
        return
    put = frontdoor.putter(subject, NumpyArrays(np))
    yield "NumPy arrays", _judged(call, subject, frontdoor.by_value_and_grad(call, call.cut.problem, subject, put))


def _property(name: str) -> Property:
    def held(subject: Subject, case: str) -> Comparisons:
        yield from _check(name, subject)

    held.__doc__ = f"The public {name.replace('-', '_')} is right by each interface, and its results are the caller's."
    return Property(f"public-{name}", held, CASE)


PROPERTIES = tuple(map(_property, FORMS))
"""One property per loss, in their order."""
