"""Problems that are drawn: a failure prints a recipe that can be read again, and every kind is drawn."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from contrastile.backends.contract import Options
from contrastile.verify import strategies
from contrastile.verify.rounding import round_to
from contrastile.verify.selection import DTYPES
from contrastile.verify.sharded import ShardedRecipe
from contrastile.verify.strategies import Recipe, problem, recipes
from contrastile.verify.truth import masks, truth

DRAWN = Recipe(5, 7, 3, "softmax", "normal", 14.0, 0.0, "signed", True, "drop", 2, 0, 1, 11)
SHARED = ShardedRecipe(*astuple(DRAWN), (1, 0, 3), (2, 1, 0), "gather", "sum", True)
TEXT = "m=5,n=7,d=3,kind=softmax,"


@pytest.mark.parametrize("recipe", [DRAWN, SHARED], ids=["drawn", "sharded"])
def test_a_recipe_prints_and_parses(recipe: Recipe) -> None:
    assert str(recipe).startswith(f"{recipe.CASE}:{TEXT}")
    assert recipe.parse(str(recipe)) == recipe
    assert recipe is DRAWN or str(recipe).endswith("rows=1.0.3,columns=2.1.0,exchange=gather,reduction=sum,late=True")


@pytest.mark.parametrize(
    ("recipe", "old", "new"),
    [
        (DRAWN, "m=5", "m=five"),
        (DRAWN, "normal", "odd"),
        (DRAWN, "n=7", "n=0"),
        (DRAWN, "kind=softmax", "kind=softmax,more=1"),
        (DRAWN, ",n=7", ""),
        (SHARED, "gather", "star"),
        (SHARED, "sum", "max"),
        (SHARED, "1.0.3", "1.0"),
        (SHARED, "1.0.3", "1.-1.3"),
        (SHARED, "late=True", "late=yes"),
        (SHARED, ",n=7", ""),
        (SHARED, "rows=", "lines="),
    ],
)
def test_what_is_no_recipe_says_so(recipe: Recipe, old: str, new: str) -> None:
    with pytest.raises(ValueError, match="as a failure prints it"):
        recipe.parse(str(recipe).replace(old, new, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairs", strategies.PAIRS)
@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_drawn_problems_keep_the_contract(dtype: str, pairs: str, kind: str) -> None:
    made = problem(replace(DRAWN, pairs=pairs, kind=kind, m=13, n=17), dtype)
    admitted, positive = masks(made)
    assert sum(map(len, made.columns)) == 17
    assert all(np.array_equal(x, round_to(x, dtype)) for x in (made.rows, *made.columns))
    assert (made.row_weight[~admitted.any(axis=1)] == 0).all()
    assert (made.row_target[~positive.any(axis=1)] == 0).all()
    assert (made.column_weight is None) == (kind == "sigmoid")
    assert np.isfinite(truth(made).outcome.loss)


def test_every_kind_of_problem_is_drawn() -> None:
    seen = set()

    @settings(max_examples=300, database=None, derandomize=True, phases=[Phase.generate], deadline=None)
    @given(recipes(Recipe))
    def collect(recipe: Recipe) -> None:
        seen.update((recipe.kind, recipe.features, recipe.weights, recipe.pairs, recipe.two_sided))
        seen.add(("blocks", recipe.blocks))
        seen.add(recipe.options == Options())

    collect()
    expected = {"softmax", "sigmoid", *strategies.FEATURES, *strategies.PAIRS, *strategies.WEIGHTS, True, False}
    assert expected | {("blocks", b) for b in (1, 2, 3)} <= seen
