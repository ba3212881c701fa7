"""Problems drawn at random, each with its cut into the parts of the ranks."""

from __future__ import annotations

from typing import Any

from contrastile.verify import strategies
from contrastile.verify.comparison import Comparisons, Worst, wrong
from contrastile.verify.shards import Cut, compared, outcomes
from contrastile.verify.strategies import Drawn
from contrastile.verify.trial import Subject
from contrastile.verify.truth import truth
from contrastile.verify.worlds import judged

CASE = "sharded"


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
        exchange, reduction = str(random.choice(["ring", "two-level", "gather"])), str(random.choice(["mean", "sum"]))
        how: dict[str, Any] = {"reduction": reduction, "options": each.options}
        parts = outcomes(subject, cut, exchange, late=random.random() < 0.5 and world.can_be_late, **how)

        def found() -> Worst:
            for part in parts[1:]:
                if part.loss.tobytes() != parts[0].loss.tobytes() or part.scale.tobytes() != parts[0].scale.tobytes():
                    return wrong("loss or scale differs between ranks")
            return compared(subject, cut, parts, exchange, truth(whole), **how)

        return judged(world, found)

    yield from strategies.searched(subject, case, judge)
