"""Every public loss with a group: each rank calls the public function with its part of the batch."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from contrastile import evaluation, losses
from contrastile.backends.arrays import ArrayLibrary, library_of
from contrastile.backends.contract import Array, state_dtype
from contrastile.comm.communicator import Communicator, ExchangeError, MismatchError
from contrastile.oracle.arrays import FloatArray
from contrastile.schedules.placement import Shards
from contrastile.schedules.problem import Problem
from contrastile.verify.arithmetic import Spread
from contrastile.verify.bounds import bounds
from contrastile.verify.comparison import NOTHING, Comparisons, Worst, compare, wrong
from contrastile.verify.draws import FAR, Draw, unit
from contrastile.verify.execution import on_device, taken
from contrastile.verify.rearrange import folded
from contrastile.verify.rounding import UNDERFLOW, UNIT, round_to
from contrastile.verify.shards import Cut, shares
from contrastile.verify.trial import Property, SkipError, Subject
from contrastile.verify.truth import Outcome, masks, truth
from contrastile.verify.worlds import judged

CASE = "front-door"
MISTAKES = "mistakes"
BATCH, _WIDTH = 23, 20
GRADIENTS = ("loss", "rows", "columns", "scale", "bias")


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a public loss on every rank.

    Attributes:
        label: which form of the loss.
        loss: the public function.
        cut: the whole problem and its parts.
        arguments: a rank's part -> the features (positional), the labels that follow them, and the keywords.
        both: whether the features are both rows and columns, so that their gradient is the sum of both.
        frozen: index of the first column block that needs no gradient.
    """

    label: str
    loss: Callable[..., Any]
    cut: Cut
    arguments: Callable[[Problem], tuple[list[Any], list[Any], dict[str, Any]]]
    both: bool = False
    frozen: int = 99


Sizes = Sequence[int]


def _features(draw: Draw, size: int, dtype: str) -> FloatArray:
    return round_to(unit(draw.standard_normal((size, _WIDTH))), dtype)


def _whole(rows: FloatArray, columns: Sequence[FloatArray], dtype: str, weight: FloatArray, **more: Any) -> Problem:
    """The problem that the public function states for the joined batch."""
    weight = round_to(weight, state_dtype(dtype))
    scale = np.float64(12.5)
    return Problem(rows, tuple(columns), scale, weight, np.ones(len(rows)), **more)


def _cut(problem: Problem, rows: Sizes, *columns: Sizes) -> Cut:
    """Parts of exactly these sizes, one list per column block."""
    return Cut(problem, Shards(tuple(rows), tuple(zip(*columns, strict=True))))


def _clip(draw: Draw, sizes: Sizes, dtype: str) -> Iterator[Call]:
    b = sum(sizes)
    image, text = (_features(draw, b, dtype) for _ in range(2))
    half = np.full(b, 0.5 / b)
    both_ways: dict[str, Any] = {"column_weight": round_to(half, state_dtype(dtype)), "column_target": np.ones(b)}
    ids = FAR[draw.integers(0, b // 2, b) % len(FAR)]
    for label, same in (("plain", None), ("ids", ids)):
        pairs = {"positives": np.arange(b), "row_ids": same, "column_ids": same}
        whole = _whole(image, [text], dtype, half, **pairs, **both_ways)
        yield Call(label, losses.clip_loss, _cut(whole, sizes, sizes), _pair)


def _pair(p: Problem) -> tuple[list[Any], list[Any], dict[str, Any]]:
    return [p.rows, p.columns[0]], [], {"ids": p.row_ids}


def _sigmoid(draw: Draw, sizes: Sizes, dtype: str) -> Iterator[Call]:
    b = sum(sizes)
    image, text = (_features(draw, b, dtype) for _ in range(2))
    ids = FAR[draw.integers(0, b // 2, b) % len(FAR)]
    for label, same in (("plain", None), ("ids", ids)):
        pairs: dict[str, Any] = {"positives": np.arange(b), "row_ids": same, "column_ids": same}
        whole = _whole(image, [text], dtype, np.full(b, 1.0 / b), kind="sigmoid", bias=np.float64(-2.5), **pairs)
        yield Call(label, losses.sigmoid_loss, _cut(whole, sizes, sizes), _pair)


def _info_nce(draw: Draw, sizes: Sizes, dtype: str) -> Iterator[Call]:
    m, n = sum(sizes), len(sizes)
    query, key, hard = (_features(draw, m, dtype) for _ in range(3))
    # a queue whose parts match no rank's rows
    queue = _features(draw, m + 5, dtype)
    of_queue = shares(m + 5, draw.integers(0, 4, n).tolist())
    weight = np.full(m, 1.0 / m)
    plain = _whole(query, [key], dtype, weight, positives=np.arange(m))
    yield Call("plain", losses.info_nce, _cut(plain, sizes, sizes), partial(_columns, implied=True))
    elsewhere = replace(plain, positives=draw.permutation(m))
    yield Call("positives on other ranks", losses.info_nce, _cut(elsewhere, sizes, sizes), _columns)
    keys_apart = list(reversed(sizes))
    yield Call("keys apart from their queries", losses.info_nce, _cut(elsewhere, sizes, keys_apart), _columns)
    more = replace(plain, columns=(key, hard), positives=draw.integers(0, 2 * m, m))
    yield Call("negatives", losses.info_nce, _cut(more, sizes, sizes, sizes), _columns)
    ids = {"row_ids": draw.integers(0, m, m), "column_ids": draw.integers(0, m, 2 * m + 5)}
    waiting = replace(plain, columns=(key, queue), positives=np.arange(m), row_ids=ids["row_ids"])
    waiting = replace(waiting, column_ids=ids["column_ids"])
    cut = _cut(waiting, sizes, sizes, of_queue)
    yield Call("ids and a queue without gradient", losses.info_nce, cut, _columns, frozen=1)


def _columns(p: Problem, *, implied: bool = False) -> tuple[list[Any], list[Any], dict[str, Any]]:
    given = {"negatives": list(p.columns[1:]) or None, "row_ids": p.row_ids, "column_ids": p.column_ids}
    return [p.rows, p.columns[0]], [], given | ({} if implied else {"positives": p.positives})


def _nt_xent(draw: Draw, sizes: Sizes, dtype: str) -> Iterator[Call]:
    b = sum(sizes)
    views = _features(draw, 2 * b, dtype)
    # each rank's first views, then its second views
    starts = np.repeat(2 * (np.cumsum(sizes) - sizes), np.multiply(2, sizes))
    half = np.repeat(sizes, np.multiply(2, sizes))
    positives = starts + (np.arange(2 * b) - starts + half) % np.maximum(2 * half, 1)
    pairs = {"positives": positives, "excluded": np.arange(2 * b)}
    whole = _whole(views, [views.copy()], dtype, np.full(2 * b, 0.5 / b), **pairs)
    twice = [2 * size for size in sizes]

    def arguments(p: Problem) -> tuple[list[Any], list[Any], dict[str, Any]]:
        return [p.rows[: len(p.rows) // 2], p.rows[len(p.rows) // 2 :]], [], {}

    yield Call("plain", losses.nt_xent, _cut(whole, twice, twice), arguments, both=True)


def _sup_con(draw: Draw, sizes: Sizes, dtype: str) -> Iterator[Call]:
    b = sum(sizes)
    features, labels = _features(draw, b, dtype), draw.integers(0, b // 2, b)
    bare = _whole(features, [features.copy()], dtype, np.ones(b), row_ids=labels, column_ids=labels, match="target")
    bare = replace(bare, excluded=np.arange(b))
    partners = masks(bare)[1].sum(axis=1)
    counted = partners > 0
    weight, target = counted / max(1, counted.sum()), counted / np.maximum(partners, 1)
    state = state_dtype(dtype)
    whole = replace(bare, row_weight=round_to(weight, state), row_target=target)

    def arguments(p: Problem) -> tuple[list[Any], list[Any], dict[str, Any]]:
        return [p.rows], [p.row_ids], {}

    yield Call("labels", losses.sup_con, _cut(whole, sizes, sizes), arguments, both=True)


def check(forms: Callable[[Draw, Sizes, str], Iterator[Call]], subject: Subject) -> Comparisons:
    """Compare the ranks' calls with the oracle, over every exchange, with uneven parts."""
    world = subject.ranks
    random = np.random.default_rng([subject.seed, zlib.crc32(forms.__name__.encode())])
    weights = random.integers(0, 5, world.size).tolist()
    few = [1] + [0] * (world.size - 2) + [BATCH - 1] * (world.size > 1)
    for how, given in (("uneven", weights), ("one row", few)):
        for call in forms(random, shares(BATCH, given), subject.dtype):
            one_block = len(call.cut.problem.columns) == 1
            for exchange in ("ring", "gather", *["replicate"] * one_block):
                for interface in _interfaces(subject):
                    label = ", ".join(filter(None, (call.label, exchange, how, interface)))
                    yield label, _compare(call, subject, exchange, autograd=interface == "autograd")


def _interfaces(subject: Subject) -> tuple[str, ...]:
    if subject.backend.arrays.name != "torch":
        return ("",)
    world = subject.ranks
    if subject.device == "cuda" and world.can_be_late and world.size > 1:
        # autograd runs one thread per GPU, in which ranks that are threads of one process would wait for each other
        return ("value_and_grad",)
    return "value_and_grad", "autograd"


def _compare(call: Call, subject: Subject, exchange: str, *, autograd: bool) -> Worst:
    def program(communicator: Communicator) -> Outcome:
        part = call.cut.part(communicator.rank)
        differentiate = _by_autograd if autograd else by_value_and_grad
        return differentiate(call, part, subject, group=communicator, exchange=exchange)

    parts, spread = subject.ranks.run(program), call.cut.spread(exchange)
    return judged(subject.ranks, lambda: judge(call, subject, parts, spread, autograd=autograd))


def judge(
    call: Call,
    subject: Subject,
    parts: list[Outcome],
    spread: Spread | None,
    *,
    autograd: bool,
    upstream: float = 1.0,
    fields: Sequence[str] = GRADIENTS,
) -> Worst:
    """The outcomes of all ranks, joined, beside the truth of the whole problem."""
    problem, dtype, cut = call.cut.problem, subject.dtype, call.cut
    oracle = truth(problem, upstream)
    # weights, scale and loss have the caller's precision, whatever the backend's state
    facts = replace(subject.accuracy, unit=max(subject.accuracy.unit, UNIT[state_dtype(dtype)]))
    bound = bounds(problem, oracle, facts, dtype, upstream, spread=spread)
    # value_and_grad gives no gradients of the negatives
    last = min(call.frozen, len(problem.columns) if autograd else 1)
    expected, allowed = (_as_arguments(x, call, last) for x in (oracle.outcome, bound))
    if call.both:
        # the gradients of both sides are added in the features' dtype
        rounded = UNIT[dtype] * (np.abs(expected.rows) + allowed.rows) + UNDERFLOW[dtype]
        allowed = replace(allowed, rows=allowed.rows + rounded)
    return compare(cut.joined(parts, float(len(parts))), expected, allowed, fields)


def _as_arguments(x: Outcome, call: Call, last: int) -> Outcome:
    """An outcome in terms of the public function's arguments."""
    if call.both:
        return folded(x)
    return replace(x, columns=x.columns[:last])


def by_value_and_grad(
    call: Call, part: Problem, subject: Subject, put: Putter | None = None, **settings: Any
) -> Outcome:
    """What ``value_and_grad`` gives of a part."""
    put = put or putter(subject)
    features, labels, named = call.arguments(part)
    numbers = [float(part.scale)] + ([] if part.bias is None else [float(part.bias)])
    both = evaluation.value_and_grad(call.loss, backend=subject.name, **subject.settings, **settings)
    value, found = both(*map(put, (*features, *labels)), *numbers, **{k: put(x) for k, x in named.items()})
    return outcome(subject, call, value, list(found), len(features))


@dataclass(frozen=True, slots=True)
class Leaves:
    """The arguments of a call as torch tensors, those that are to have gradients apart from the others.

    Attributes:
        call: the call.
        features: of both sides.
        negatives: that are to have gradients.
        numbers: scale and bias.
        loss: computes it of these, with settings.
    """

    call: Call
    features: list[Array]
    negatives: list[Array]
    numbers: list[Array]
    loss: Callable[..., Array]

    @staticmethod
    def of(call: Call, part: Problem, subject: Subject) -> Leaves:
        """Those of a part."""
        put = putter(subject)
        features, labels, named = call.arguments(part)
        state = subject.backend.state(subject.dtype)
        numbers = [put(np.asarray(x), state) for x in (part.scale, part.bias) if x is not None]
        given, count = {k: put(x) for k, x in named.items()}, len(features)
        negatives = list(given.get("negatives") or ()) if call.frozen > 1 else []
        tags = [put(x) for x in labels]

        def loss(*leaves: Array, **settings: Any) -> Array:
            more = {"negatives": list(leaves[count : count + len(negatives)])} if negatives else {}
            rest = leaves[count + len(negatives) :]
            how = {"backend": subject.name, **subject.settings, **settings}
            return call.loss(*leaves[:count], *tags, *rest, **(given | more), **how)

        return Leaves(call, [put(x) for x in features], negatives, numbers, loss)

    @property
    def every(self) -> list[Array]:
        """All of them, in the order that ``loss`` takes."""
        return [*self.features, *self.negatives, *self.numbers]

    def outcome(self, subject: Subject, value: Array, gradients: list[Array]) -> Outcome:
        """A value and the gradients of ``every`` as an outcome."""
        return outcome(subject, self.call, value, gradients, len(self.features) + len(self.negatives))


def _by_autograd(call: Call, part: Problem, subject: Subject, **settings: Any) -> Outcome:
    leaves = Leaves.of(call, part, subject)
    value = leaves.loss(*(x.requires_grad_() for x in leaves.every), **settings)
    value.backward()
    return leaves.outcome(subject, value, [x.grad for x in leaves.every])


Putter = Callable[..., Array]


def putter(subject: Subject, arrays: ArrayLibrary | None = None) -> Putter:
    """Converts NumPy arrays to a library, by default the backend's: floats to the features' dtype, or to another."""
    library = arrays or subject.backend.arrays
    like = on_device(library, subject.device)

    def put(x: Any, dtype: str | None = None) -> Array:
        if x is None:
            return None
        if isinstance(x, list):
            return [put(each) for each in x]
        kind = dtype or (subject.dtype if x.dtype.kind == "f" else str(x.dtype))
        return library.asarray(np.array(x, order="C"), kind, like)

    return put


def outcome(subject: Subject, call: Call, value: Array, gradients: list[Array], features: int) -> Outcome:
    """A value and gradients of features, scale and bias, as they come, in NumPy's float64."""
    take = partial(taken, library_of(value))
    found = list(map(take, gradients))
    rows, columns = found[0], tuple(found[1:features])
    if call.both:
        # two views, or one array of features
        rows, columns = np.concatenate([rows, *columns]), ()
    scale, *bias = found[features:]
    return Outcome(take(value), rows, columns, scale, bias[0] if bias else None)


FORMS = {
    "clip-loss": _clip,
    "info-nce": _info_nce,
    "nt-xent": _nt_xent,
    "sup-con": _sup_con,
    "sigmoid-loss": _sigmoid,
}


def _property(name: str, forms: Callable[[Draw, Sizes, str], Iterator[Call]]) -> Property:
    def held(subject: Subject, case: str) -> Comparisons:
        yield from check(forms, subject)

    held.__doc__ = f"The public {name.replace('-', '_')} with a group gives the loss and gradients of the joined batch."
    return Property(name, held, CASE)


def skipped_backward(subject: Subject, case: str) -> Comparisons:
    """A rank that skips one backward pass raises the same ExchangeError on every rank."""
    world = subject.ranks
    if world.size < 2 or not world.can_be_late:
        raise SkipError("the group can carry nothing afterwards: it needs several ranks of one process, give --world 3")
    put = putter(subject)
    x = round_to(np.eye(4, _WIDTH), subject.dtype)
    for exchange in ("ring", "gather"):
        for skips in (0, world.size - 1):
            settings: dict[str, Any] = {"backend": subject.name, **subject.settings, "exchange": exchange}
            program = partial(_error_of_two_calls, skips=skips, given=(put(x), put(x), 10.0), settings=settings)
            told = world.run(program)
            label = f"{exchange}, rank {skips}"
            if not told[0]:
                yield label, wrong("no rank raised an ExchangeError")
            elif len(set(told)) > 1:
                yield label, wrong(f"ranks raised different errors: {sorted(set(told))}")
            else:
                yield label, NOTHING


def _error_of_two_calls(communicator: Communicator, skips: int, given: Any, settings: dict[str, Any]) -> str:
    """The text of a rank's ExchangeError; rank ``skips`` has no backward pass in the first of its calls."""
    both = evaluation.value_and_grad(losses.clip_loss, group=communicator, **settings)
    try:
        if communicator.rank == skips:
            losses.clip_loss(*given, group=communicator, **settings)
        else:
            both(*given)
        both(*given)
    except ExchangeError as error:
        return str(error)
    return ""


def mismatched_calls(subject: Subject, case: str) -> Comparisons:
    """Ranks whose calls do not fit together all raise the same MismatchError, and the group stays usable."""
    world, put = subject.ranks, putter(subject)
    if world.size < 2:
        raise SkipError("needs several ranks")
    x = round_to(np.eye(4, _WIDTH), subject.dtype)
    other = {"float16": "float32", "bfloat16": "float32", "float32": "float64", "float64": "float32"}[subject.dtype]
    pair, ids = [put(x), put(x)], put(np.arange(4))
    differences: dict[str, _Arguments] = {
        "another dtype": (losses.clip_loss, [put(x, other), put(x, other), 10.0], {}),
        "another width": (losses.clip_loss, [put(x[:, :7]), put(x[:, :7]), 10.0], {}),
        "another scale": (losses.clip_loss, [*pair, 9.0], {}),
        "another loss": (losses.nt_xent, [*pair, 10.0], {}),
        "ids": (losses.clip_loss, [*pair, 10.0], {"ids": ids}),
        "no such matrix": (losses.clip_loss, [pair[0], put(x[:3]), 10.0], {}),
        "another exchange": (losses.clip_loss, [*pair, 10.0], {"exchange": "gather"}),
    }
    if subject.backend.arrays.name == "torch":
        trained = [put(x).requires_grad_(), put(x), 10.0]
        differences["a gradient that the others do not want"] = (losses.clip_loss, trained, {})
    right: _Arguments = losses.clip_loss, [*pair, 10.0], {}
    for label, wrong_one in differences.items():
        told = world.run(partial(_error_of_a_mismatch, right=right, last=wrong_one, subject=subject))
        if not all(told):
            yield label, wrong("a rank raised no MismatchError")
        elif len(set(told)) > 1:
            yield label, wrong(f"ranks raised different errors: {sorted(set(told))}")
        else:
            yield label, NOTHING


_Arguments = tuple[Callable[..., Any], list[Any], dict[str, Any]]
"""A loss, its arguments and settings."""


def _error_of_a_mismatch(communicator: Communicator, right: _Arguments, last: _Arguments, subject: Subject) -> str:
    """The text of a rank's MismatchError, of which the last rank calls something else; all are then right once."""
    how: dict[str, Any] = {"backend": subject.name, "group": communicator, "exchange": "ring", **subject.settings}
    loss, args, more = last if communicator.rank == communicator.size - 1 else right
    try:
        loss(*args, **(how | more))
    except MismatchError as error:
        right[0](*right[1], **how)
        return str(error)
    return ""


PROPERTIES = tuple(_property(name, forms) for name, forms in FORMS.items())
"""One property per loss, in their order."""
