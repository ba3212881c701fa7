"""Problems drawn at random: ragged, hot, signed, masked, split, of one direction or two, rows with themselves.

A problem has a number. The first are the smallest: hypothesis draws numbers, and shrinks one that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from contrastile.backends.contract import Options, UnsupportedProblemError
from contrastile.comm.buffers import split
from contrastile.oracle.arrays import BoolArray, FloatArray, IntArray, float64
from contrastile.oracle.general import logits
from contrastile.oracle.named import within
from contrastile.reporting import one_line
from contrastile.schedules.problem import Problem
from contrastile.verify import rearrange
from contrastile.verify.comparison import Comparisons, Worst, compare, wrong
from contrastile.verify.draws import Draw, Pairs, signs, targeted, with_guide, with_limits
from contrastile.verify.plain import as_it_is, compare_with_plain
from contrastile.verify.rounding import round_to
from contrastile.verify.truth import masks, similarities, truth

if TYPE_CHECKING:
    from contrastile.verify.trial import Subject

CASE = "drawn"
REFUSED_SHARE = 0.25
"""A backend that refuses a larger share of the problems of a dtype that it claims is not verified."""
NOISIER_DRAWN = 5.0
"""As ``plain.NOISIER``, of drawn problems on a host: of tens of thousands some meet with a lucky plain computation."""
SCALES = (1.0, 0.0, 14.0, 100.0, 200.0, -3.0)
_LEAST = 3
"""Most rows and columns of the first problem; of each later one there may be one more."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A problem, and how it is to be computed.

    Attributes:
        problem: features are representable in their dtype, every other number in float32.
        itself: whether the rows alone are to be given, which are the columns.
        random: what more is to be drawn for it comes from here.
    """

    problem: Problem
    itself: bool
    options: Options
    random: Draw


def drawn(subject: Subject, case: str) -> Comparisons:
    """Problems that hypothesis draws give the oracle's value and gradients; the label is the number of the worst.

    On a host their errors are at most five times a plain computation's.

    A case "drawn:17" is that problem alone.
    """
    yield from searched(subject, case, lambda each: _compare(each, subject), _shrink)


def _shrink(fails: Callable[[int], bool], subject: Subject) -> None:
    """Draw numbers by hypothesis up to one that fails, and then ever smaller ones."""
    import hypothesis
    from hypothesis.errors import Flaky, NoSuchExample
    from hypothesis.strategies import integers

    settings = hypothesis.settings(max_examples=subject.examples, deadline=None, database=None)
    # a failure that passes when it is run again counts all the same
    with suppress(NoSuchExample, Flaky):
        hypothesis.find(integers(0, 2**31), fails, settings=settings, random=Random(subject.seed))


def numbered(case: str) -> int:
    """The number of the problem that a case "drawn:17" names.

    Raises:
        ValueError: it names none.
    """
    name, _, number = case.partition(":")
    if not number.isdecimal():
        raise ValueError(f"case must be {name}:NUMBER, as a failure prints it, got {case!r}")
    return int(number)


def _first(fails: Callable[[int], bool], subject: Subject) -> None:
    """Take one number after another, up to the first that fails."""
    any(map(fails, range(subject.examples)))


def searched(
    subject: Subject,
    case: str,
    judge: Callable[[Drawn], Worst],
    search: Callable[[Callable[[int], bool], Subject], None] = _first,
) -> Comparisons:
    """Judge problems: the one that the case names, or those that the search takes; of failures the last is told.

    Raises:
        UnsupportedProblemError: nothing failed, and the backend refused too many of the problems.
    """
    name, one, _ = case.partition(":")
    found: list[tuple[str, Worst]] = []
    refusals: list[str] = []

    def fails(number: int) -> bool:
        try:
            worst = judge(problem(subject.seed, number, subject.dtype))
        except UnsupportedProblemError as reason:
            refusals.append(str(reason))
            return False
        except Exception as error:
            worst = wrong(one_line(error))
        found.append((f"{name}:{number}", worst))
        return not worst.ratio < 1

    if one:
        fails(numbered(case))
    else:
        search(fails, subject)
    failed = [each for each in found if not each[1].ratio < 1]
    yield from failed[-1:] or found
    count = len(found) + len(refusals)
    if not failed and len(refusals) > REFUSED_SHARE * count:
        raise UnsupportedProblemError(f"{len(refusals)} of {count} drawn problems refused, the last: {refusals[-1]}")


def problem(seed: int, number: int, dtype: str) -> Drawn:
    """The problem of this number.

    As the contract requires, a target is 1 / positives or 0, and a row or column that admits nothing has weight 0.
    """
    random = np.random.default_rng([seed, number])
    most = _LEAST + number
    kind = "sigmoid" if random.random() < 1 / 3 else "softmax"
    itself = kind == "softmax" and random.random() < 0.2
    m, n = int(random.integers(0, min(41, most) + 1)), int(random.integers(1, min(53, most) + 1))
    d = int(random.integers(1, 38) if random.random() < 0.8 else random.choice([72, 128, 136, 200]))
    log_uniform = np.exp(random.uniform(-5.0, 5.0))
    scale, bias = random.choice([*SCALES, log_uniform]), random.choice([0.0, -10.0, 2.5, 20.0])
    rows, columns = (round_to(x, dtype) for x in _features(random, m, n, d))
    labels: dict[str, Any] = {
        "row_ids": random.integers(0, max(2, n // 3), m),
        "column_ids": random.integers(0, max(2, n // 3), n),
        "match": "target",
    }
    at_random = np.where(random.random(m) < 0.8, random.integers(0, max(1, n), m), n + 3)
    if itself:
        n, columns, labels["column_ids"], at_random = m, rows, labels["row_ids"], _partners(m, random)
    pairs: list[dict[str, Any]] = [
        {"positives": np.arange(m)},
        {"positives": at_random},
        {},
        {**labels, "positives": at_random, "match": "drop"},
        labels,
        {**labels, "excluded": np.arange(m)},
    ]
    cuts = np.sort(random.integers(0, n + 1, 0 if itself else random.integers(0, 3)))
    bare = Problem(
        kind=kind,
        rows=rows,
        columns=tuple(split(columns, np.diff(cuts, prepend=0, append=n).tolist())),
        scale=round_to(scale, "float32"),
        bias=round_to(bias, "float32") if kind == "sigmoid" or bias else None,
        row_weight=np.zeros(m),
        row_target=np.zeros(m),
        **pairs[random.integers(0, len(pairs))],
    )
    two_sided = kind == "softmax" and not itself and random.random() < 0.5
    if kind == "softmax" and not itself and random.random() < 0.2:
        sided = replace(bare, column_weight=np.zeros(n) if two_sided else None)
        bare = with_limits(with_guide(sided, random, dtype) if random.random() < 0.5 else sided, random)
    admitted, positive = masks(bare)
    x = logits(rows, columns, bare.scale, 0.0 if bare.bias is None else float(bare.bias))
    x = similarities(bare, x)
    seen = within(admitted, positive, x, bare.row_limits), within(admitted.T, positive.T, x.T, bare.column_limits)
    counted = [np.asarray(each.any(axis=1)) for each in seen]
    signed = random.random() < 0.5

    def weight(size: int, counts: BoolArray) -> FloatArray:
        each = random.standard_normal(size) * (random.random(size) < 0.75)
        each = each if signed else np.full(size, 1 / max(size, 1))
        return np.where(counts, each, 0.0)

    whole = targeted(bare, weight(m, counted[0]), weight(n, counted[1]) if two_sided else None)
    tile = (int(random.integers(1, 20)), int(random.integers(1, 20))) if random.random() < 0.5 else None
    return Drawn(whole, itself, Options(tile=tile), random)


def _partners(m: int, random: Draw) -> IntArray:
    """Positives that name each other; of an odd number one row names itself."""
    order, partner = random.permutation(m), np.arange(m)
    first, second = order[0 : m - 1 : 2], order[1::2]
    partner[first], partner[second] = second, first
    return partner


def _features(random: Draw, m: int, n: int, d: int) -> Pairs:
    """Unit vectors; entries in {-1, 0, 1}; a few directions and their opposites; or pairs that nearly agree."""
    kind = random.choice(["normal", "signs", "few", "trained"])
    if kind == "signs":
        return signs(random, m, n, d)
    rows, columns = (random.standard_normal((size, d)) for size in (m, n))
    if kind == "few":
        directions = random.standard_normal((random.integers(1, 7), d))
        signed = np.concatenate([directions, directions, -directions])
        rows, columns = (signed[random.integers(0, len(signed), size)] for size in (m, n))
    if kind == "trained":
        rows = columns[np.arange(m) % n] + 0.1 * rows
    rows, columns = (float64(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-3)) for x in (rows, columns))
    return rows, columns


def _compare(each: Drawn, subject: Subject) -> Worst:
    oracle = truth(each.problem)
    bound = subject.bounds(each.problem, oracle, options=each.options)
    given, view = each.problem, as_it_is
    if each.itself:
        given, view = replace(each.problem, columns=()), rearrange.folded
    got = subject.run(given, options=each.options)
    worst = compare(got, view(oracle.outcome), view(bound))
    # where G is rounded to 16 bits, errors of features that are drawn twice add up
    if subject.device == "cpu" and subject.dtype != "float64" and subject.accuracy.gradient_rounding == 0:
        how = subject.accuracy, subject.dtype, NOISIER_DRAWN, view
        worst = max(worst, compare_with_plain(each.problem, oracle, got, *how), key=lambda each: each.ratio)
    return worst
