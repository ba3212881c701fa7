"""The properties of ``contrastile verify --world``: what a correct backend does on several ranks.

A case is cut into uneven parts, and each rank computes its part over a communicator. The joined results are compared
with the oracle's results for the whole: the loss, and the gradients of every rank's own rows and columns, divided by
``Placement.factor``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

from contrastile.backends.contract import Options
from contrastile.verify import cases, mistakes, public, rearrange
from contrastile.verify.comparison import Comparisons, Worst, identical, wrong
from contrastile.verify.shards import EXCHANGES, Cut, compared, outcomes
from contrastile.verify.strategies import Drawn, searched
from contrastile.verify.trial import Property, SkipError, Subject, Trial
from contrastile.verify.truth import Outcome, truth
from contrastile.verify.worlds import Threads, judged

SHARDED = "sharded"
_EVERYWHERE = ("loss", "scale", "bias")


def cuts(trial: Trial, exchange: str = "") -> Iterator[tuple[str, Cut]]:
    """The cuts of a case: at random, one row on the first rank, rows and columns far from each other.

    A rank may have no rows and no columns. The last two cuts are only for small cases, and for all dtypes only if the
    case is one of ``cases.FEW``. Between processes, which are slower, only one exchange per case has them.
    """
    n, problem, random = trial.subject.ranks.size, trial.problem, trial.random()
    uneven = [random.integers(0, 7, n).tolist() for _ in range(2)]
    yield "uneven", Cut.of(problem, *uneven)
    has_edges = trial.subject.ranks.can_be_late or exchange == _exchange_of_case(trial)
    if n > 1 and has_edges and trial.small and (trial.subject.dtype == "float32" or trial.case in cases.FEW):
        one_row = [1, max(1, len(problem.rows) - 1)] + [0] * (n - 2)
        yield "one row", Cut.of(problem, one_row, [*one_row[2:], *one_row[:2]])
        no_shares = [0] * (n - 1)
        yield "opposite ends", Cut.of(problem, [*no_shares, 1], [1, *no_shares])


def schedule(exchange: str, trial: Trial) -> Comparisons:
    """Loss and gradients over an exchange are the oracle's of the whole problem, with the same bits on every rank."""
    for label, cut in cuts(trial, exchange):
        first, *others = parts = outcomes(trial.subject, cut, exchange)
        yield label, _compare(trial, cut, parts, exchange)
        for rank, other in enumerate(others, 1):
            yield f"{label}, rank {rank}", identical(other, first, _EVERYWHERE)


def _compare(trial: Trial, cut: Cut, parts: list[Outcome], exchange: str, **settings: Any) -> Worst:
    """``shards.compared``, on the leader only."""

    def judge() -> Worst:
        oracle = truth(trial.problem, settings["upstream"]) if "upstream" in settings else trial.oracle
        return compared(trial.subject, cut, parts, exchange, oracle, **settings)

    return judged(trial.subject.ranks, judge)


def _compare_bits(label: str, repeated: list[Outcome], parts: list[Outcome]) -> Comparisons:
    """Compare the bits of every rank's outcomes of two runs."""
    for rank, (a, b) in enumerate(zip(repeated, parts, strict=True)):
        yield f"{label}, rank {rank}", identical(a, b)


def themselves(trial: Trial) -> Comparisons:
    """Rows against themselves, each pair computed by one rank: both sides' gradients, and the same bits twice."""
    if not rearrange.is_symmetric(trial.problem):
        raise SkipError("its rows are not its columns, or its pairs are not the same either way round")
    world, uneven = trial.subject.ranks, trial.random().integers(0, 7, trial.subject.ranks.size).tolist()
    for label, weights_of_cut in (("uneven", uneven), ("even", [1] * world.size)):
        cut = Cut.of_itself(trial.problem, weights_of_cut)
        for exchange in EXCHANGES:
            parts = outcomes(trial.subject, cut, exchange)
            yield f"{exchange}, {label}", _compare(trial, cut, parts, exchange)
            if world.can_be_late or label == "even":
                repeated = outcomes(trial.subject, cut, exchange, late=world.can_be_late)
                yield from _compare_bits(f"{exchange}, {label}, late", repeated, parts)


def _exchange_of_case(trial: Trial) -> str:
    """One exchange per case, in turn: the property does not depend on the pair of case and exchange."""
    return [*EXCHANGES][crc32(trial.case.encode()) % len(EXCHANGES)]


def reduction(trial: Trial) -> Comparisons:
    """A sum of the parameters' gradients over the ranks is the oracle's too, times a gradient and in small tiles."""
    trial.only_small()
    (label, cut), exchange = next(cuts(trial)), _exchange_of_case(trial)
    # below 1, because the number of ranks multiplies gradients, and float16 may overflow
    settings: dict[str, Any] = {"reduction": "sum", "upstream": -0.5, "options": Options(tile=(5, 7))}
    parts = outcomes(trial.subject, cut, exchange, **settings)
    yield f"{exchange}, {label}, sum", _compare(trial, cut, parts, exchange, **settings)


def delivery(trial: Trial) -> Comparisons:
    """The same bits a second time, and when every message arrives at the last moment."""
    trial.only_small()
    world = trial.subject.ranks
    (label, cut), exchange = next(cuts(trial)), _exchange_of_case(trial)
    expected = outcomes(trial.subject, cut, exchange)
    for is_late in (False, True) if world.can_be_late else (False,):
        repeated = outcomes(trial.subject, cut, exchange, late=is_late)
        yield from _compare_bits(f"{exchange}, {label}, {'late' if is_late else 'second run'}", repeated, expected)


def sharded(subject: Subject, case: str) -> Comparisons:
    """Problems and parts drawn at random give the oracle's value and gradients; the label says which of the seed it is.

    A case "sharded:17" is one problem. Every process draws the same ones.
    """
    world = subject.ranks

    def judge(drawn: Drawn) -> Worst:
        random, problem = drawn.random, drawn.problem
        # weights that are all 0 mean equal parts
        rows, columns = random.integers(0, 6, (2, world.size)).tolist()
        cut = Cut.of_itself(problem, rows) if drawn.itself else Cut.of(problem, rows, columns)
        exchange, reduction = str(random.choice([*EXCHANGES])), str(random.choice(["mean", "sum"]))
        settings: dict[str, Any] = {"reduction": reduction, "options": drawn.options}
        parts = outcomes(subject, cut, exchange, late=random.random() < 0.5 and world.can_be_late, **settings)

        def compare_parts() -> Worst:
            for part in parts[1:]:
                if part.loss.tobytes() != parts[0].loss.tobytes() or part.scale.tobytes() != parts[0].scale.tobytes():
                    return wrong("loss or scale differs between ranks")
            return compared(subject, cut, parts, exchange, truth(problem), **settings)

        return judged(world, compare_parts)

    yield from searched(subject, case, judge)


DISTRIBUTED = {
    prop.name: prop
    for prop in (
        *(
            Property(
                exchange,
                partial(schedule, exchange),
                says=f"Loss and gradients {how} are the oracle's of the whole problem, alike on every rank.",
            )
            for exchange, how in EXCHANGES.items()
        ),
        *(Property(check.__name__, check) for check in (themselves, reduction, delivery)),
        *public.OVER_RANKS,
        Property("skipped-backward", mistakes.skipped_backward, mistakes.CASE),
        Property("mismatched-calls", mistakes.mismatched_calls, mistakes.CASE),
        Property("sharded", sharded, SHARDED),
    )
}
"""The properties of a world, by name."""

RANKS = 3
"""Ranks of ``several_ranks``: the two directions of a ring differ only from three ranks on."""

_CASES = ("ragged", "square-ragged", "blocks", "ids-drop@far", "certain-labels", "views", "sigmoid-ids")
# in a ring of an even number, ranks opposite each other share a block of rows against themselves
_EVEN, _SYMMETRIC = 4, ("certain-labels", "views")
_EXAMPLES = 25


def several_ranks(subject: Subject, case: str) -> Comparisons:
    """Ranks of this process are right on a few cases, by the public losses and on drawn parts, in float32."""
    if subject.label != "float32" or subject.device != "cpu":
        raise SkipError(f"in float32 on a host alone: give --world {RANKS} for the rest")
    several = replace(subject, world=Threads(RANKS), examples=min(_EXAMPLES, subject.examples))
    name, _, selector = case.partition(":")[2].partition(": ")
    for prop in DISTRIBUTED.values():
        if prop.case is not None and prop.name.startswith(name):
            yield from _labelled(prop.name, prop.check(several, f"{prop.case}:{selector}" if selector else prop.case))
            if prop.case == mistakes.CASE:
                # two ranks are the fewest that can disagree
                pair = replace(several, world=Threads(2))
                yield from _labelled(f"{prop.name}, 2 ranks", prop.check(pair, prop.case))
    if name:
        return
    for ranks, names in ((RANKS, _CASES), (_EVEN, _SYMMETRIC)):
        for name in names:
            trial = Trial(replace(several, world=Threads(ranks)), name, cases.build(name, subject.dtype))
            for check in (*EXCHANGES, "themselves"):
                try:
                    yield from _labelled(f"{name}, {check}, {ranks} ranks", DISTRIBUTED[check].check(trial))
                except SkipError:
                    # the case is not rows against themselves
                    continue


def _labelled(name: str, comparisons: Comparisons) -> Comparisons:
    yield from ((f"{name}: {label}", worst) for label, worst in comparisons)
