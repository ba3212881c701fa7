"""The properties of ``contrastile verify --world``: what a correct backend does on several ranks.

A case is cut into uneven parts, the ranks compute them over a communicator, and the joined results are held
to the oracle of the whole: the loss, and gradients of every rank's own rows and columns, after the factor of
``Placement.factor`` has been taken away.
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

    A rank may have nothing at all. Edges are the business of small cases, of one dtype where there is one of each kind,
    and between processes, which take longer, of one exchange.
    """
    n, problem, random = trial.subject.ranks.size, trial.problem, trial.random()
    uneven = [random.integers(0, 7, n).tolist() for _ in range(2)]
    yield "uneven", Cut.of(problem, *uneven)
    edges = trial.subject.ranks.can_be_late or exchange == _in_turn(trial)
    if n > 1 and edges and trial.small and (trial.subject.dtype == "float32" or trial.case in cases.FEW):
        few = [1, max(1, len(problem.rows) - 1)] + [0] * (n - 2)
        yield "one row", Cut.of(problem, few, [*few[2:], *few[:2]])
        ends = [0] * (n - 1)
        yield "opposite ends", Cut.of(problem, [*ends, 1], [1, *ends])


def schedule(exchange: str, trial: Trial) -> Comparisons:
    """Loss and gradients over an exchange are the oracle's of the whole problem, with the same bits on every rank."""
    for label, cut in cuts(trial, exchange):
        first, *others = parts = outcomes(trial.subject, cut, exchange)
        yield label, _compared(trial, cut, parts, exchange)
        for rank, other in enumerate(others, 1):
            yield f"{label}, rank {rank}", identical(other, first, _EVERYWHERE)


def _compared(trial: Trial, cut: Cut, parts: list[Outcome], exchange: str, **how: Any) -> Worst:
    """``shards.compared``, by the leader alone."""

    def judge() -> Worst:
        oracle = truth(trial.problem, how["upstream"]) if "upstream" in how else trial.oracle
        return compared(trial.subject, cut, parts, exchange, oracle, **how)

    return judged(trial.subject.ranks, judge)


def _same(label: str, again: list[Outcome], parts: list[Outcome]) -> Comparisons:
    """Every rank's outcome has the bits of another run's."""
    for rank, (a, b) in enumerate(zip(again, parts, strict=True)):
        yield f"{label}, rank {rank}", identical(a, b)


def themselves(trial: Trial) -> Comparisons:
    """Rows against themselves, each pair computed by one rank: both sides' gradients, and the same bits twice."""
    if not rearrange.is_symmetric(trial.problem):
        raise SkipError("its rows are not its columns, or its pairs are not the same either way round")
    world, weights = trial.subject.ranks, trial.random().integers(0, 7, trial.subject.ranks.size).tolist()
    for how, given in (("uneven", weights), ("even", [1] * world.size)):
        cut = Cut.of_itself(trial.problem, given)
        for exchange in EXCHANGES:
            parts = outcomes(trial.subject, cut, exchange)
            yield f"{exchange}, {how}", _compared(trial, cut, parts, exchange)
            if world.can_be_late or how == "even":
                again = outcomes(trial.subject, cut, exchange, late=world.can_be_late)
                yield from _same(f"{exchange}, {how}, late", again, parts)


def _in_turn(trial: Trial) -> str:
    """One exchange for each case: what it shows does not depend on both."""
    return [*EXCHANGES][crc32(trial.case.encode()) % len(EXCHANGES)]


def reduction(trial: Trial) -> Comparisons:
    """A sum of the parameters' gradients over the ranks is the oracle's too, times a gradient and in small tiles."""
    trial.only_small()
    (place, cut), exchange = next(cuts(trial)), _in_turn(trial)
    # below 1: times the number of ranks, gradients of float16 may overflow
    how: dict[str, Any] = {"reduction": "sum", "upstream": -0.5, "options": Options(tile=(5, 7))}
    parts = outcomes(trial.subject, cut, exchange, **how)
    yield f"{exchange}, {place}, sum", _compared(trial, cut, parts, exchange, **how)


def delivery(trial: Trial) -> Comparisons:
    """The same bits a second time, and when every message arrives at the last moment."""
    trial.only_small()
    world = trial.subject.ranks
    (label, cut), exchange = next(cuts(trial)), _in_turn(trial)
    expected = outcomes(trial.subject, cut, exchange)
    for late in (False, True) if world.can_be_late else (False,):
        again = outcomes(trial.subject, cut, exchange, late=late)
        yield from _same(f"{exchange}, {label}, {'late' if late else 'second run'}", again, expected)


def sharded(subject: Subject, case: str) -> Comparisons:
    """Problems and parts drawn at random give the oracle's value and gradients; the label says which of the seed it is.

    A case "sharded:17" is one problem. Every process draws the same ones.
    """
    world = subject.ranks

    def judge(each: Drawn) -> Worst:
        random, whole = each.random, each.problem
        # all 0 stands for equal parts
        rows, columns = random.integers(0, 6, (2, world.size)).tolist()
        cut = Cut.of_itself(whole, rows) if each.itself else Cut.of(whole, rows, columns)
        exchange, reduction = str(random.choice([*EXCHANGES])), str(random.choice(["mean", "sum"]))
        how: dict[str, Any] = {"reduction": reduction, "options": each.options}
        parts = outcomes(subject, cut, exchange, late=random.random() < 0.5 and world.can_be_late, **how)

        def found() -> Worst:
            for part in parts[1:]:
                if part.loss.tobytes() != parts[0].loss.tobytes() or part.scale.tobytes() != parts[0].scale.tobytes():
                    return wrong("loss or scale differs between ranks")
            return compared(subject, cut, parts, exchange, truth(whole), **how)

        return judged(world, found)

    yield from searched(subject, case, judge)


DISTRIBUTED = {
    each.name: each
    for each in (
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
"""Ranks of ``several_ranks``: from three on, the two directions of a ring differ."""

_CASES = ("ragged", "square-ragged", "blocks", "ids-drop@far", "certain-labels", "views", "sigmoid-ids")
# of an even number two lie opposite each other, and share a block of rows against themselves
_EVEN, _SYMMETRIC = 4, ("certain-labels", "views")
_EXAMPLES = 25


def several_ranks(subject: Subject, case: str) -> Comparisons:
    """Ranks of this process are right on a few cases, by the public losses and on drawn parts, in float32."""
    if subject.label != "float32" or subject.device != "cpu":
        raise SkipError(f"in float32 on a host alone: give --world {RANKS} for the rest")
    there = replace(subject, world=Threads(RANKS), examples=min(_EXAMPLES, subject.examples))
    name, _, part = case.partition(":")[2].partition(": ")
    for each in DISTRIBUTED.values():
        if each.case is not None and each.name.startswith(name):
            yield from _labelled(each.name, each.check(there, f"{each.case}:{part}" if part else each.case))
            if each.case == mistakes.CASE:
                # the fewest between which there can be a mistake
                two = replace(there, world=Threads(2))
                yield from _labelled(f"{each.name}, 2 ranks", each.check(two, each.case))
    if name:
        return
    for ranks, names in ((RANKS, _CASES), (_EVEN, _SYMMETRIC)):
        for name in names:
            trial = Trial(replace(there, world=Threads(ranks)), name, cases.build(name, subject.dtype))
            for check in (*EXCHANGES, "themselves"):
                try:
                    yield from _labelled(f"{name}, {check}, {ranks} ranks", DISTRIBUTED[check].check(trial))
                except SkipError:
                    # not of rows against themselves
                    continue


def _labelled(name: str, comparisons: Comparisons) -> Comparisons:
    yield from ((f"{name}: {label}", worst) for label, worst in comparisons)
