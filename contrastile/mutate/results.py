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

from contrastile.backends.arrays import ArrayLibrary
from contrastile.backends.contract import Accuracy, Backend, Block, Options
from contrastile.mutate.wrapping import adding, doubled, features_seen, only_in, seeing, wrapper
from contrastile.verify.wrapped import around

# gradients and their accumulators


@wrapper
def nothing_without_row_gradient(backend: Backend) -> Backend:
    """Without a rows' gradient (a frozen tower) the columns' gradient is not computed."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        if rows is not None:
            primitive(block, weights, rows, columns, options)

    return adding(backend, call)


@wrapper
def nothing_without_column_gradient(backend: Backend) -> Backend:
    """Without a columns' gradient (a frozen tower) the rows' gradient is not computed."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        if columns is not None:
            primitive(block, weights, rows, columns, options)

    return adding(backend, call)


@wrapper
def sigmoid_0_without_gradients(backend: Backend) -> Backend:
    """The sigmoid loss is 0 if no gradient is asked for, as in evaluation."""

    def call(primitive: Callable[..., Any], block: Block, weight: Any, rows: Any, columns: Any, options: Any) -> Any:
        loss, slope = primitive(block, weight, rows, columns, options)
        return (loss * 0, slope) if rows is None and columns is None else (loss, slope)

    return around(backend, call, "sigmoid")


@wrapper
def sigmoid_slope_0_without_gradients(backend: Backend) -> Backend:
    """The row sums of G, whose sum is the bias gradient, are 0 if neither tower needs a gradient."""

    def call(primitive: Callable[..., Any], block: Block, weight: Any, rows: Any, columns: Any, options: Any) -> Any:
        loss, slope = primitive(block, weight, rows, columns, options)
        return (loss, slope * 0) if rows is None and columns is None else (loss, slope)

    return around(backend, call, "sigmoid")


@wrapper
def gradients_overwritten(backend: Backend) -> Backend:
    """Gradients overwrite the accumulators instead of being added."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        for x in (rows, columns):
            if x is not None:
                x[...] = 0
        primitive(block, weights, rows, columns, options)

    return adding(backend, call)


@wrapper
def rows_and_columns_swapped(backend: Backend) -> Backend:
    """Where their shapes agree, dQ goes to the columns and dK to the rows."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        if rows is not None and columns is not None and rows.shape == columns.shape:
            rows, columns = columns, rows
        primitive(block, weights, rows, columns, options)

    return adding(backend, call)


@wrapper
def last_column_stale(backend: Backend) -> Backend:
    """The last column gets no gradient."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        before = None if columns is None or not columns.shape[0] else columns[-1] * 1
        primitive(block, weights, rows, columns, options)
        if columns is not None and before is not None:
            columns[-1] = before

    return adding(backend, call)


@wrapper
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
    return adding(backend, call)


# memory, layout, repetition


@wrapper
def whole_matrix_held(backend: Backend) -> Backend:
    """All m x n logits are held at once."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        # filled, or the system would promise the memory and not provide it
        held = backend.arrays.full((block.rows.shape[0], block.columns.shape[0]), 1.0, "float32", block.rows)
        found = primitive(block, *rest)
        del held
        return found

    return around(backend, call)


@wrapper
def tile_ignored(backend: Backend) -> Backend:
    """One tile holds all logits, whatever tile was asked for."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        *most, options = rest
        whole = max(1, block.rows.shape[0]), max(1, block.columns.shape[0])
        return primitive(block, *most, replace(options, tile=None if options.tile is None else whole))

    return around(backend, call)


@wrapper
def stale_statistics(backend: Backend) -> Backend:
    """Statistics are cached by shape, and the next block of that shape gets them: a stale buffer."""
    known: dict[Any, Any] = {}

    def call(primitive: Callable[..., Any], block: Block, columns: bool, options: Options) -> Any:
        key = tuple(block.rows.shape), tuple(block.columns.shape), backend.arrays.dtype(block.rows), columns
        return known.setdefault(key, primitive(block, columns, options))

    return around(backend, call, "lse", "keeping")


@wrapper
def never_the_same_twice(backend: Backend) -> Backend:
    """Sums are taken in another order each time: the last bit of the scale varies."""
    calls = 0

    def change(arrays: ArrayLibrary, b: Block) -> Block:
        nonlocal calls
        calls += 1
        return replace(b, scale=b.scale * (1 + 2.0**-23 * (calls % 3)))

    return seeing(backend, change)


@wrapper
def unwritten_memory_read(backend: Backend) -> Backend:
    """Statistics depend on uninitialised memory."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        found = primitive(block, *rest)
        x = found.rows.negative_lse
        unwritten = backend.arrays.empty(tuple(x.shape), backend.arrays.dtype(x), x)
        return replace(found, rows=found.rows._replace(negative_lse=x + unwritten * 0))

    return around(backend, call, "lse", "keeping")


@wrapper
def features_overwritten(backend: Backend) -> Backend:
    """The caller's rows are overwritten after the backward."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        found = primitive(block, *rest)
        block.rows[...] = 0
        return found

    return around(backend, call, "gradients", "finished")


@only_in("torch")
def written_past_the_end(backend: Backend) -> Backend:
    """One element past the end of the rows' gradient is written, where there is memory."""

    def call(primitive: Callable[..., Any], block: Block, weights: Any, rows: Any, columns: Any, options: Any) -> None:
        primitive(block, weights, rows, columns, options)
        if rows is None or not rows.shape[0]:
            return
        past_end = rows.storage_offset() + (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1] * rows.stride(1)
        if past_end < rows.untyped_storage().nbytes() // rows.element_size():
            rows.as_strided((1,), (1,), past_end).fill_(7.0)

    return adding(backend, call)


@only_in("torch")
def strides_ignored(backend: Backend) -> Backend:
    """Features are read as if they were contiguous."""

    def dense(x: Any) -> Any:
        return x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset()) if all(x.stride()) else x

    return features_seen(backend, dense)


@only_in("numpy")
def sign_of_strides_lost(backend: Backend) -> Backend:
    """Features of negative strides are read forwards."""

    def forwards(x: Any) -> Any:
        return x[tuple(slice(None, None, -1 if stride < 0 else 1) for stride in x.strides)]

    return features_seen(backend, forwards)


# state that outlives a call


@wrapper
def statistics_by_address(backend: Backend) -> Backend:
    """Statistics are cached by the rows' address, and are those of older values there."""
    known: dict[Any, Any] = {}

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        key = tuple(block.rows.shape), tuple(block.columns.shape), backend.arrays.dtype(block.rows), rest[0]
        held, found = known.get(key, (None, None))
        if held is not block.rows:
            found = primitive(block, *rest)
            known[key] = block.rows, found
        return found

    return around(backend, call, "lse", "keeping")


@wrapper
def statistics_in_one_buffer(backend: Backend) -> Backend:
    """The statistics of every call of one shape are in the same memory."""
    known: dict[Any, Any] = {}

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        found = primitive(block, *rest)
        key = tuple(block.rows.shape), tuple(block.columns.shape), rest[0]
        shared = known.setdefault(key, found.rows.negative_lse)
        shared[...] = found.rows.negative_lse
        return replace(found, rows=found.rows._replace(negative_lse=shared))

    return around(backend, call, "lse", "keeping")


@wrapper
def every_block_held(backend: Backend) -> Backend:
    """A copy of every block's rows is held for ever: a leak."""
    held: list[Any] = []

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        held.append(block.rows * 1)
        return primitive(block, *rest)

    return around(backend, call)


@wrapper
def generators_seeded(backend: Backend) -> Backend:
    """Every call seeds the random generators of the process."""

    def call(primitive: Callable[..., Any], *rest: Any) -> Any:
        random.seed(0)
        return primitive(*rest)

    return around(backend, call)


@only_in("torch")
def float32_products_in_tf32(backend: Backend) -> Backend:
    """Every call allows tf32 in all of the process, plain computations included."""

    def call(primitive: Callable[..., Any], *rest: Any) -> Any:
        import torch

        torch.set_float32_matmul_precision("high")
        return primitive(*rest)

    return around(backend, call)


@wrapper
def doubled_off_the_main_thread(backend: Backend) -> Backend:
    """Logits are doubled in every thread but the main one."""
    return doubled(backend, lambda b: threading.current_thread() is not threading.main_thread())


@wrapper
def scale_shared_by_threads(backend: Backend) -> Backend:
    """The scale is in memory that all threads share: two calls at once use one of them."""
    shared: list[Any] = [None]

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        shared[0] = block.scale
        time.sleep(1e-3)
        return primitive(replace(block, scale=shared[0]), *rest)

    return around(backend, call)


# NaN and infinity


@wrapper
def nan_taken_for_0(backend: Backend) -> Backend:
    """A NaN in a feature is replaced by 0."""
    arrays = backend.arrays
    return features_seen(backend, lambda x: arrays.cast(arrays.where(x != x, 0.0, x), arrays.dtype(x)))


@wrapper
def nan_in_the_first_feature(backend: Backend) -> Backend:
    """A NaN in the first feature is replaced by 0."""
    arrays = backend.arrays

    def change(x: Any) -> Any:
        first = arrays.arange(0, x.shape[1], x)[None, :] == 0
        return arrays.cast(arrays.where(first & (x != x), 0.0, x), arrays.dtype(x))

    return features_seen(backend, change)


@wrapper
def infinity_of_columns_clamped(backend: Backend) -> Backend:
    """An infinite feature of a column is replaced by 0."""

    def change(arrays: ArrayLibrary, b: Block) -> Block:
        columns = arrays.cast(arrays.where(abs(b.columns) == math.inf, 0.0, b.columns), arrays.dtype(b.columns))
        return replace(b, columns=columns)

    return seeing(backend, change)


@wrapper
def infinity_clamped(backend: Backend) -> Backend:
    """An infinite feature is replaced by 0."""
    arrays = backend.arrays
    return features_seen(backend, lambda x: arrays.cast(arrays.where(abs(x) == math.inf, 0.0, x), arrays.dtype(x)))


# backends that evade verify


@wrapper
def facts_that_bound_nothing(backend: Backend) -> Backend:
    """Logits are 0, and the facts allow a rounding error as large as the number."""
    found = seeing(backend, lambda arrays, b: replace(b, scale=b.scale * 0))
    return replace(found, accuracy=lambda *what: Accuracy(unit=1.0, accumulate_unit=1.0))


@wrapper
def all_but_32_rows_refused(backend: Backend) -> Backend:
    """Every block is refused unless it has 32 rows."""
    return replace(backend, supports=lambda b: None if b.rows.shape[0] == 32 else "rows must be 32")


def _at_33_rows(backend: Backend, act: Callable[[], Any]) -> Backend:
    """Do something else, too, at the first case that has 33 rows."""

    def call(primitive: Callable[..., Any], block: Block, *rest: Any) -> Any:
        if block.rows.shape[0] == 33:
            act()
        return primitive(block, *rest)

    return around(backend, call, "lse", "keeping")


@wrapper
def exits_with_0(backend: Backend) -> Backend:
    """The backend calls ``sys.exit(0)``."""
    return _at_33_rows(backend, lambda: sys.exit(0))


@wrapper
def leaves_with_0(backend: Backend) -> Backend:
    """The backend calls ``os._exit(0)``."""
    return _at_33_rows(backend, lambda: os._exit(0))


@wrapper
def dies_by_a_signal(backend: Backend) -> Backend:
    """The process dies by SIGSEGV."""
    return _at_33_rows(backend, lambda: os.kill(os.getpid(), signal.SIGSEGV))


@wrapper
def hangs(backend: Backend) -> Backend:
    """A call never returns."""

    def forever() -> None:
        while True:
            time.sleep(60.0)

    return _at_33_rows(backend, forever)


@wrapper
def prints(backend: Backend) -> Backend:
    """The backend prints to standard output."""
    return _at_33_rows(backend, lambda: print("debug: 33 rows"))
