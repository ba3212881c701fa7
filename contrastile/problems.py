"""Each loss as a problem: its weights, targets and pairs over the general form. No loss has code of its own below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from contrastile import validation
from contrastile.backends.contract import state_dtype
from contrastile.exchange.local import Gradients
from contrastile.exchange.problem import Problem

Array = Any


@dataclass(frozen=True, slots=True)
class Loss:
    """A problem, and how its gradients become those of the public function's positional arguments."""

    problem: Problem
    pull_back: Callable[[Gradients], tuple[Array, ...]]


def clip(image: Array, text: Array, scale: Any, *, ids: Array | None = None) -> Loss:
    """Both directions, halved: u = v = 1 / (2b); the positive of row i is column i."""
    arrays = validation.features(image=image, text=text)
    validation.paired("image", image, "text", text, "use info_nce for keys without a query")
    b, state = image.shape[0], state_dtype(arrays.dtype(image))
    weight, target = (arrays.full((b,), value, state, image) for value in (0.5 / b, 1.0))
    same = None if ids is None else validation.integers("ids", ids, b, "pair", arrays, image)
    problem = Problem(
        rows=image,
        columns=(text,),
        scale=validation.scalar("scale", scale, arrays, state, image),
        row_weight=weight,
        row_target=target,
        column_weight=weight,
        column_target=target,
        positives=arrays.arange(0, b, image),
        row_ids=same,
        column_ids=same,
    )
    return Loss(problem, lambda g: (g.rows, g.columns[0], g.scale))


def info_nce(
    query: Array,
    key: Array,
    scale: Any,
    *,
    negatives: Array | Sequence[Array] | None = None,
    positives: Array | None = None,
    row_ids: Array | None = None,
    column_ids: Array | None = None,
) -> Loss:
    """One direction: u = 1 / m, no column weights; the key and each block of negatives share one log-sum-exp."""
    more: tuple[Array, ...]
    more = () if negatives is None else tuple(negatives) if isinstance(negatives, list | tuple) else (negatives,)
    arrays = validation.features(query=query, key=key, **{f"negatives[{i}]": x for i, x in enumerate(more)})
    m, n = query.shape[0], key.shape[0] + sum(x.shape[0] for x in more)
    state = state_dtype(arrays.dtype(query))
    row_weight, row_target = (arrays.full((m,), value, state, query) for value in (1.0 / m, 1.0))
    if positives is None:
        validation.paired("query", query, "key", key, "give positives= to say which key is whose")
        where = arrays.arange(0, m, query)
    else:
        where = validation.integers("positives", positives, m, "query", arrays, query)
        validation.positives(where, n, arrays)
        # where values cannot be read, a positive that is out of range makes the loss NaN
        row_target = arrays.where((where >= 0) & (where < n), row_target, float("nan"))
    if (row_ids is None) != (column_ids is None):
        raise ValueError("row_ids and column_ids must be given together, got only one; give both, or neither")
    problem = Problem(
        rows=query,
        columns=(key, *more),
        scale=validation.scalar("scale", scale, arrays, state, query),
        row_weight=row_weight,
        row_target=row_target,
        positives=where,
        row_ids=None if row_ids is None else validation.integers("row_ids", row_ids, m, "query", arrays, query),
        column_ids=None
        if column_ids is None
        else validation.integers("column_ids", column_ids, n, "column", arrays, query),
    )
    return Loss(problem, lambda g: (g.rows, g.columns[0], g.scale))


def nt_xent(view_a: Array, view_b: Array, scale: Any) -> Loss:
    """The 2b views against themselves, each excluded from its own columns: u = 1 / (2b)."""
    arrays = validation.features(view_a=view_a, view_b=view_b)
    validation.paired("view_a", view_a, "view_b", view_b, "give two views of every sample")
    b, state = view_a.shape[0], state_dtype(arrays.dtype(view_a))
    views = arrays.concat([view_a, view_b])
    weight, target = (arrays.full((2 * b,), value, state, views) for value in (0.5 / b, 1.0))
    itself = arrays.arange(0, 2 * b, views)
    problem = Problem(
        rows=views,
        columns=(views,),
        scale=validation.scalar("scale", scale, arrays, state, views),
        row_weight=weight,
        row_target=target,
        positives=arrays.concat([itself[b:], itself[:b]]),
        excluded=itself,
    )

    def pull_back(g: Gradients) -> tuple[Array, ...]:
        both = _both_sides(g)
        return both[:b], both[b:], g.scale

    return Loss(problem, pull_back)


def sup_con(features: Array, labels: Array, scale: Any) -> Loss:
    """Samples against themselves, self excluded, t = 1 / |P(i)|; u = 1 / (samples that have a positive)."""
    arrays = validation.features(features=features)
    b, state = features.shape[0], state_dtype(arrays.dtype(features))
    labels = validation.integers("labels", labels, b, "sample", arrays, features)
    partners = arrays.cast(arrays.count_in(labels, labels) - 1, state)
    counted = arrays.cast(partners > 0, state)
    # a batch in which no label repeats has loss 0, not 0 / 0
    sharing = arrays.maximum(arrays.cast(arrays.total(counted), state), 1.0)
    problem = Problem(
        rows=features,
        columns=(features,),
        scale=validation.scalar("scale", scale, arrays, state, features),
        row_weight=counted / sharing,
        row_target=counted / arrays.maximum(partners, 1.0),
        excluded=arrays.arange(0, b, features),
        row_ids=labels,
        column_ids=labels,
        match="target",
    )
    return Loss(problem, lambda g: (_both_sides(g), g.scale))


def sigmoid(image: Array, text: Array, scale: Any, bias: Any, *, ids: Array | None = None) -> Loss:
    """The additive loss over all pairs, divided by b: u = 1 / b; the positive of row i is column i."""
    arrays = validation.features(image=image, text=text)
    validation.paired("image", image, "text", text, "every image needs its text")
    b, state = image.shape[0], state_dtype(arrays.dtype(image))
    weight, target = (arrays.full((b,), value, state, image) for value in (1.0 / b, 1.0))
    same = None if ids is None else validation.integers("ids", ids, b, "pair", arrays, image)
    problem = Problem(
        kind="sigmoid",
        rows=image,
        columns=(text,),
        scale=validation.scalar("scale", scale, arrays, state, image),
        bias=validation.scalar("bias", bias, arrays, state, image),
        row_weight=weight,
        row_target=target,
        positives=arrays.arange(0, b, image),
        row_ids=same,
        column_ids=same,
    )
    return Loss(problem, lambda g: (g.rows, g.columns[0], g.scale, g.bias))


def _both_sides(g: Gradients) -> Array:
    """The gradient of features that are rows and columns at once."""
    rows: Array = g.rows
    return rows + g.columns[0]
