"""Defects at the level of the block contract: each wraps a right backend, so that they serve every backend.

A wrapped backend is named ``contrastile.mutate.wrappers:DEFECT@BACKEND``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from contrastile.backends import registry
from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Accuracy, Array, Backend, Block, Options

PRIMITIVES = ("lse", "keeping", "gradients", "finished", "sigmoid")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A defect.

    Attributes:
        name: what ``contrastile mutate`` calls it.
        plant: a right backend -> the defective one.
        needs: the array library in which alone it can be planted; None for any.
    """

    name: str
    plant: Callable[[Backend], Backend]
    needs: str | None = None

    @property
    def about(self) -> str:
        """The defect in one line."""
        return (self.plant.__doc__ or "").strip().removesuffix(".")


WRAPPERS: dict[str, Wrapper] = {}


def __getattr__(name: str) -> Backend:
    """The backend that ``DEFECT@BACKEND`` names."""
    defect, at, backend = name.partition("@")
    if not at or defect not in WRAPPERS:
        raise AttributeError(name)
    return WRAPPERS[defect].plant(registry.load(backend))


def _wrapper(plant: Callable[[Backend], Backend]) -> Callable[[Backend], Backend]:
    """Register a defect under its function's name."""
    name = plant.__name__.replace("_", "-")
    WRAPPERS[name] = Wrapper(name, plant)
    return plant


def _only_in(library: str) -> Callable[[Callable[[Backend], Backend]], Callable[[Backend], Backend]]:
    """The same for a defect that only one array library can express."""

    def register(plant: Callable[[Backend], Backend]) -> Callable[[Backend], Backend]:
        name = plant.__name__.replace("_", "-")
        WRAPPERS[name] = Wrapper(name, plant, library)
        return plant

    return register


def _around(backend: Backend, call: Callable[..., Any], *names: str) -> Backend:
    """Each of these primitives, or all, replaced by ``call(primitive, block, *rest)``."""

    def wrapped(primitive: Callable[..., Any]) -> Callable[..., Any]:
        return lambda block, *rest: call(primitive, block, *rest)

    found = {name: getattr(backend, name) for name in names or PRIMITIVES}
    changed: dict[str, Any] = {name: wrapped(x) for name, x in found.items() if x is not None}
    return replace(backend, **changed)


def _seeing(backend: Backend, change: Callable[[ArrayLibrary, Block], Block]) -> Backend:
    """Every primitive sees another block than it was given."""
    return _around(backend, lambda primitive, block, *rest: primitive(change(backend.arrays, block), *rest))


def _doubled(backend: Backend, where: Callable[[Block], bool]) -> Backend:
    """Logits twice as large on some blocks."""
    return _seeing(backend, lambda arrays, b: replace(b, scale=b.scale * 2) if where(b) else b)


def _adding(backend: Backend, call: Callable[..., None]) -> Backend:
    """``gradients`` replaced by ``call(primitive, block, weights, row_gradient, column_gradient, options)``."""
    plain = replace(backend, finished=None, keeping=None)
    return _around(plain, call, "gradients")


# logits that are wrong at some sizes


@_wrapper
def doubled_at_m_64(backend: Backend) -> Backend:
    """Logits are doubled where m is a multiple of 64."""
    return _doubled(backend, lambda b: b.rows.shape[0] % 64 == 0)


@_wrapper
def doubled_at_m_128(backend: Backend) -> Backend:
    """Logits are doubled where m is a multiple of 128."""
    return _doubled(backend, lambda b: b.rows.shape[0] % 128 == 0)


@_wrapper
def doubled_at_n_64(backend: Backend) -> Backend:
    """Logits are doubled where n is a multiple of 64."""
    return _doubled(backend, lambda b: b.columns.shape[0] % 64 == 0)


@_wrapper
def doubled_at_d_512(backend: Backend) -> Backend:
    """Logits are doubled at d = 512."""
    return _doubled(backend, lambda b: b.rows.shape[1] == 512)


@_wrapper
def doubled_beyond_d_1024(backend: Backend) -> Backend:
    """Logits are doubled where d > 1024."""
    return _doubled(backend, lambda b: b.rows.shape[1] > 1024)


@_wrapper
def doubled_beyond_n_1000(backend: Backend) -> Backend:
    """Logits are doubled where n > 1000."""
    return _doubled(backend, lambda b: b.columns.shape[0] > 1000)


@_wrapper
def doubled_beyond_n_1100(backend: Backend) -> Backend:
    """Logits are doubled where n > 1100."""
    return _doubled(backend, lambda b: b.columns.shape[0] > 1100)


@_wrapper
def doubled_at_one_row(backend: Backend) -> Backend:
    """Logits are doubled where m = 1."""
    return _doubled(backend, lambda b: b.rows.shape[0] == 1)


@_wrapper
def last_feature_of_odd_d(backend: Backend) -> Backend:
    """The last feature is dropped where d is odd."""
    return _seeing(backend, lambda arrays, b: _first_features(arrays, b, b.rows.shape[1] // 2 * 2))


@_wrapper
def features_beyond_128(backend: Backend) -> Backend:
    """Features from the 129th on are dropped."""
    return _seeing(backend, lambda arrays, b: _first_features(arrays, b, 128))


def _first_features(arrays: ArrayLibrary, b: Block, count: int) -> Block:
    """The block with zeros in the place of the features behind the first ``count``."""
    if not 0 < count < b.rows.shape[1]:
        return b
    there = arrays.arange(0, b.rows.shape[1], b.rows) < count
    rows, columns = (arrays.cast(arrays.where(there[None, :], x, 0.0), arrays.dtype(x)) for x in (b.rows, b.columns))
    return replace(b, rows=rows, columns=columns)


@_wrapper
def doubled_in_float16(backend: Backend) -> Backend:
    """Logits are doubled for float16 features."""
    return _doubled(backend, lambda b: backend.arrays.dtype(b.rows) == "float16")


@_wrapper
def doubled_in_float64(backend: Backend) -> Backend:
    """Logits are doubled for float64 features."""
    return _doubled(backend, lambda b: backend.arrays.dtype(b.rows) == "float64")


# precision


def _rounded(arrays: ArrayLibrary, x: Array, dtype: str) -> Array:
    return arrays.cast(arrays.cast(x, dtype), arrays.dtype(x))


@_only_in("torch")
def features_in_bfloat16(backend: Backend) -> Backend:
    """Features are rounded to bfloat16 before the products."""
    return _seeing(
        backend,
        lambda arrays, b: replace(
            b, rows=_rounded(arrays, b.rows, "bfloat16"), columns=_rounded(arrays, b.columns, "bfloat16")
        ),
    )


@_wrapper
def features_in_tf32(backend: Backend) -> Backend:
    """Features are rounded to the 11 bits of tf32 before the products, and nobody asked for tf32."""

    def change(arrays: ArrayLibrary, b: Block) -> Block:
        # half of the range of float16 is enough here, and its significand is tf32's
        return replace(b, rows=_rounded(arrays, b.rows, "float16"), columns=_rounded(arrays, b.columns, "float16"))

    return _seeing(backend, change)


@_wrapper
def scale_in_float16(backend: Backend) -> Backend:
    """The scale is rounded to 11 bits."""
    return _seeing(backend, lambda arrays, b: replace(b, scale=_rounded(arrays, b.scale, "float16")))


@_wrapper
def statistics_in_float16(backend: Backend) -> Backend:
    """Log-sum-exps and sums of positive logits are rounded to 11 bits."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        found, arrays = primitive(block, *rest), backend.arrays
        given = {each.name: getattr(found, each.name) for each in fields(found)}
        vectors = {name: x for name, x in given.items() if name != "kept" and x is not None}
        return replace(found, **{name: _rounded(arrays, x, "float16") for name, x in vectors.items()})

    return _around(backend, call, "lse", "keeping")


@_wrapper
def float64_in_float32(backend: Backend) -> Backend:
    """Float64 features are rounded to float32 before the products."""

    def change(arrays: ArrayLibrary, b: Block) -> Block:
        if arrays.dtype(b.rows) != "float64":
            return b
        return replace(b, rows=_rounded(arrays, b.rows, "float32"), columns=_rounded(arrays, b.columns, "float32"))

    return _seeing(backend, change)


# the scale, the bias, the weights


@_wrapper
def sign_of_scale_lost(backend: Backend) -> Backend:
    """A negative scale is taken for its absolute value."""
    return _seeing(backend, lambda arrays, b: replace(b, scale=abs(b.scale)))


@_wrapper
def bias_ignored(backend: Backend) -> Backend:
    """The bias is not added."""
    return _seeing(backend, lambda arrays, b: replace(b, bias=None))


def _weighing(backend: Backend, change: Callable[[Array], Array]) -> Backend:
    """Weights of rows and columns changed on their way in."""

    def softmax(primitive: Callable[..., Any], block: Block, weights: Any, *rest: Any) -> Any:
        column = weights.column_weight
        column = None if column is None else change(column)
        return primitive(block, replace(weights, row_weight=change(weights.row_weight), column_weight=column), *rest)

    def sigmoid(primitive: Callable[..., Any], block: Block, row_weight: Array, *rest: Any) -> Any:
        return primitive(block, change(row_weight), *rest)

    return _around(_around(backend, softmax, "gradients", "finished"), sigmoid, "sigmoid")


@_wrapper
def weights_below_1e_6(backend: Backend) -> Backend:
    """Weights below 1e-6 are dropped."""
    arrays = backend.arrays
    return _weighing(backend, lambda w: arrays.cast(arrays.where(abs(w) < 1e-6, 0.0, w), arrays.dtype(w)))


@_wrapper
def sign_of_weights_lost(backend: Backend) -> Backend:
    """Negative weights are taken for their absolute values."""
    return _weighing(backend, abs)


@_wrapper
def weights_squared(backend: Backend) -> Backend:
    """Weights are applied twice: the gradient from above is squared."""
    return _weighing(backend, lambda w: w * w)


@_wrapper
def weights_averaged(backend: Backend) -> Backend:
    """Every row has the mean weight: the gradient from above is ignored."""
    arrays = backend.arrays
    return _weighing(backend, lambda w: w * 0 + arrays.cast(arrays.total(w) / max(1, w.shape[0]), arrays.dtype(w)))


@_wrapper
def sides_of_weights_swapped(backend: Backend) -> Backend:
    """Where m = n the columns' weights are applied to the rows, and the rows' to the columns."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, *rest: Any) -> Any:
        if weights.column_weight is not None and block.rows.shape[0] == block.columns.shape[0]:
            row, column = weights.row_weight, weights.column_weight
            weights = replace(weights, row_weight=column, column_weight=row)
        return primitive(block, weights, *rest)

    return _around(backend, call, "gradients", "finished")


# which pairs count


def _pairing(backend: Backend, change: Callable[[ArrayLibrary, Block], dict[str, Any]]) -> Backend:
    """Some vectors of the pairs replaced."""
    return _seeing(backend, lambda arrays, b: replace(b, pairs=replace(b.pairs, **change(arrays, b))))


def _with(change: Callable[[Array], Array], **vectors: Array | None) -> dict[str, Any]:
    """Each vector that is there, changed."""
    return {name: None if x is None else change(x) for name, x in vectors.items()}


@_wrapper
def positives_off_by_one(backend: Backend) -> Backend:
    """The positive is taken to be the column before."""
    return _pairing(backend, lambda arrays, b: _with(lambda x: x - 1, positives=b.pairs.positives))


@_wrapper
def positives_modulo_n(backend: Backend) -> Backend:
    """A positive outside of the block is taken modulo n, for a column inside."""

    def change(arrays: ArrayLibrary, b: Block) -> dict[str, Any]:
        return _with(lambda x: x % max(1, b.columns.shape[0]), positives=b.pairs.positives)

    return _pairing(backend, change)


@_wrapper
def exclusions_ignored(backend: Backend) -> Backend:
    """Excluded pairs are admitted."""
    return _pairing(backend, lambda arrays, b: {"excluded": None})


@_wrapper
def dropped_ids_ignored(backend: Backend) -> Backend:
    """Pairs of equal ids stay in the log-sum-exps with match="drop"."""

    def change(arrays: ArrayLibrary, b: Block) -> dict[str, Any]:
        return {"row_ids": None, "column_ids": None} if b.pairs.match == "drop" else {}

    return _pairing(backend, change)


@_wrapper
def target_taken_for_drop(backend: Backend) -> Backend:
    """With match="target" equal ids are dropped."""
    return _pairing(backend, lambda arrays, b: {"match": "drop"})


@_wrapper
def ids_cut_to_32_bits(backend: Backend) -> Backend:
    """Only the low 32 bits of an id are compared."""

    def change(arrays: ArrayLibrary, b: Block) -> dict[str, Any]:
        return _with(lambda x: x & 0xFFFFFFFF, row_ids=b.pairs.row_ids, column_ids=b.pairs.column_ids)

    return _pairing(backend, change)


@_wrapper
def ids_cut_to_16_bits(backend: Backend) -> Backend:
    """Only the low 16 bits of an id are compared."""

    def change(arrays: ArrayLibrary, b: Block) -> dict[str, Any]:
        return _with(lambda x: x & 0xFFFF, row_ids=b.pairs.row_ids, column_ids=b.pairs.column_ids)

    return _pairing(backend, change)


@_wrapper
def negative_ids_never_equal(backend: Backend) -> Backend:
    """A negative id is taken for none, and equals nothing."""

    def change(arrays: ArrayLibrary, b: Block) -> dict[str, Any]:
        return _with(lambda x: arrays.where(x < 0, x - (1 << 62), x), row_ids=b.pairs.row_ids)

    return _pairing(backend, change)


@_wrapper
def sign_of_ids_lost(backend: Backend) -> Backend:
    """A negative id equals the positive one."""

    def change(arrays: ArrayLibrary, b: Block) -> dict[str, Any]:
        return _with(abs, row_ids=b.pairs.row_ids, column_ids=b.pairs.column_ids)

    return _pairing(backend, change)


# gradients and their accumulators


@_wrapper
def nothing_without_row_gradient(backend: Backend) -> Backend:
    """Nothing is added to the columns' gradient where the rows' is not wanted: a frozen tower."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        if rows is not None:
            primitive(block, weights, rows, columns, options)

    return _adding(backend, call)


@_wrapper
def nothing_without_column_gradient(backend: Backend) -> Backend:
    """Nothing is added to the rows' gradient where the columns' is not wanted: a frozen tower."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        if columns is not None:
            primitive(block, weights, rows, columns, options)

    return _adding(backend, call)


@_wrapper
def sigmoid_0_without_gradients(backend: Backend) -> Backend:
    """The sigmoid loss is 0 where no gradient is wanted: evaluation."""

    def call(primitive: Callable[..., Any], block: Block, weight: Any, rows: Any, columns: Any, options: Any) -> Any:
        loss, slope = primitive(block, weight, rows, columns, options)
        return (loss * 0, slope) if rows is None and columns is None else (loss, slope)

    return _around(backend, call, "sigmoid")


@_wrapper
def sigmoid_slope_0_without_gradients(backend: Backend) -> Backend:
    """The row sums of G, of which the bias has its gradient, are 0 where neither tower wants one."""

    def call(primitive: Callable[..., Any], block: Block, weight: Any, rows: Any, columns: Any, options: Any) -> Any:
        loss, slope = primitive(block, weight, rows, columns, options)
        return (loss, slope * 0) if rows is None and columns is None else (loss, slope)

    return _around(backend, call, "sigmoid")


@_wrapper
def gradients_overwritten(backend: Backend) -> Backend:
    """Gradients replace what was there, where they are to be added."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        for x in (rows, columns):
            if x is not None:
                x[...] = 0
        primitive(block, weights, rows, columns, options)

    return _adding(backend, call)


@_wrapper
def rows_and_columns_swapped(backend: Backend) -> Backend:
    """Where their shapes agree, dQ goes to the columns and dK to the rows."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        if rows is not None and columns is not None and rows.shape == columns.shape:
            rows, columns = columns, rows
        primitive(block, weights, rows, columns, options)

    return _adding(backend, call)


@_wrapper
def last_column_stale(backend: Backend) -> Backend:
    """The last column gets no gradient."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        before = None if columns is None or not columns.shape[0] else columns[-1] * 1
        primitive(block, weights, rows, columns, options)
        if before is not None:
            columns[-1] = before

    return _adding(backend, call)


@_wrapper
def update_lost(backend: Backend) -> Backend:
    """Half of the rows lose what the second of two halves of the columns adds: a race."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        primitive(block, weights, rows, columns, options)
        n, few = block.columns.shape[0], (block.rows.shape[0] + 1) // 2
        if rows is None or n < 2:
            return
        late = arrays.cast(arrays.arange(0, n, block.columns) >= n // 2, arrays.dtype(block.columns))
        lost, part = rows * 0, replace(block, columns=block.columns * late[:, None])
        primitive(part, weights, lost, None, options)
        rows[:few] -= lost[:few]

    arrays = backend.arrays
    return _adding(backend, call)


# memory, layout, repetition


@_wrapper
def whole_matrix_held(backend: Backend) -> Backend:
    """All m x n logits are held at once."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        # written, or the memory would be promised and never held
        held = backend.arrays.full((block.rows.shape[0], block.columns.shape[0]), 1.0, "float32", block.rows)
        found = primitive(block, *rest)
        del held
        return found

    return _around(backend, call)


@_wrapper
def tile_ignored(backend: Backend) -> Backend:
    """One tile holds all logits, whatever tile was asked for."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        *most, options = rest
        whole = block.rows.shape[0], block.columns.shape[0]
        return primitive(block, *most, replace(options, tile=None if options.tile is None else whole))

    return _around(backend, call)


@_wrapper
def stale_statistics(backend: Backend) -> Backend:
    """Statistics are kept by shape, and the next block of that shape gets them: a stale buffer."""
    known: dict[Any, Any] = {}

    def call(primitive: Callable[..., Any], block: Block, columns: bool, options: Options) -> Any:
        key = tuple(block.rows.shape), tuple(block.columns.shape), backend.arrays.dtype(block.rows), columns
        return known.setdefault(key, primitive(block, columns, options))

    return _around(backend, call, "lse", "keeping")


@_wrapper
def never_the_same_twice(backend: Backend) -> Backend:
    """Sums are taken in another order each time: the last bit of the scale comes and goes."""
    calls = 0

    def change(arrays: ArrayLibrary, b: Block) -> Block:
        nonlocal calls
        calls += 1
        return replace(b, scale=b.scale * (1 + 2.0**-23 * (calls % 3)))

    return _seeing(backend, change)


@_wrapper
def unwritten_memory_read(backend: Backend) -> Backend:
    """Statistics depend on memory that nobody has written."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        found = primitive(block, *rest)
        unwritten = backend.arrays.empty(tuple(found.row_lse.shape), backend.arrays.dtype(found.row_lse), found.row_lse)
        return replace(found, row_lse=found.row_lse + unwritten * 0)

    return _around(backend, call, "lse", "keeping")


@_wrapper
def features_overwritten(backend: Backend) -> Backend:
    """The caller's rows are overwritten after the backward."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        found = primitive(block, *rest)
        block.rows[...] = 0
        return found

    return _around(backend, call, "gradients", "finished")


@_only_in("torch")
def written_past_the_end(backend: Backend) -> Backend:
    """One element behind the rows' gradient is written, where there is memory."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        primitive(block, weights, rows, columns, options)
        if rows is None or not rows.shape[0]:
            return
        behind = rows.storage_offset() + (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1] * rows.stride(1)
        if behind < rows.untyped_storage().nbytes() // rows.element_size():
            rows.as_strided((1,), (1,), behind).fill_(7.0)

    return _adding(backend, call)


@_only_in("torch")
def strides_ignored(backend: Backend) -> Backend:
    """Features are read as if their elements lay one behind the other."""

    def dense(x: Any) -> Any:
        return x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()) if all(x.stride()) else x

    return _seeing(backend, lambda arrays, b: replace(b, rows=dense(b.rows), columns=dense(b.columns)))


@_only_in("numpy")
def sign_of_strides_lost(backend: Backend) -> Backend:
    """Features of negative strides are read forwards."""

    def forwards(x: Any) -> Any:
        return x[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in x.strides)]

    return _seeing(backend, lambda arrays, b: replace(b, rows=forwards(b.rows), columns=forwards(b.columns)))


# what is not a number


@_wrapper
def nan_taken_for_0(backend: Backend) -> Backend:
    """A NaN in a feature is taken for 0."""

    def number(arrays: ArrayLibrary, x: Array) -> Array:
        return arrays.cast(arrays.where(x != x, 0.0, x), arrays.dtype(x))

    return _seeing(
        backend, lambda arrays, b: replace(b, rows=number(arrays, b.rows), columns=number(arrays, b.columns))
    )


@_wrapper
def infinity_clamped(backend: Backend) -> Backend:
    """An infinite feature is taken for a large number."""

    def finite(arrays: ArrayLibrary, x: Array) -> Array:
        return arrays.cast(arrays.where(abs(x) == float("inf"), 0.0, x), arrays.dtype(x))

    return _seeing(
        backend, lambda arrays, b: replace(b, rows=finite(arrays, b.rows), columns=finite(arrays, b.columns))
    )


# backends that make verify say nothing


@_wrapper
def facts_that_bound_nothing(backend: Backend) -> Backend:
    """Logits are 0, and the facts say that a rounding may be as large as the number."""
    found = _seeing(backend, lambda arrays, b: replace(b, scale=b.scale * 0))
    return replace(found, accuracy=lambda *what: Accuracy(unit=1.0, accumulate_unit=1.0))


@_wrapper
def all_but_32_rows_refused(backend: Backend) -> Backend:
    """Every block is refused unless it has 32 rows."""
    return replace(backend, supports=lambda b: None if b.rows.shape[0] == 32 else "rows must be 32")


def _at_33_rows(backend: Backend, act: Callable[[], Any]) -> Backend:
    """Something is done beside the work, at the first case that has 33 rows."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        if block.rows.shape[0] == 33:
            act()
        return primitive(block, *rest)

    return _around(backend, call, "lse", "keeping")


@_wrapper
def exits_with_0(backend: Backend) -> Backend:
    """The backend calls ``sys.exit(0)``."""
    return _at_33_rows(backend, lambda: sys.exit(0))


@_wrapper
def leaves_with_0(backend: Backend) -> Backend:
    """The backend calls ``os._exit(0)``."""
    return _at_33_rows(backend, lambda: os._exit(0))


@_wrapper
def dies_by_a_signal(backend: Backend) -> Backend:
    """The process dies by SIGSEGV."""
    return _at_33_rows(backend, lambda: os.kill(os.getpid(), signal.SIGSEGV))


@_wrapper
def hangs(backend: Backend) -> Backend:
    """A call never comes back."""

    def forever() -> None:
        while True:
            time.sleep(60.0)

    return _at_33_rows(backend, forever)


@_wrapper
def prints(backend: Backend) -> Backend:
    """The backend prints to standard output."""
    return _at_33_rows(backend, lambda: print("debug: 33 rows"))
