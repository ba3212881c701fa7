"""Random problems: ragged, hot, signed, masked, split, of one direction or two, rows against themselves.

Each problem has a number, and smaller numbers have smaller problems: hypothesis draws numbers, and shrinks a failure.
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
"""A backend that refuses a larger share of problems in a dtype that it claims is not verified."""
NOISIER_DRAWN = 5.0
"""``plain.NOISIER`` for drawn problems on a host: for a few of tens of thousands the plain computation is lucky."""
SCALES = (1.0, 0.0, 14.0, 100.0, 200.0, -3.0)
_FIRST_SIZE = 3
"""The most rows and columns of the first problem; each later problem may have one more."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A problem, and the options to compute it with.

    Attributes:
        problem: features are representable in their dtype, every other number in float32.
        itself: whether the backend receives only the rows, which are the columns too.
        random: the generator for further random numbers of this problem.
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
    yield from searched(subject, case, lambda sample: _compare(sample, subject), _shrink)


def _shrink(fails: Callable[[int], bool], subject: Subject) -> None:
    """Let hypothesis draw numbers until one fails, and then shrink that number."""
    import hypothesis
    from hypothesis.errors import Flaky, NoSuchExample
    from hypothesis.strategies import integers

    settings = hypothesis.settings(max_examples=subject.examples, deadline=None, database=None)
    # a failure that passes when it is repeated is still a failure
    with suppress(NoSuchExample, Flaky):
        hypothesis.find(integers(0, 2**31), fails, settings=settings, random=Random(subject.seed))


def numbered(case: str) -> int:
    """The number of the problem that a case "drawn:17" names.

    Raises:
        ValueError: the case names no number.
    """
    name, _, number = case.partition(":")
    if not number.isdecimal():
        raise ValueError(f"case must be {name}:NUMBER, as a failure prints it, got {case!r}")
    return int(number)


def _search_in_order(fails: Callable[[int], bool], subject: Subject) -> None:
    """Take numbers in order, up to the first that fails."""
    any(map(fails, range(subject.examples)))


def searched(
    subject: Subject,
    case: str,
    judge: Callable[[Drawn], Worst],
    search: Callable[[Callable[[int], bool], Subject], None] = _search_in_order,
) -> Comparisons:
    """Judge the problem that the case names, or the problems of the search; yield the last failure, else all results.

    Raises:
        UnsupportedProblemError: nothing failed, and the backend refused too many of the problems.
    """
    name, number_of_case, _ = case.partition(":")
    results: list[tuple[str, Worst]] = []
    refusals: list[str] = []

    def fails(number: int) -> bool:
        try:
            worst = judge(problem(subject.seed, number, subject.dtype))
        except UnsupportedProblemError as reason:
            refusals.append(str(reason))
            return False
        except Exception as error:
            worst = wrong(one_line(error))
        results.append((f"{name}:{number}", worst))
        return not worst.ratio < 1

    if number_of_case:
        fails(numbered(case))
    else:
        search(fails, subject)
    failures = [result for result in results if not result[1].ratio < 1]
    yield from failures[-1:] or results
    count = len(results) + len(refusals)
    if not failures and len(refusals) > REFUSED_SHARE * count:
        raise UnsupportedProblemError(f"{len(refusals)} of {count} drawn problems refused, the last: {refusals[-1]}")


def problem(seed: int, number: int, dtype: str) -> Drawn:
    """The problem of this number.

    As the contract requires, a target is 1 / positives or 0, and a row or column that admits nothing has weight 0.
    """
    random = np.random.default_rng([seed, number])
    largest_size = _FIRST_SIZE + number
    kind = "sigmoid" if random.random() < 1 / 3 else "softmax"
    itself = kind == "softmax" and random.random() < 0.2
    m, n = int(random.integers(0, min(41, largest_size) + 1)), int(random.integers(1, min(53, largest_size) + 1))
    d = int(random.integers(1, 38) if random.random() < 0.8 else random.choice([72, 128, 136, 200]))
    log_uniform = np.exp(random.uniform(-5.0, 5.0))
    scale, bias = random.choice([*SCALES, log_uniform]), random.choice([0.0, -10.0, 2.5, 20.0])
    rows, columns = (round_to(x, dtype) for x in _features(random, m, n, d))
    labels: dict[str, Any] = {
        "row_ids": random.integers(0, max(2, n // 3), m),
        "column_ids": random.integers(0, max(2, n // 3), n),
        "match": "target",
    }
    random_positives = np.where(random.random(m) < 0.8, random.integers(0, max(1, n), m), n + 3)
    if itself:
        n, columns, labels["column_ids"], random_positives = m, rows, labels["row_ids"], _partners(m, random)
    pair_arguments: list[dict[str, Any]] = [
        {"positives": np.arange(m)},
        {"positives": random_positives},
        {},
        {**labels, "positives": random_positives, "match": "drop"},
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
        **pair_arguments[random.integers(0, len(pair_arguments))],
    )
    two_sided = kind == "softmax" and not itself and random.random() < 0.5
    if kind == "softmax" and not itself and random.random() < 0.2:
        sided = replace(bare, column_weight=np.zeros(n) if two_sided else None)
        bare = with_limits(with_guide(sided, random, dtype) if random.random() < 0.5 else sided, random)
    admitted, positive = masks(bare)
    x = logits(rows, columns, bare.scale, 0.0 if bare.bias is None else float(bare.bias))
    x = similarities(bare, x)
    counted = within(admitted, positive, x, bare.row_limits), within(admitted.T, positive.T, x.T, bare.column_limits)
    has_pairs = [np.asarray(mask.any(axis=1)) for mask in counted]
    is_signed = random.random() < 0.5

    def draw_weight(size: int, is_counted: BoolArray) -> FloatArray:
        mask = random.standard_normal(size) * (random.random(size) < 0.75)
        mask = mask if is_signed else np.full(size, 1 / max(size, 1))
        return np.where(is_counted, mask, 0.0)

    weighted = targeted(bare, draw_weight(m, has_pairs[0]), draw_weight(n, has_pairs[1]) if two_sided else None)
    tile = (int(random.integers(1, 20)), int(random.integers(1, 20))) if random.random() < 0.5 else None
    return Drawn(weighted, itself, Options(tile=tile), random)


def _partners(m: int, random: Draw) -> IntArray:
    """Positives in pairs of rows that name each other; if m is odd, one row names itself."""
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
        signed_directions = np.concatenate([directions, directions, -directions])
        rows, columns = (signed_directions[random.integers(0, len(signed_directions), size)] for size in (m, n))
    if kind == "trained":
        rows = columns[np.arange(m) % n] + 0.1 * rows
    rows, columns = (float64(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-3)) for x in (rows, columns))
    return rows, columns


def _compare(sample: Drawn, subject: Subject) -> Worst:
    oracle = truth(sample.problem)
    bound = subject.bounds(sample.problem, oracle, options=sample.options)
    input_problem, view = sample.problem, as_it_is
    if sample.itself:
        input_problem, view = replace(sample.problem, columns=()), rearrange.folded
    outcome = subject.run(input_problem, options=sample.options)
    worst = compare(outcome, view(oracle.outcome), view(bound))
    # not where G is rounded to 16 bits: errors of repeated features add up
    if subject.device == "cpu" and subject.dtype != "float64" and subject.accuracy.gradient_rounding == 0:
        settings = subject.accuracy, subject.dtype, NOISIER_DRAWN, view
        worst = max(worst, compare_with_plain(sample.problem, oracle, outcome, *settings), key=lambda x: x.ratio)
    return worst
