"""The properties of a correct backend. Each is a function that yields (label, worst element) per comparison.

A property compares results with the oracle's within derived bounds, or bit for bit where the contract requires it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from contrastile.backends.contract import Options
from contrastile.oracle.arrays import float64
from contrastile.schedules.local import Wanted
from contrastile.schedules.teacher import with_values
from contrastile.verify import (
    distributed,
    growth,
    layouts,
    memory,
    peak,
    public,
    rearrange,
    sizes,
    statistics,
    strategies,
)
from contrastile.verify.comparison import GRADIENT, NOTHING, Comparisons, Worst, compare, identical, parts, wrong
from contrastile.verify.plain import NOISIER, compare_with_plain
from contrastile.verify.trial import Property, SkipError, Trial
from contrastile.verify.truth import Outcome, truth

_MEDIUM = 1 << 23
"""Multiplications that take seconds in longdouble, because no library has matrix products of it."""


def value(trial: Trial) -> Comparisons:
    """The loss and the statistics of every row and column agree with the oracle's."""
    outcome, fields = trial.outcome, ["loss"]
    if trial.problem.kind != "sigmoid":
        statistics_outcome = trial.subject.run(replace(trial.problem, kind="statistics"), want=None)
        outcome, fields = replace(outcome, statistics=statistics_outcome.loss), ["statistics", "loss"]
    yield "", compare(outcome, trial.oracle.outcome, trial.bound, fields)


def gradients(trial: Trial) -> Comparisons:
    """The gradients of rows, columns, scale and bias agree with the oracle's; of values as of the features."""
    yield "", compare(trial.outcome, trial.oracle.outcome, trial.bound, GRADIENT)
    if trial.small and trial.subject.backend.values and trial.problem.kind != "sigmoid":
        yield "of values", compare(_outcome_of_values(trial), trial.oracle.outcome, trial.bound, GRADIENT)
    # without ``keep`` the backend chooses by speed: force both paths
    for keep in (0, 64) if trial.keeps and trial.subject.keep is None else ():
        outcome = replace(trial.subject, keep=keep).run(trial.problem)
        yield f"keep {keep}", compare(outcome, trial.oracle.outcome, trial.bound, GRADIENT)


def _outcome_of_values(trial: Trial) -> Outcome:
    """The outcome for features followed by their reverse as values, whose gradients are reversed back."""
    problem, depth = trial.problem, trial.problem.rows.shape[1]
    rows, *columns = (np.concatenate([x, x[:, ::-1]], axis=1) for x in (problem.rows, *problem.columns))
    wide_problem = replace(problem, rows=rows, columns=tuple(columns))
    outcome = trial.subject.run(wide_problem, with_values(trial.subject.backend, depth))
    rows, *columns = (x[:, : depth - 1 : -1] for x in (outcome.rows, *outcome.columns))
    return replace(outcome, rows=rows, columns=tuple(columns))


def plain(trial: Trial) -> Comparisons:
    """Loss and gradients have at most 2 x the error of a plain computation in the same dtype; on a GPU 3 x."""
    trial.only_finite()
    problem, subject = trial.problem, trial.subject
    if subject.dtype == "float64":
        if np.finfo(np.longdouble).eps > 2.0**-60:
            raise SkipError("nothing here is more exact than a plain float64 computation")
        if trial.products > _MEDIUM:
            raise SkipError("computes in longdouble: no large cases")
    plain_settings = subject.accuracy, subject.dtype, NOISIER[subject.device]
    yield "", compare_with_plain(problem, trial.oracle, trial.outcome, *plain_settings)


def tiles(trial: Trial) -> Comparisons:
    """Every tile size gives the same loss and gradients."""
    trial.only_small()
    m, n = len(trial.problem.rows), sum(rearrange.sizes(trial.problem))
    sizes = [(7, 5), (m // 2 + 1, n + 3), (2 * m + 1, n // 2 + 1), (64, 64), (128, 32)] + [(1, 1)] * (m * n <= 64)
    for tile in sizes:
        tile_options = Options(tile=tile)
        outcome = trial.subject.run(trial.problem, options=tile_options)
        bound = trial.subject.bounds(trial.problem, trial.oracle, options=tile_options)
        yield f"tile {tile[0]} x {tile[1]}", compare(outcome, trial.oracle.outcome, bound)


def options(trial: Trial) -> Comparisons:
    """No memory for G, a little of it, and no kept exponentials give the same loss and gradients."""
    trial.only_small()
    settings_to_try: tuple[dict[str, Any], ...] = ({"workspace": 0}, {"workspace": 1}, {"keep": 0}, {"keep": 1})
    for settings in settings_to_try:
        subject = replace(trial.subject, **settings)
        outcome = subject.run(trial.problem)
        bound = subject.bounds(trial.problem, trial.oracle)
        yield ", ".join(f"{name} {x}" for name, x in settings.items()), compare(outcome, trial.oracle.outcome, bound)
        if subject.keep == 0 and trial.problem.rows.size:
            yield "keep 0", wrong("something is kept") if replace(trial, subject=subject).keeps else NOTHING


def shift(trial: Trial) -> Comparisons:
    """With a number added to every logit, the log-sum-exps and the gradients are the oracle's."""
    trial.only_small()
    old_bias = 0.0 if trial.problem.bias is None else float(trial.problem.bias)
    # the bias is exact in float32
    new_bias, problem = float64(np.float32(old_bias + 4.0)), trial.problem
    # a guide's dot products have no bias, so its limits stay
    offset = new_bias - old_bias if problem.row_guide is None else 0.0
    limits = [None if x is None else x + offset for x in (problem.row_limits, problem.column_limits)]
    shifted = replace(problem, bias=new_bias, row_limits=limits[0], column_limits=limits[1])
    yield "bias + 4", trial.subject.compare(shifted)


def non_negative(trial: Trial) -> Comparisons:
    """A mean of negative log-probabilities of positives, or of softplus terms, is never below zero."""
    trial.only_finite()
    problem = trial.problem
    terms = [(side.weight, side.nll) for side in trial.oracle.sides] or [(problem.row_weight, 0.0 * problem.row_weight)]
    if any(((weight < 0) | ((weight > 0) & (nll < 0))).any() for weight, nll in terms):
        raise SkipError("one of its terms may be negative")
    loss = float(trial.outcome.loss)
    yield "", Worst(0.0 if loss >= 0.0 else np.inf, "loss", (), max(0.0, -loss), 0.0)


def symmetric(trial: Trial) -> Comparisons:
    """Rows against themselves, without columns of their own, give the sum of the rows' and the columns' gradients.

    Errors are at most those that ``plain`` allows.
    """
    trial.only_finite()
    if not rearrange.is_symmetric(trial.problem):
        raise SkipError("its rows are not its columns, or its pairs are not the same either way round")
    problem, subject = replace(trial.problem, columns=()), trial.subject
    # larger tiles give a large case about as many tiles as a small one
    tiles = ((5, 7), (16, 16)) if trial.small else ((37, 41),)
    for tile, factor in ((None, 1.0), *zip(tiles, (-2.5, 1.0), strict=False)):
        options, oracle = Options(tile=tile), trial.oracle if factor == 1.0 else truth(trial.problem, factor)
        outcome = subject.run(problem, options=options, upstream=factor)
        bound = rearrange.folded(trial.subject.bounds(trial.problem, oracle, factor, options))
        yield f"tile {tile}, upstream {factor}", compare(outcome, rearrange.folded(oracle.outcome), bound)
        if tile is None and subject.dtype != "float64":
            plain_settings = subject.accuracy, subject.dtype, NOISIER[subject.device], rearrange.folded
            yield "beside a plain computation", compare_with_plain(trial.problem, oracle, outcome, *plain_settings)


def upstream(trial: Trial) -> Comparisons:
    """The upstream gradient multiplies every gradient: 0 gives gradients of 0, and NaN is never swallowed."""
    trial.only_small()
    exact_gradients = [x for _, x in parts(trial.oracle.outcome, GRADIENT)]
    # a gradient scaler begins with 65536; float16 may not hold such gradients
    large_factor, largest_gradient = 65536.0, max(np.abs(x).max(initial=0.0) for x in exact_gradients if x is not None)
    if trial.subject.dtype == "float16" and largest_gradient * large_factor > 32768:
        large_factor = 4.0
    for factor in (-2.5, large_factor):
        yield f"upstream {factor}", trial.subject.compare(trial.problem, upstream=factor)
    trial.only_finite()
    for factor in (np.nan, np.inf):
        scaled_gradients = parts(trial.subject.run(trial.problem, upstream=factor), GRADIENT)
        swallowed = [
            name
            for (name, x), exact in zip(scaled_gradients, exact_gradients, strict=True)
            if x is not None and exact is not None and (np.isfinite(x) & (exact != 0)).any()
        ]
        yield f"upstream {factor}", wrong(f"{swallowed[0]} is finite") if swallowed else NOTHING
    outcome = trial.subject.run(trial.problem, upstream=0.0)
    zero_gradients = rearrange.scaled(trial.oracle.outcome, 0.0, GRADIENT)
    yield "upstream 0", compare(outcome, zero_gradients, rearrange.scaled(zero_gradients, 0.0, ("loss",)), GRADIENT)


def frozen(trial: Trial) -> Comparisons:
    """Leaving out some of the gradients (rows, columns, both, all) changes none of the others, nor the loss."""
    trial.only_small()
    count, has_bias, exact = len(trial.problem.columns), trial.problem.kind == "sigmoid", trial.oracle.outcome
    no_columns, all_columns, even_columns = (False,) * count, (True,) * count, tuple(c % 2 == 0 for c in range(count))
    requests: dict[str, Wanted | None] = {
        "columns frozen": Wanted(True, no_columns, True, has_bias),
        "rows frozen": Wanted(False, all_columns, False, has_bias),
        "rows frozen, not the scale": Wanted(False, all_columns, True, has_bias),
        "the scale frozen": Wanted(True, all_columns, False, False),
        "rows and columns frozen": Wanted(False, no_columns, not has_bias, has_bias),
        "the value alone": None,
    }
    if count > 1:
        requests["every other block frozen"] = Wanted(True, even_columns, True, has_bias)
    for label, wanted in requests.items():
        outcome = trial.subject.run(trial.problem, want=wanted)
        request = wanted or Wanted(False, no_columns, False)
        columns = tuple(x if is_wanted else None for x, is_wanted in zip(exact.columns, request.columns, strict=True))
        expected: dict[str, Any] = {"columns": columns}
        expected |= {name: None for name in ("rows", "scale", "bias") if not getattr(request, name)}
        yield label, compare(outcome, replace(exact, **expected), trial.bound)


def accumulation(trial: Trial) -> Comparisons:
    """Gradients are added to the accumulators: a second call doubles them."""
    trial.only_small()
    outcome = trial.subject.run(trial.problem, layouts.called_twice(trial.subject.backend))
    doubled = rearrange.scaled(trial.oracle.outcome, 2.0, ("rows", "columns", "scale"))
    # the second pass adds to the first, so its partial sums are up to twice as large: three bounds, not two
    bound = rearrange.scaled(trial.bound, 3.0, GRADIENT)
    yield "added twice", compare(outcome, doubled, bound, ("rows", "columns", "scale"))


def determinism(trial: Trial) -> Comparisons:
    """The same inputs give the same bits."""
    for label in ("second run", "third run") if trial.small else ("second run",):
        yield label, identical(trial.subject.run(trial.problem), trial.outcome)


def guard_bands(trial: Trial) -> Comparisons:
    """No buffer is read or written out of bounds."""
    yield from _with_layouts(trial, {"between guard bands": layouts.guard_bands})


def strided(trial: Trial) -> Comparisons:
    """Transposed, every-other, reversed and expanded views give the same results as contiguous arrays."""
    yield from _with_layouts(trial, {"transposed": layouts.transposed, "every other element": layouts.every_other})
    # torch has no negative strides
    if trial.subject.backend.arrays.name != "torch":
        yield from _with_layouts(trial, {"backwards": layouts.backwards})
    rows, *columns = (np.broadcast_to(x[:1], x.shape) for x in (trial.problem.rows, *trial.problem.columns))
    problem = replace(trial.problem, rows=rows, columns=tuple(columns))
    yield "expanded", trial.subject.compare(problem, backend=layouts.expanded(trial.subject.backend))


def _with_layouts(trial: Trial, layouts_by_label: dict[str, layouts.Layout]) -> Comparisons:
    trial.only_small()
    for label, layout in layouts_by_label.items():
        violations: list[str] = []
        outcome = trial.subject.run(trial.problem, layouts.relocated(trial.subject.backend, layout, violations))
        yield label, compare(outcome, trial.oracle.outcome, trial.bound)
        for violation in violations[:1]:
            yield label, wrong(violation)


def poisoned_memory(trial: Trial) -> Comparisons:
    """No result depends on the contents of uninitialised memory."""
    trial.only_small()
    with memory.poisoned(trial.subject.backend.arrays):
        outcome = trial.subject.run(trial.problem)
    yield "", compare(outcome, trial.oracle.outcome, trial.bound)


def non_finite(trial: Trial) -> Comparisons:
    """A NaN feature makes NaN where the oracle has NaN; an infinite one, or a NaN scale, never gives a finite loss."""
    trial.only_small()
    trial.only_finite()
    problem = trial.problem
    if problem.rows.size == 0 or not problem.row_weight.any():
        raise SkipError("has no row with a weight")
    row = int(np.flatnonzero(problem.row_weight)[-1])

    def planted(x: np.ndarray, position: int, feature: int, number: float) -> np.ndarray:
        x = x.copy()
        x[position, feature] = number
        return x

    middle = problem.rows.shape[1] // 2
    infinite_problems = {
        f"{number} in a row": replace(problem, rows=planted(problem.rows, row, middle, number))
        for number in (np.inf, -np.inf)
    }
    yield "NaN in a row", trial.subject.compare(replace(problem, rows=planted(problem.rows, row, 0, np.nan)))
    if problem.column_weight is None and not problem.row_weight.all():
        unweighted_row = int(np.flatnonzero(problem.row_weight == 0)[0])
        outcome = trial.subject.run(replace(problem, rows=planted(problem.rows, unweighted_row, 0, np.nan)), want=None)
        yield "NaN in a row of weight 0", compare(outcome, trial.oracle.outcome, trial.bound, ("loss",))
    first, *others = problem.columns
    if len(first):
        columns = (planted(first, len(first) - 1, -1, np.nan), *others)
        yield "NaN in a column", trial.subject.compare(replace(problem, columns=columns))
        columns = (planted(first, 0, middle, np.inf), *others)
        infinite_problems["inf in a column"] = replace(problem, columns=columns)
        positive_column = -1 if problem.positives is None else int(problem.positives[row])
        if 0 <= positive_column < len(first):
            # the logit of the row's positive alone is +inf
            columns = first.copy()
            columns[:, middle], columns[positive_column, middle] = -1.0, 1.0
            rows = planted(problem.rows, row, middle, np.copysign(np.inf, problem.scale))
            infinite_problems["an infinite positive"] = replace(problem, rows=rows, columns=(columns, *others))
    infinite_problems["NaN for the scale"] = replace(problem, scale=np.asarray(np.nan))
    for label, changed in infinite_problems.items():
        exact, outcome = truth(changed).outcome, trial.subject.run(changed)
        if np.isfinite(exact.loss):
            continue
        is_finite = np.isfinite(outcome.loss)
        if label == "an infinite positive":
            is_finite |= bool((np.isfinite(outcome.rows[row]) & np.isnan(exact.rows[row])).any())
        yield label, wrong("a number where the oracle has NaN") if is_finite else NOTHING


_EVERY_CASE = (
    value,
    gradients,
    statistics.bars,
    statistics.public_statistics,
    plain,
    tiles,
    options,
    shift,
    non_negative,
    symmetric,
    upstream,
    frozen,
    accumulation,
    determinism,
    guard_bands,
    strided,
    poisoned_memory,
    non_finite,
)
_WITH_OWN_CASE = (
    Property("saved-bytes", memory.saved_bytes, "batch-doubling"),
    Property("peak-memory", peak.peak_memory, peak.CASE),
    Property("growth", growth.growth, growth.CASE),
    Property("sizes", sizes.sizes, sizes.CASE),
    *public.PROPERTIES,
    Property("ranks", distributed.several_ranks, "ranks"),
    Property("drawn", strategies.drawn, strategies.CASE),
)
PROPERTIES = {
    prop.name: prop
    for prop in (*(Property(check.__name__.replace("_", "-"), check) for check in _EVERY_CASE), *_WITH_OWN_CASE)
}
