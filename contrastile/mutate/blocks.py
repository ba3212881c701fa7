"""Defects in what a primitive receives: sizes, precision, scale, bias, weights, pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary, library_of
from contrastile.backends.contract import Array, Block, SideStatistics
from contrastile.mutate.wrapping import (
    Plant,
    calling,
    defect,
    doubled,
    features_seen,
    planted,
    rounded,
    seen,
    set_where,
)
from contrastile.verify.wrapped import around

# logits that are wrong at some sizes

for _sizes, _about, _where in (
    ("at-m-64", "where m is a multiple of 64", lambda b: b.rows.shape[0] % 64 == 0),
    ("at-m-128", "where m is a multiple of 128", lambda b: b.rows.shape[0] % 128 == 0),
    ("at-n-64", "where n is a multiple of 64", lambda b: b.columns.shape[0] % 64 == 0),
    ("at-d-512", "at d = 512", lambda b: b.rows.shape[1] == 512),
    ("beyond-d-1024", "where d > 1024", lambda b: b.rows.shape[1] > 1024),
    ("beyond-n-1000", "where n > 1000", lambda b: b.columns.shape[0] > 1000),
    ("beyond-n-1100", "where n > 1100", lambda b: b.columns.shape[0] > 1100),
    ("at-d-768", "at d = 768", lambda b: b.rows.shape[1] == 768),
    ("beyond-n-32767", "where n > 32767", lambda b: b.columns.shape[0] > 32767),
    ("beyond-2-21-pairs", "where m n > 2^21", lambda b: b.rows.shape[0] * b.columns.shape[0] > 2**21),
    ("at-m-100", "where m = 100", lambda b: b.rows.shape[0] == 100),
    ("beyond-m-5000-where-d-9", "where m > 5000 and d > 8", lambda b: b.rows.shape[0] > 5000 and b.rows.shape[1] > 8),
    ("beyond-d-4100", "where d > 4100", lambda b: b.rows.shape[1] > 4100),
    ("at-one-row", "where m = 1", lambda b: b.rows.shape[0] == 1),
):
    defect(f"doubled-{_sizes}", f"Logits are doubled {_about}", doubled(_where))


def _first_features(count: Callable[[int], int]) -> Plant:
    """Features after the first ``count(width)`` are 0."""

    def change(arrays: ArrayLibrary, x: Array) -> Array:
        width = x.shape[1]
        return set_where(arrays, arrays.arange(0, width, x)[None, :] >= (count(width) or width), 0.0, x)

    return features_seen(change)


defect("last-feature-of-odd-d", "The last feature is dropped where d is odd", _first_features(lambda d: d // 2 * 2))
defect("features-beyond-128", "Features from the 129th on are dropped", _first_features(lambda d: 128))
for _dtype in ("float16", "float64"):
    defect(
        f"doubled-in-{_dtype}",
        f"Logits are doubled for {_dtype} features",
        doubled(lambda b, dtype=_dtype: library_of(b.rows).dtype(b.rows) == dtype),  # type: ignore[misc]
    )

# precision

defect(
    "features-in-bfloat16",
    "Features are rounded to bfloat16 before the products",
    features_seen(lambda arrays, x: rounded(arrays, x, "bfloat16")),
    "torch",
)
defect(
    "features-in-tf32",
    "Features are rounded to the 11 bits of tf32 before the products although tf32 was not asked for",
    # float16 has the significand of tf32, and enough range for these features
    features_seen(lambda arrays, x: rounded(arrays, x, "float16")),
)
defect(
    "subnormal-features-flushed",
    "Features below float16's normal range are 0",
    features_seen(lambda arrays, x: set_where(arrays, abs(x) < 2.0**-14, 0.0, x)),
)
defect(
    "scale-in-float16",
    "The scale is rounded to 11 bits",
    seen(lambda arrays, b: replace(b, scale=rounded(arrays, b.scale, "float16"))),
)


def _rounded_statistics(dtype: str) -> Plant:
    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        found, arrays = primitive(block, *rest), library_of(block.rows)
        rows, columns = (
            side and SideStatistics(*(rounded(arrays, x, dtype) for x in side)) for side in (found.rows, found.columns)
        )
        return replace(found, rows=rows, columns=columns)

    return calling("lse", "keeping")(call)


for _dtype, _precision in (("float16", "11 bits"), ("float32", "float32")):
    defect(
        f"statistics-in-{_dtype}",
        f"Log-sum-exps and sums of positive logits are rounded to {_precision}",
        _rounded_statistics(_dtype),
    )


@planted(calling("lse", "keeping"))
def positives_among_negatives(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
    """Positives are counted among the negatives, too."""
    found, merge = primitive(block, *rest), library_of(block.rows).merge
    rows, columns = (
        side and side._replace(negative_lse=merge(side.negative_lse, side.positive_lse))
        for side in (found.rows, found.columns)
    )
    return replace(found, rows=rows, columns=columns)


@planted(calling("gradients", "finished"))
def positives_log_sum_exp_in_float32(primitive: Callable[..., Any], block: Block, weights: Any, *rest: Any) -> Any:
    """The log-sum-exp of each row's positives is rounded to float32 before the backward."""
    lse = rounded(library_of(block.rows), weights.rows.positive_lse, "float32")
    return primitive(block, replace(weights, rows=weights.rows._replace(positive_lse=lse)), *rest)


defect(
    "float64-in-float32",
    "Float64 features are rounded to float32 before the products",
    features_seen(lambda arrays, x: rounded(arrays, x, "float32") if arrays.dtype(x) == "float64" else x),
)

# the scale, the bias, the weights

defect(
    "sign-of-scale-lost",
    "A negative scale is replaced by its absolute value",
    seen(lambda arrays, b: replace(b, scale=abs(b.scale))),
)
defect("bias-ignored", "The bias is not added", seen(lambda arrays, b: replace(b, bias=None)))


def _weights(change: Callable[[ArrayLibrary, Array], Array]) -> Plant:
    """The weights of rows and columns are changed."""

    def softmax(primitive: Callable[..., Any], block: Block, weights: Any, *rest: Any) -> Any:
        arrays = library_of(block.rows)
        rows, columns = (
            side and side._replace(weight=change(arrays, side.weight)) for side in (weights.rows, weights.columns)
        )
        return primitive(block, replace(weights, rows=rows, columns=columns), *rest)

    def sigmoid(primitive: Callable[..., Any], block: Block, row_weight: Array, *rest: Any) -> Any:
        return primitive(block, change(library_of(block.rows), row_weight), *rest)

    return lambda backend: around(around(backend, softmax, "gradients", "finished"), sigmoid, "sigmoid")


defect(
    "weights-below-1e-6",
    "Weights below 1e-6 are dropped",
    _weights(lambda arrays, w: set_where(arrays, abs(w) < 1e-6, 0.0, w)),
)
defect(
    "nan-weights-are-0",
    "A weight of NaN is 0: an upstream gradient that overflowed goes unseen",
    _weights(lambda arrays, w: set_where(arrays, w != w, 0.0, w)),
)
defect(
    "weights-clamped-to-1000",
    "Weights beyond 1000 are clamped: the upstream gradient of a gradient scaler is lost",
    _weights(lambda arrays, w: set_where(arrays, w > 1000.0, 1000.0, w)),
)
defect(
    "nan-scale-is-1",
    "A scale of NaN is replaced by 1",
    seen(lambda arrays, b: replace(b, scale=set_where(arrays, b.scale != b.scale, 1.0, b.scale))),
)
defect(
    "scale-clamped-to-1000",
    "A scale beyond 1000 is clamped",
    seen(lambda arrays, b: replace(b, scale=set_where(arrays, b.scale > 1000.0, 1000.0, b.scale))),
)
defect(
    "sign-of-weights-lost",
    "Negative weights are replaced by their absolute values",
    _weights(lambda arrays, w: abs(w)),
)
defect(
    "weights-squared",
    "Weights are applied twice: the upstream gradient is squared",
    _weights(lambda arrays, w: w * w),
)
defect(
    "weights-averaged",
    "Every row has the mean weight: the upstream gradient is ignored",
    _weights(lambda arrays, w: w * 0 + arrays.cast(arrays.total(w) / max(1, w.shape[0]), arrays.dtype(w))),
)


@planted(calling("gradients", "finished"))
def sides_of_weights_swapped(primitive: Callable[..., Any], block: Block, weights: Any, *rest: Any) -> Any:
    """Where m = n the columns' weights are applied to the rows, and the rows' to the columns."""
    rows, columns = weights.rows, weights.columns
    if columns is not None and block.rows.shape[0] == block.columns.shape[0]:
        swapped = rows._replace(weight=columns.weight), columns._replace(weight=rows.weight)
        weights = replace(weights, rows=swapped[0], columns=swapped[1])
    return primitive(block, weights, *rest)


# which pairs count


def _pairs(change: Callable[[ArrayLibrary, Array, Block], Array], *names: str) -> Plant:
    """Some vectors of the pairs are changed, where there are any."""

    def changed(arrays: ArrayLibrary, b: Block) -> Block:
        there = {name: x for name in names if (x := getattr(b.pairs, name)) is not None}
        pairs: dict[str, Any] = {name: change(arrays, x, b) for name, x in there.items()}
        return replace(b, pairs=replace(b.pairs, **pairs))

    return seen(changed)


defect(
    "positives-off-by-one",
    "The positive is the column before the given one",
    _pairs(lambda arrays, x, b: x - 1, "positives"),
)
defect(
    "positives-modulo-n",
    "The index of a positive outside of the block is taken modulo n",
    _pairs(lambda arrays, x, b: x % max(1, b.columns.shape[0]), "positives"),
)
defect(
    "exclusions-ignored",
    "Excluded pairs are admitted",
    seen(lambda arrays, b: replace(b, pairs=replace(b.pairs, excluded=None))),
)


@planted(seen)
def dropped_ids_ignored(arrays: ArrayLibrary, b: Block) -> Block:
    """Pairs of equal ids stay in the log-sum-exps with match="drop"."""
    return replace(b, pairs=replace(b.pairs, row_ids=None, column_ids=None)) if b.pairs.match == "drop" else b


defect(
    "target-taken-for-drop",
    'With match="target" equal ids are dropped',
    seen(lambda arrays, b: replace(b, pairs=replace(b.pairs, match="drop"))),
)
_IDS = "row_ids", "column_ids"
defect(
    "ids-cut-to-32-bits",
    "Only the low 32 bits of an id are compared",
    _pairs(lambda arrays, x, b: x & 0xFFFFFFFF, *_IDS),
)
defect(
    "ids-cut-to-16-bits",
    "Only the low 16 bits of an id are compared",
    _pairs(lambda arrays, x, b: x & 0xFFFF, *_IDS),
)
defect(
    "negative-ids-never-equal",
    "A negative id means no id, and equals nothing",
    _pairs(lambda arrays, x, b: arrays.where(x < 0, x - (1 << 62), x), "row_ids"),
)
for _which, _id in (("least", -(2**63)), ("largest", 2**63 - 1)):
    defect(
        f"{_which}-id-is-none",
        f"The {_which} id of 64 bits means no id, and equals nothing",
        _pairs(lambda arrays, x, b, id=_id: arrays.where(x == id, 12345678901, x), "row_ids"),  # type: ignore[misc]
    )
defect("sign-of-ids-lost", "A negative id equals the positive one", _pairs(lambda arrays, x, b: abs(x), *_IDS))
