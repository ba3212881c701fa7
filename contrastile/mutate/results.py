"""Defects in what a primitive returns or does: gradients, memory, strides, NaN; and backends that evade verify."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from contrastile.backends.arrays import ArrayLibrary, library_of
from contrastile.backends.contract import Accuracy, Array, Backend, Block, Options
from contrastile.mutate.wrapping import (
    Plant,
    adding,
    calling,
    defect,
    doubled,
    features_seen,
    planted,
    seeing,
    seen,
    set_where,
    stateful,
)

Primitive = Callable[..., Any]

# gradients and their accumulators


@planted(adding)
def nothing_without_row_gradient(call: Primitive, b: Block, weights: Any, rows: Any, columns: Any, how: Any) -> None:
    """Without a rows' gradient (a frozen tower) the columns' gradient is not computed."""
    if rows is not None:
        call(b, weights, rows, columns, how)


@planted(adding)
def nothing_without_column_gradient(call: Primitive, b: Block, weights: Any, rows: Any, columns: Any, how: Any) -> None:
    """Without a columns' gradient (a frozen tower) the rows' gradient is not computed."""
    if columns is not None:
        call(b, weights, rows, columns, how)


@planted(calling("sigmoid"))
def sigmoid_0_without_gradients(call: Primitive, b: Block, weight: Any, rows: Any, columns: Any, how: Any) -> Any:
    """The sigmoid loss is 0 if no gradient is asked for, as in evaluation."""
    loss, slope = call(b, weight, rows, columns, how)
    return (loss * 0, slope) if rows is None and columns is None else (loss, slope)


@planted(calling("sigmoid"))
def sigmoid_slope_0_without_gradients(call: Primitive, b: Block, weight: Any, rows: Any, columns: Any, how: Any) -> Any:
    """The row sums of G, whose sum is the bias gradient, are 0 if neither tower needs a gradient."""
    loss, slope = call(b, weight, rows, columns, how)
    return (loss, slope * 0) if rows is None and columns is None else (loss, slope)


@planted(adding)
def gradients_overwritten(call: Primitive, b: Block, weights: Any, rows: Any, columns: Any, how: Any) -> None:
    """Gradients overwrite the accumulators instead of being added."""
    for x in (rows, columns):
        if x is not None:
            x[...] = 0
    call(b, weights, rows, columns, how)


@planted(adding)
def rows_and_columns_swapped(call: Primitive, b: Block, weights: Any, rows: Any, columns: Any, how: Any) -> None:
    """Where their shapes agree, dQ goes to the columns and dK to the rows."""
    if rows is not None and columns is not None and rows.shape == columns.shape:
        rows, columns = columns, rows
    call(b, weights, rows, columns, how)


@planted(adding)
def last_column_stale(call: Primitive, b: Block, weights: Any, rows: Any, columns: Any, how: Any) -> None:
    """The last column gets no gradient."""
    before = None if columns is None or not columns.shape[0] else columns[-1] * 1
    call(b, weights, rows, columns, how)
    if before is not None and columns is not None:
        columns[-1] = before


@planted(adding)
def update_lost(call: Primitive, b: Block, weights: Any, rows: Any, columns: Any, how: Any) -> None:
    """Half of the rows lose what the second of two halves of the columns adds: a race."""
    call(b, weights, rows, columns, how)
    n, few, arrays = b.columns.shape[0], (b.rows.shape[0] + 1) // 2, library_of(b.rows)
    if rows is None or n < 2:
        return
    late = arrays.cast(arrays.arange(0, n, b.columns) >= n // 2, arrays.dtype(b.columns))
    lost = rows * 0
    call(replace(b, columns=b.columns * late[:, None]), weights, lost, None, how)
    rows[:few] -= lost[:few]


# memory, layout, repetition


@planted(calling())
def whole_matrix_held(call: Primitive, b: Block, *rest: Any) -> Any:
    """All m x n logits are held at once."""
    # filled, or the system would promise the memory and not provide it
    held = library_of(b.rows).full((b.rows.shape[0], b.columns.shape[0]), 1.0, "float32", b.rows)
    found = call(b, *rest)
    del held
    return found


@planted(calling())
def tile_ignored(call: Primitive, b: Block, *rest: Any) -> Any:
    """One tile holds all logits, whatever tile was asked for."""
    *most, options = rest
    whole = max(1, b.rows.shape[0]), max(1, b.columns.shape[0])
    return call(b, *most, replace(options, tile=None if options.tile is None else whole))


def _shape(b: Block) -> tuple[Any, ...]:
    return tuple(b.rows.shape), tuple(b.columns.shape), library_of(b.rows).dtype(b.rows)


@planted(stateful("lse", "keeping"))
def stale_statistics() -> Primitive:
    """Statistics are cached by shape, and the next block of that shape gets them: a stale buffer."""
    known: dict[Any, Any] = {}

    def call(primitive: Primitive, block: Block, columns: bool, options: Options) -> Any:
        return known.setdefault((*_shape(block), columns), primitive(block, columns, options))

    return call


@planted(lambda make: lambda backend: seeing(backend, make()))
def never_the_same_twice() -> Callable[[ArrayLibrary, Block], Block]:
    """Sums are taken in another order each time: the last bit of the scale varies."""
    calls = 0

    def change(arrays: ArrayLibrary, b: Block) -> Block:
        nonlocal calls
        calls += 1
        return replace(b, scale=b.scale * (1 + 2.0**-23 * (calls % 3)))

    return change


@planted(calling("lse", "keeping"))
def unwritten_memory_read(call: Primitive, b: Block, *rest: Any) -> Any:
    """Statistics depend on uninitialised memory."""
    found, arrays = call(b, *rest), library_of(b.rows)
    x = found.rows.negative_lse
    unwritten = arrays.empty(tuple(x.shape), arrays.dtype(x), x)
    return replace(found, rows=found.rows._replace(negative_lse=x + unwritten * 0))


@planted(calling("gradients", "finished"))
def features_overwritten(call: Primitive, b: Block, *rest: Any) -> Any:
    """The caller's rows are overwritten after the backward."""
    found = call(b, *rest)
    b.rows[...] = 0
    return found


@planted(adding, "torch")
def written_past_the_end(call: Primitive, b: Block, weights: Any, rows: Any, columns: Any, how: Any) -> None:
    """One element past the end of the rows' gradient is written, where there is memory."""
    call(b, weights, rows, columns, how)
    if rows is None or not rows.shape[0]:
        return
    past_end = rows.storage_offset() + (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1] * rows.stride(1)
    if past_end < rows.untyped_storage().nbytes() // rows.element_size():
        rows.as_strided((1,), (1,), past_end).fill_(7.0)


@planted(features_seen, "torch")
def strides_ignored(arrays: ArrayLibrary, x: Any) -> Any:
    """Features are read as if they were contiguous."""
    return x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()) if all(x.stride()) else x


@planted(features_seen, "numpy")
def sign_of_strides_lost(arrays: ArrayLibrary, x: Any) -> Any:
    """Features of negative strides are read forwards."""
    return x[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in x.strides)]


# state that outlives a call


@planted(stateful("lse", "keeping"))
def statistics_by_address() -> Primitive:
    """Statistics are cached by the rows' address, and are those of older values there."""
    known: dict[Any, Any] = {}

    def call(primitive: Primitive, block: Block, *rest: Any) -> Any:
        key = *_shape(block), rest[0]
        held, found = known.get(key, (None, None))
        if held is not block.rows:
            found = primitive(block, *rest)
            known[key] = block.rows, found
        return found

    return call


@planted(stateful("lse", "keeping"))
def statistics_in_one_buffer() -> Primitive:
    """The statistics of every call of one shape are in the same memory."""
    known: dict[Any, Any] = {}

    def call(primitive: Primitive, block: Block, *rest: Any) -> Any:
        found = primitive(block, *rest)
        shared = known.setdefault((*_shape(block)[:2], rest[0]), found.rows.negative_lse)
        shared[...] = found.rows.negative_lse
        return replace(found, rows=found.rows._replace(negative_lse=shared))

    return call


@planted(stateful())
def every_block_held() -> Primitive:
    """A copy of every block's rows is held for ever: a leak."""
    held: list[Any] = []

    def call(primitive: Primitive, block: Block, *rest: Any) -> Any:
        held.append(block.rows * 1)
        return primitive(block, *rest)

    return call


@planted(calling())
def generators_seeded(call: Primitive, *rest: Any) -> Any:
    """Every call seeds the random generators of the process."""
    random.seed(0)
    return call(*rest)


@planted(calling(), "torch")
def float32_products_in_tf32(call: Primitive, *rest: Any) -> Any:
    """Every call allows tf32 in all of the process, plain computations included."""
    import torch

    torch.set_float32_matmul_precision("high")
    return call(*rest)


defect(
    "doubled-off-the-main-thread",
    "Logits are doubled in every thread but the main one",
    doubled(lambda b: threading.current_thread() is not threading.main_thread()),
)


@planted(stateful())
def scale_shared_by_threads() -> Primitive:
    """The scale is in memory that all threads share: two calls at once use one of them."""
    shared: list[Any] = [None]

    def call(primitive: Primitive, block: Block, *rest: Any) -> Any:
        shared[0] = block.scale
        time.sleep(1e-3)
        return primitive(replace(block, scale=shared[0]), *rest)

    return call


# NaN and infinity

defect(
    "nan-taken-for-0",
    "A NaN in a feature is replaced by 0",
    features_seen(lambda arrays, x: set_where(arrays, x != x, 0.0, x)),
)


@planted(features_seen)
def nan_in_the_first_feature(arrays: ArrayLibrary, x: Array) -> Array:
    """A NaN in the first feature is replaced by 0."""
    first = arrays.arange(0, x.shape[1], x)[None, :] == 0
    return set_where(arrays, first & (x != x), 0.0, x)


def _finite(arrays: ArrayLibrary, x: Array) -> Array:
    return set_where(arrays, abs(x) == math.inf, 0.0, x)


defect(
    "infinity-of-columns-clamped",
    "An infinite feature of a column is replaced by 0",
    seen(lambda arrays, b: replace(b, columns=_finite(arrays, b.columns))),
)
defect("infinity-clamped", "An infinite feature is replaced by 0", features_seen(_finite))

# backends that evade verify


@planted(lambda plant: plant)
def facts_that_bound_nothing(backend: Backend) -> Backend:
    """Logits are 0, and the facts allow a rounding error as large as the number."""
    found = seeing(backend, lambda arrays, b: replace(b, scale=b.scale * 0))
    return replace(found, accuracy=lambda *what: Accuracy(unit=1.0, accumulate_unit=1.0))


@planted(lambda plant: plant)
def all_but_32_rows_refused(backend: Backend) -> Backend:
    """Every block is refused unless it has 32 rows."""
    return replace(backend, supports=lambda b: None if b.rows.shape[0] == 32 else "rows must be 32")


def _at_33_rows(act: Callable[[], Any]) -> Plant:
    """Something else is done, too, at the first case that has 33 rows."""

    def call(primitive: Primitive, block: Block, *rest: Any) -> Any:
        if block.rows.shape[0] == 33:
            act()
        return primitive(block, *rest)

    return calling("lse", "keeping")(call)


defect("exits-with-0", "The backend calls ``sys.exit(0)``", _at_33_rows(lambda: sys.exit(0)))
defect("leaves-with-0", "The backend calls ``os._exit(0)``", _at_33_rows(lambda: os._exit(0)))
defect("dies-by-a-signal", "The process dies by SIGSEGV", _at_33_rows(lambda: os.kill(os.getpid(), signal.SIGSEGV)))
defect("hangs", "A call never returns", _at_33_rows(lambda: time.sleep(1e8)))
defect("prints", "The backend prints to standard output", _at_33_rows(lambda: print("debug: 33 rows")))
