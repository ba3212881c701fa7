"""Defects in what a primitive receives: sizes, precision, scale, bias, weights, pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Array, Backend, Block, SideStatistics
from contrastile.mutate.wrapping import doubled, features_seen, only_in, seeing, wrapper
from contrastile.verify.wrapped import around

# logits that are wrong at some sizes


def _doubled(sizes: str, about: str, where: Callable[[Block], bool]) -> None:
    """Register a defect whose logits are doubled at some sizes."""

    def plant(backend: Backend) -> Backend:
        return doubled(backend, where)

    plant.__name__, plant.__doc__ = f"doubled_{sizes}", f"Logits are doubled {about}."
    wrapper(plant)


_doubled("at_m_64", "where m is a multiple of 64", lambda b: b.rows.shape[0] % 64 == 0)
_doubled("at_m_128", "where m is a multiple of 128", lambda b: b.rows.shape[0] % 128 == 0)
_doubled("at_n_64", "where n is a multiple of 64", lambda b: b.columns.shape[0] % 64 == 0)
_doubled("at_d_512", "at d = 512", lambda b: b.rows.shape[1] == 512)
_doubled("beyond_d_1024", "where d > 1024", lambda b: b.rows.shape[1] > 1024)
_doubled("beyond_n_1000", "where n > 1000", lambda b: b.columns.shape[0] > 1000)
_doubled("beyond_n_1100", "where n > 1100", lambda b: b.columns.shape[0] > 1100)
_doubled("at_d_768", "at d = 768", lambda b: b.rows.shape[1] == 768)
_doubled("beyond_n_32767", "where n > 32767", lambda b: b.columns.shape[0] > 32767)
_doubled("beyond_2_21_pairs", "where m n > 2^21", lambda b: b.rows.shape[0] * b.columns.shape[0] > 2**21)
_doubled("at_one_row", "where m = 1", lambda b: b.rows.shape[0] == 1)


@wrapper
def last_feature_of_odd_d(backend: Backend) -> Backend:
    """The last feature is dropped where d is odd."""
    return seeing(backend, lambda arrays, b: _first_features(arrays, b, b.rows.shape[1] // 2 * 2))


@wrapper
def features_beyond_128(backend: Backend) -> Backend:
    """Features from the 129th on are dropped."""
    return seeing(backend, lambda arrays, b: _first_features(arrays, b, 128))


def _first_features(arrays: ArrayLibrary, b: Block, count: int) -> Block:
    """The block with zeros instead of the features after the first ``count``."""
    if not 0 < count < b.rows.shape[1]:
        return b
    there = arrays.arange(0, b.rows.shape[1], b.rows) < count
    rows, columns = (arrays.cast(arrays.where(there[None, :], x, 0.0), arrays.dtype(x)) for x in (b.rows, b.columns))
    return replace(b, rows=rows, columns=columns)


@wrapper
def doubled_in_float16(backend: Backend) -> Backend:
    """Logits are doubled for float16 features."""
    return doubled(backend, lambda b: backend.arrays.dtype(b.rows) == "float16")


@wrapper
def doubled_in_float64(backend: Backend) -> Backend:
    """Logits are doubled for float64 features."""
    return doubled(backend, lambda b: backend.arrays.dtype(b.rows) == "float64")


# precision


def _rounded(arrays: ArrayLibrary, x: Array, dtype: str) -> Array:
    return arrays.cast(arrays.cast(x, dtype), arrays.dtype(x))


@only_in("torch")
def features_in_bfloat16(backend: Backend) -> Backend:
    """Features are rounded to bfloat16 before the products."""
    return features_seen(backend, lambda x: _rounded(backend.arrays, x, "bfloat16"))


@wrapper
def features_in_tf32(backend: Backend) -> Backend:
    """Features are rounded to the 11 bits of tf32 before the products although tf32 was not asked for."""
    # float16 has the significand of tf32, and enough range for these features
    return features_seen(backend, lambda x: _rounded(backend.arrays, x, "float16"))


@wrapper
def subnormal_features_flushed(backend: Backend) -> Backend:
    """Features below float16's normal range are 0."""
    arrays = backend.arrays
    return features_seen(backend, lambda x: arrays.cast(arrays.where(abs(x) < 2.0**-14, 0.0, x), arrays.dtype(x)))


@wrapper
def scale_in_float16(backend: Backend) -> Backend:
    """The scale is rounded to 11 bits."""
    return seeing(backend, lambda arrays, b: replace(b, scale=_rounded(arrays, b.scale, "float16")))


@wrapper
def statistics_in_float16(backend: Backend) -> Backend:
    """Log-sum-exps and sums of positive logits are rounded to 11 bits."""
    return _changed_statistics(backend, lambda x: _rounded(backend.arrays, x, "float16"))


@wrapper
def statistics_in_float32(backend: Backend) -> Backend:
    """Log-sum-exps and sums of positive logits are rounded to float32."""
    return _changed_statistics(backend, lambda x: _rounded(backend.arrays, x, "float32"))


def _changed_statistics(backend: Backend, change: Callable[[Array], Array]) -> Backend:
    """Every vector of the statistics is changed."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        found = primitive(block, *rest)
        columns = None if found.columns is None else SideStatistics(*map(change, found.columns))
        return replace(found, rows=SideStatistics(*map(change, found.rows)), columns=columns)

    return around(backend, call, "lse", "keeping")


@wrapper
def positives_among_negatives(backend: Backend) -> Backend:
    """Positives are counted among the negatives, too."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        found = primitive(block, *rest)
        rows, columns = (
            side and side._replace(negative_lse=backend.arrays.merge(side.negative_lse, side.positive_lse))
            for side in (found.rows, found.columns)
        )
        return replace(found, rows=rows, columns=columns)

    return around(backend, call, "lse", "keeping")


@wrapper
def positives_log_sum_exp_in_float32(backend: Backend) -> Backend:
    """The log-sum-exp of each row's positives is rounded to float32 before the backward."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, *rest: Any) -> Any:
        rows = weights.rows._replace(positive_lse=_rounded(backend.arrays, weights.rows.positive_lse, "float32"))
        return primitive(block, replace(weights, rows=rows), *rest)

    return around(backend, call, "gradients", "finished")


@wrapper
def float64_in_float32(backend: Backend) -> Backend:
    """Float64 features are rounded to float32 before the products."""
    arrays = backend.arrays
    return features_seen(backend, lambda x: _rounded(arrays, x, "float32") if arrays.dtype(x) == "float64" else x)


# the scale, the bias, the weights


@wrapper
def sign_of_scale_lost(backend: Backend) -> Backend:
    """A negative scale is replaced by its absolute value."""
    return seeing(backend, lambda arrays, b: replace(b, scale=abs(b.scale)))


@wrapper
def bias_ignored(backend: Backend) -> Backend:
    """The bias is not added."""
    return seeing(backend, lambda arrays, b: replace(b, bias=None))


def _changed_weights(backend: Backend, change: Callable[[Array], Array]) -> Backend:
    """The weights of rows and columns are changed."""

    def softmax(primitive: Callable[..., Any], block: Block, weights: Any, *rest: Any) -> Any:
        rows, columns = (side and side._replace(weight=change(side.weight)) for side in (weights.rows, weights.columns))
        return primitive(block, replace(weights, rows=rows, columns=columns), *rest)

    def sigmoid(primitive: Callable[..., Any], block: Block, row_weight: Array, *rest: Any) -> Any:
        return primitive(block, change(row_weight), *rest)

    return around(around(backend, softmax, "gradients", "finished"), sigmoid, "sigmoid")


@wrapper
def weights_below_1e_6(backend: Backend) -> Backend:
    """Weights below 1e-6 are dropped."""
    arrays = backend.arrays
    return _changed_weights(backend, lambda w: arrays.cast(arrays.where(abs(w) < 1e-6, 0.0, w), arrays.dtype(w)))


@wrapper
def nan_weights_are_0(backend: Backend) -> Backend:
    """A weight of NaN is 0: an upstream gradient that overflowed goes unseen."""
    arrays = backend.arrays
    return _changed_weights(backend, lambda w: arrays.cast(arrays.where(w != w, 0.0, w), arrays.dtype(w)))


@wrapper
def weights_clamped_to_1000(backend: Backend) -> Backend:
    """Weights beyond 1000 are clamped: the upstream gradient of a gradient scaler is lost."""
    arrays = backend.arrays
    return _changed_weights(backend, lambda w: arrays.cast(arrays.where(w > 1000.0, 1000.0, w), arrays.dtype(w)))


@wrapper
def nan_scale_is_1(backend: Backend) -> Backend:
    """A scale of NaN is replaced by 1."""

    def change(arrays: ArrayLibrary, b: Block) -> Block:
        scale = arrays.cast(arrays.where(b.scale != b.scale, 1.0, b.scale), arrays.dtype(b.scale))
        return replace(b, scale=scale)

    return seeing(backend, change)


@wrapper
def scale_clamped_to_1000(backend: Backend) -> Backend:
    """A scale beyond 1000 is clamped."""

    def change(arrays: ArrayLibrary, b: Block) -> Block:
        return replace(b, scale=arrays.cast(arrays.where(b.scale > 1000.0, 1000.0, b.scale), arrays.dtype(b.scale)))

    return seeing(backend, change)


@wrapper
def sign_of_weights_lost(backend: Backend) -> Backend:
    """Negative weights are replaced by their absolute values."""
    return _changed_weights(backend, abs)


@wrapper
def weights_squared(backend: Backend) -> Backend:
    """Weights are applied twice: the upstream gradient is squared."""
    return _changed_weights(backend, lambda w: w * w)


@wrapper
def weights_averaged(backend: Backend) -> Backend:
    """Every row has the mean weight: the upstream gradient is ignored."""
    arrays = backend.arrays
    return _changed_weights(
        backend, lambda w: w * 0 + arrays.cast(arrays.total(w) / max(1, w.shape[0]), arrays.dtype(w))
    )


@wrapper
def sides_of_weights_swapped(backend: Backend) -> Backend:
    """Where m = n the columns' weights are applied to the rows, and the rows' to the columns."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, *rest: Any) -> Any:
        rows, columns = weights.rows, weights.columns
        if columns is not None and block.rows.shape[0] == block.columns.shape[0]:
            swapped = rows._replace(weight=columns.weight), columns._replace(weight=rows.weight)
            weights = replace(weights, rows=swapped[0], columns=swapped[1])
        return primitive(block, weights, *rest)

    return around(backend, call, "gradients", "finished")


# which pairs count


def _changed_pairs(backend: Backend, change: Callable[[ArrayLibrary, Block], dict[str, Any]]) -> Backend:
    """Some vectors of the pairs are replaced."""
    return seeing(backend, lambda arrays, b: replace(b, pairs=replace(b.pairs, **change(arrays, b))))


def _with(change: Callable[[Array], Array], **vectors: Array | None) -> dict[str, Any]:
    """Each vector that is not None, changed."""
    return {name: None if x is None else change(x) for name, x in vectors.items()}


def _changed_ids(backend: Backend, change: Callable[[Array], Array]) -> Backend:
    """The ids of rows and columns are changed."""
    return _changed_pairs(
        backend, lambda arrays, b: _with(change, row_ids=b.pairs.row_ids, column_ids=b.pairs.column_ids)
    )


@wrapper
def positives_off_by_one(backend: Backend) -> Backend:
    """The positive is the column before the given one."""
    return _changed_pairs(backend, lambda arrays, b: _with(lambda x: x - 1, positives=b.pairs.positives))


@wrapper
def positives_modulo_n(backend: Backend) -> Backend:
    """The index of a positive outside of the block is taken modulo n."""

    def change(arrays: ArrayLibrary, b: Block) -> dict[str, Any]:
        return _with(lambda x: x % max(1, b.columns.shape[0]), positives=b.pairs.positives)

    return _changed_pairs(backend, change)


@wrapper
def exclusions_ignored(backend: Backend) -> Backend:
    """Excluded pairs are admitted."""
    return _changed_pairs(backend, lambda arrays, b: {"excluded": None})


@wrapper
def dropped_ids_ignored(backend: Backend) -> Backend:
    """Pairs of equal ids stay in the log-sum-exps with match="drop"."""

    def change(arrays: ArrayLibrary, b: Block) -> dict[str, Any]:
        return {"row_ids": None, "column_ids": None} if b.pairs.match == "drop" else {}

    return _changed_pairs(backend, change)


@wrapper
def target_taken_for_drop(backend: Backend) -> Backend:
    """With match="target" equal ids are dropped."""
    return _changed_pairs(backend, lambda arrays, b: {"match": "drop"})


@wrapper
def ids_cut_to_32_bits(backend: Backend) -> Backend:
    """Only the low 32 bits of an id are compared."""
    return _changed_ids(backend, lambda x: x & 0xFFFFFFFF)


@wrapper
def ids_cut_to_16_bits(backend: Backend) -> Backend:
    """Only the low 16 bits of an id are compared."""
    return _changed_ids(backend, lambda x: x & 0xFFFF)


@wrapper
def negative_ids_never_equal(backend: Backend) -> Backend:
    """A negative id means no id, and equals nothing."""

    def change(arrays: ArrayLibrary, b: Block) -> dict[str, Any]:
        return _with(lambda x: arrays.where(x < 0, x - (1 << 62), x), row_ids=b.pairs.row_ids)

    return _changed_pairs(backend, change)


def _no_id(which: str, value: int) -> None:
    """Register a defect that takes one id for none."""

    def plant(backend: Backend) -> Backend:
        def change(arrays: ArrayLibrary, b: Block) -> dict[str, Any]:
            return _with(lambda x: arrays.where(x == value, 12345678901, x), row_ids=b.pairs.row_ids)

        return _changed_pairs(backend, change)

    plant.__name__, plant.__doc__ = f"{which}_id_is_none", f"The {which} id of 64 bits means no id, and equals nothing."
    wrapper(plant)


_no_id("least", -(2**63))
_no_id("largest", 2**63 - 1)


@wrapper
def sign_of_ids_lost(backend: Backend) -> Backend:
    """A negative id equals the positive one."""
    return _changed_ids(backend, abs)
