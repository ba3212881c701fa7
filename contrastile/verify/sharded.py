"""Problems that hypothesis draws, each with its cut into the parts of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from contrastile.reporting import one_line
from contrastile.verify import strategies
from contrastile.verify.comparison import Comparisons, Worst, wrong
from contrastile.verify.shards import Cut, compared, outcomes
from contrastile.verify.strategies import Recipe
from contrastile.verify.trial import SkipError, Subject
from contrastile.verify.truth import Outcome, truth
from contrastile.verify.worlds import judged

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


@dataclass(frozen=True, slots=True)
class ShardedRecipe(Recipe):
    """A recipe and how it is shared.

    Attributes:
        rows: weights of the ranks' rows; all 0 stands for equal ones.
        columns: weights of their columns; of rows against themselves they say nothing.
        exchange: "ring" or "gather".
        reduction: "mean" or "sum".
        late: whether messages arrive at the last moment, where the world can do that.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    exchange: str
    reduction: str
    late: bool

    CASE: ClassVar[str] = "sharded"

    @property
    def sound(self) -> bool:
        known = self.exchange in EXCHANGES and self.reduction in REDUCTIONS
        weights = len(self.rows) == len(self.columns) and min(*self.rows, *self.columns) >= 0
        # the class by its name: slots make another one of it than a bare super() knows
        return known and weights and super(ShardedRecipe, self).sound


CASE = ShardedRecipe.CASE
EXCHANGES, REDUCTIONS = ("ring", "gather"), ("mean", "sum")


def sharded_recipes(ranks: int) -> SearchStrategy[ShardedRecipe]:
    """All small problems in all their parts; shrinks towards equal parts of a small one on a ring."""
    from hypothesis import strategies as st

    weights = st.tuples(*[st.integers(0, 5)] * ranks)
    return strategies.recipes(
        ShardedRecipe,
        rows=weights,
        columns=weights,
        exchange=st.sampled_from(EXCHANGES),
        reduction=st.sampled_from(REDUCTIONS),
        late=st.booleans(),
    )


def sharded(subject: Subject, case: str) -> Comparisons:
    """Problems and parts drawn by hypothesis give the oracle's value and gradients; the label is the shrunk recipe.

    A case "sharded:..." is one recipe, and nothing is drawn. The leader draws, and the others hear from it.
    """
    world = subject.ranks
    if case != CASE:
        one = ShardedRecipe.parse(case)
        if len(one.rows) != world.size:
            raise SkipError(f"the case is for a world of {len(one.rows)}, and this one has {world.size} ranks")
        held = _computed(one, subject)
        yield str(one), judged(world, lambda: _judge(*held, one, subject))
        return
    if not world.leads:
        while (drawn := world.share(None)) is not None:
            try:
                _computed(drawn, subject)
            except Exception:
                # the leader sees the same error, and reports it
                continue
        yield cast("tuple[str, Worst]", world.share(None))
        return

    def hold(drawn: ShardedRecipe) -> Worst:
        world.share(drawn)
        return _judge(*_computed(drawn, subject), drawn, subject)

    try:
        found = strategies.search(sharded_recipes(world.size), hold, subject)
    except Exception as error:
        # the others wait for a verdict, whatever it is
        found = CASE, wrong(one_line(error))
    world.share(None)
    yield world.share(found)


def _computed(drawn: ShardedRecipe, subject: Subject) -> tuple[Cut, list[Outcome]]:
    """The problem in its parts, and what the ranks make of them."""
    whole = strategies.problem(drawn, subject.dtype)
    itself, options = drawn.blocks == 0, drawn.options
    cut = Cut.of_itself(whole, drawn.rows) if itself else Cut.of(whole, drawn.rows, drawn.columns)
    late = drawn.late and subject.ranks.can_be_late
    return cut, outcomes(subject, cut, drawn.exchange, reduction=drawn.reduction, late=late, options=options)


def _judge(cut: Cut, parts: list[Outcome], drawn: ShardedRecipe, subject: Subject) -> Worst:
    for part in parts[1:]:
        if part.loss.tobytes() != parts[0].loss.tobytes() or part.scale.tobytes() != parts[0].scale.tobytes():
            return wrong("loss or scale differs between ranks")
    how: dict[str, Any] = {"reduction": drawn.reduction, "options": drawn.options}
    return compared(subject, cut, parts, drawn.exchange, truth(cut.problem), **how)
