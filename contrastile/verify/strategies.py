"""Problems drawn by hypothesis: ragged, hot, signed, masked, split, of one direction or two, rows with themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np

from contrastile.backends.contract import Options, UnsupportedProblemError
from contrastile.oracle.arrays import FloatArray, IntArray
from contrastile.oracle.general import logits
from contrastile.reporting import one_line
from contrastile.schedules.problem import Problem
from contrastile.verify import rearrange
from contrastile.verify.comparison import NOTHING, Comparisons, Worst, compare, wrong
from contrastile.verify.draws import with_limits
from contrastile.verify.plain import as_it_is, compare_with_plain
from contrastile.verify.rounding import round_to
from contrastile.verify.truth import masks, truth, within

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from contrastile.verify.trial import Subject

T = TypeVar("T")
REFUSED_SHARE = 0.25
"""A backend that refuses a larger share of the problems of a dtype that it claims is not verified."""
FEATURES = ("normal", "signs", "twins", "trained")
NOISIER_DRAWN = 5.0
"""As ``plain.NOISIER``, of drawn problems on a host: of tens of thousands some meet with a lucky plain computation."""
PAIRS = ("diagonal", "random", "none", "drop", "labels", "itself")
WEIGHTS = ("mean", "signed")
SCALES = (1.0, 0.0, 14.0, 100.0, 200.0, -3.0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A problem in a few numbers, so that a failure can be shrunk, printed on one line and given to ``--case``.

    Attributes:
        m: rows.
        n: columns.
        d: width.
        kind: "softmax" or "sigmoid".
        features: "normal" unit vectors; "signs", in {-1, 0, 1}; "twins", a few vectors repeated; "trained", pairs
            that nearly agree.
        scale: any number.
        bias: any number; 0 means none for a softmax loss.
        weights: "mean", 1 / m; "signed", any sign and some of them 0.
        two_sided: whether columns have weights, too.
        pairs: positives on the diagonal, at random columns, nowhere; equal ids dropped; labels; labels with each row's
            own column excluded.
        blocks: column blocks, some of which may be empty; 0 for rows against themselves, of a softmax loss, where n,
            two_sided and the columns' features say nothing.
        limits: whether rows and columns have limits; a softmax loss of rows against columns alone.
        tile_rows: of the tile; 0 lets the backend choose.
        tile_columns: of the tile.
        seed: of the values.
    """

    m: int
    n: int
    d: int
    kind: str
    features: str
    scale: float
    bias: float
    weights: str
    two_sided: bool
    pairs: str
    blocks: int
    limits: bool
    tile_rows: int
    tile_columns: int
    seed: int

    CASE: ClassVar[str] = "drawn"

    def __str__(self) -> str:
        def written(x: Any) -> str:
            return ".".join(map(str, x)) if isinstance(x, tuple) else str(x)

        return f"{self.CASE}:" + ",".join(f"{f.name}={written(getattr(self, f.name))}" for f in fields(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """The recipe whose ``str`` is this text.

        Raises:
            ValueError: there is none.
        """
        read: dict[str, Callable[[str], Any]] = {
            "int": int,
            "float": float,
            "str": str,
            "bool": {"True": True, "False": False}.__getitem__,
            "tuple[int, ...]": lambda x: tuple(map(int, x.split("."))),
        }
        try:
            given = dict(item.split("=", 1) for item in text.removeprefix(f"{cls.CASE}:").split(","))
            recipe = cls(**{f.name: read[str(f.type)](given.pop(f.name)) for f in fields(cls)})
            if given or not recipe.sound:
                raise ValueError
        except (KeyError, ValueError) as error:
            raise ValueError(f"case must be {cls.CASE}:..., as a failure prints it, got {text!r}") from error
        return recipe

    @property
    def sound(self) -> bool:
        """Whether there is such a problem."""
        chosen = (self.features, FEATURES), (self.pairs, PAIRS), (self.weights, WEIGHTS)
        return min(self.m, self.n - 1) >= 0 and all(value in allowed for value, allowed in chosen)

    @property
    def options(self) -> Options:
        return Options(tile=(self.tile_rows, self.tile_columns) if self.tile_rows else None)


R = TypeVar("R", bound=Recipe)


def recipes(of: type[R], **more: SearchStrategy[Any]) -> SearchStrategy[R]:
    """All recipes of small problems, rows against themselves among them; shrinks to a square softmax of few rows.

    Args:
        of: their kind.
        **more: its other fields.
    """
    from hypothesis import strategies as st

    log_uniform = st.floats(-5.0, 5.0).map(lambda x: float(np.float32(np.exp(x))))
    return st.builds(
        of,
        **more,
        m=st.integers(1, 41) | st.just(0),
        n=st.integers(1, 53),
        d=st.integers(1, 37) | st.sampled_from((72, 128, 136, 200)),
        kind=st.sampled_from(["softmax", "softmax", "sigmoid"]),
        features=st.sampled_from(FEATURES),
        scale=st.sampled_from(SCALES) | log_uniform,
        bias=st.sampled_from([0.0, -10.0, 2.5, 20.0]),
        weights=st.sampled_from(WEIGHTS),
        two_sided=st.booleans(),
        pairs=st.sampled_from(PAIRS),
        blocks=st.integers(1, 3) | st.just(0),
        limits=st.sampled_from([False] * 5 + [True]),
        tile_rows=st.just(0) | st.integers(1, 19),
        tile_columns=st.integers(1, 19),
        seed=st.integers(0, 2**32 - 1),
    )


def problem(recipe: Recipe, dtype: str) -> Problem:
    """The recipe's problem: features representable in ``dtype``, every other number in float32.

    As the contract requires, a target is 1 / positives or 0, and a row or column that admits nothing has weight 0.
    """
    random = np.random.default_rng(recipe.seed)
    themselves = recipe.blocks == 0
    m, n = recipe.m, recipe.m if themselves else recipe.n
    two_sided = recipe.two_sided and recipe.kind == "softmax" and not themselves
    rows, columns = (round_to(x, dtype) for x in _features(recipe, random))
    labels: dict[str, Any] = {
        "row_ids": random.integers(0, max(2, n // 3), m),
        "column_ids": random.integers(0, max(2, n // 3), n),
        "match": "drop" if recipe.pairs == "drop" else "target",
    }
    at_random = np.where(random.random(m) < 0.8, random.integers(0, max(1, n), m), n + 3)
    if themselves:
        columns, labels["column_ids"], at_random = rows, labels["row_ids"], _partners(m, random)
    pairs: dict[str, Any] = {
        "diagonal": {"positives": np.arange(m)},
        "random": {"positives": at_random},
        "none": {},
        "drop": {"positives": at_random, **labels},
        "labels": labels,
        "itself": {"excluded": np.arange(m), **labels},
    }[recipe.pairs]
    cuts = np.sort(random.integers(0, n + 1, max(recipe.blocks, 1) - 1))
    bare = Problem(
        kind="sigmoid" if recipe.kind == "sigmoid" and not themselves else "softmax",
        rows=rows,
        columns=rearrange.split(columns, np.diff(cuts, prepend=0, append=n).tolist()),
        scale=round_to(recipe.scale, "float32"),
        bias=round_to(recipe.bias, "float32") if recipe.kind == "sigmoid" or recipe.bias else None,
        row_weight=np.zeros(m),
        row_target=np.zeros(m),
        **pairs,
    )
    admitted, positive = masks(bare)
    if recipe.limits and bare.kind == "softmax" and not themselves:
        bare = with_limits(replace(bare, column_weight=np.zeros(n) if two_sided else None))
    dense = logits(rows, columns, bare.scale, 0.0 if bare.bias is None else float(bare.bias))

    def side(axis: int) -> tuple[FloatArray, FloatArray]:
        x, A, P, limits = dense, admitted, positive, bare.row_limits
        if axis == 0:
            x, A, P, limits = dense.T, admitted.T, positive.T, bare.column_limits
        counts = within(A, P, x, limits).any(axis=1)
        size, count = admitted.shape[1 - axis], positive.sum(axis=axis)
        weight: FloatArray = np.full(size, 1.0 / max(size, 1))
        if recipe.weights == "signed":
            weight[:] = random.standard_normal(size) * (random.random(size) < 0.75)
        target = np.where(count > 0, 1.0 / np.maximum(count, 1), 0.0)
        return round_to(np.where(counts, weight, 0.0), "float32"), target

    weights: dict[str, Any] = dict(zip(("row_weight", "row_target"), side(1), strict=True))
    if two_sided:
        weights |= dict(zip(("column_weight", "column_target"), side(0), strict=True))
    return replace(bare, **weights)


def _partners(m: int, random: np.random.Generator) -> IntArray:
    """Positives that name each other; of an odd number one row names itself."""
    order, partner = random.permutation(m), np.arange(m)
    first, second = order[0 : m - 1 : 2], order[1::2]
    partner[first], partner[second] = second, first
    return partner


def _features(recipe: Recipe, random: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    m, n, d = recipe.m, recipe.n, recipe.d
    if recipe.features == "signs":
        return tuple(random.integers(-1, 2, (size, d)).astype(np.float64) for size in (m, n))  # type: ignore[return-value]
    rows, columns = (random.standard_normal((size, d)) for size in (m, n))
    if recipe.features == "twins":
        rows, columns = (x[np.arange(len(x)) % 3] if len(x) > 3 else x for x in (rows, columns))
    if recipe.features == "trained":
        rows = columns[np.arange(m) % n] + 0.1 * rows
    rows, columns = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-3) for x in (rows, columns))
    return rows, columns


CASE = Recipe.CASE


def drawn(subject: Subject, case: str) -> Comparisons:
    """Problems drawn by hypothesis give the oracle's value and gradients; the label is the shrunk recipe.

    On a host their errors are at most five times a plain computation's.

    A case "drawn:..." is one recipe, and nothing is drawn.
    """
    if case != Recipe.CASE:
        recipe = Recipe.parse(case)
        yield str(recipe), _compare(recipe, subject)
        return
    yield search(recipes(Recipe), lambda recipe: _compare(recipe, subject), subject)


class _FoundError(Exception):
    pass


def search(recipes: SearchStrategy[T], compare: Callable[[T], Worst], subject: Subject) -> tuple[str, Worst]:
    """The worst of all recipes drawn, or the smallest that fails: its text, and the result of ``compare``.

    Raises:
        UnsupportedProblemError: nothing failed, and the backend refused too many of the problems.
    """
    import hypothesis
    import hypothesis.errors

    worst: tuple[str, Worst] = ("", NOTHING)
    failed: list[tuple[str, Worst]] = []
    refusals: list[str] = []
    drawn = 0

    def test(recipe: T) -> None:
        nonlocal worst, drawn
        drawn += 1
        try:
            found = str(recipe), compare(recipe)
        except UnsupportedProblemError as reason:
            refusals.append(str(reason))
            return
        except Exception as error:
            found = str(recipe), wrong(one_line(error))
        worst = max(worst, found, key=lambda each: each[1].ratio)
        if not found[1].ratio < 1:
            failed.append(found)
            raise _FoundError

    # versions differ in which there are
    checks: list[Any] = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(
        max_examples=subject.examples,
        deadline=None,
        database=None,
        derandomize=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=checks,
    )
    try:
        with _temporary_home():
            hypothesis.seed(subject.seed)(settings(hypothesis.given(recipes)(test)))()
    except (_FoundError, hypothesis.errors.Flaky, ExceptionGroup):
        # hypothesis replays the smallest failure last; a flaky failure may pass then, and counts all the same
        return failed[-1]
    if len(refusals) > REFUSED_SHARE * drawn:
        raise UnsupportedProblemError(f"{len(refusals)} of {drawn} drawn problems refused, the last: {refusals[-1]}")
    return worst


@contextmanager
def _temporary_home() -> Iterator[None]:
    """Keep hypothesis from writing its caches to the current folder."""
    from hypothesis.configuration import set_hypothesis_home_dir

    with TemporaryDirectory() as folder:
        set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            set_hypothesis_home_dir(None)


def _compare(recipe: Recipe, subject: Subject) -> Worst:
    drawn_problem = problem(recipe, subject.dtype)
    oracle = truth(drawn_problem)
    bound = subject.bounds(drawn_problem, oracle, options=recipe.options)
    given, view = drawn_problem, as_it_is
    if recipe.blocks == 0:
        given, view = replace(drawn_problem, columns=()), rearrange.folded
    got = subject.run(given, options=recipe.options)
    worst = compare(got, view(oracle.outcome), view(bound))
    # where G is rounded to 16 bits, errors of features that are drawn twice add up
    if subject.device == "cpu" and subject.dtype != "float64" and subject.accuracy.gradient_rounding == 0:
        how = subject.accuracy, subject.dtype, NOISIER_DRAWN, view
        worst = max(worst, compare_with_plain(drawn_problem, oracle, got, *how), key=lambda each: each.ratio)
    return worst
