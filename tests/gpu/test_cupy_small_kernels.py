"""The small kernels of the cupy backend against NumPy in float64, each error as a share of a bound derived from the
operations it does. Shapes are ragged, features strided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from cupy_small_inputs import (  # noqa: E402
    LOG2E,
    U,
    drawn_pairs,
    features,
    nlls,
    plan,
    ratio,
    read,
    restart,
    rng,
    scalar,
    seen,
    stored,
)

from contrastile.backends.cupy.arguments import struct  # noqa: E402
from contrastile.backends.cupy.common import (  # noqa: E402
    FOLD,
    LANES,
    LINES,
    ONE_BLOCK,
    PAIRS,
    TERMS,
    THREADS,
    plan_field,
)
from contrastile.backends.cupy.instances import ARITHMETICS, ELEMENTS, instance, positives_kernel  # noqa: E402
from contrastile.backends.cupy.launch import launch, pointer  # noqa: E402
from contrastile.backends.cupy.products import Products  # noqa: E402
from contrastile.backends.passes import ceil_div  # noqa: E402


def measure(dtype: str, strided: bool) -> Iterator[tuple[str, float]]:
    """Norms, and the plan that comes of them."""
    m, n, d, scale, bias = 261, 197, 83 if strided else 96, -7.3, 0.4
    held = features(m, d, dtype, strided), features(n, d, dtype, strided)
    (_, rows, q), (_, columns, k) = held
    for positives, excluded in drawn_pairs(m, n):
        blocks = ceil_div(max(m, n), LINES)
        peaks, decided = cupy.full((blocks, 4), np.nan, "f4"), plan()
        where, alpha, beta = (cupy.asarray(positives), cupy.asarray(excluded)), scalar(scale), scalar(bias)
        sizes = {"m": m, "n": n, "depth": d, "peaks": pointer(peaks)}
        named = {"positives": pointer(where[0]), "excluded": pointer(where[1])}
        norms = struct("MeasureArguments")(rows=rows, columns=columns, **sizes, **named)
        launch(instance("measure", "measure", ELEMENTS[dtype]), blocks, THREADS, norms)
        numbers = {"scale": pointer(alpha), "bias": pointer(beta), "plan": pointer(decided)}
        launch(instance("plan", "plan_forward"), 1, ONE_BLOCK, struct("PlanForwardArguments")(**sizes, **numbers))
        squares = [np.square(x).sum(1) for x in (q, k)]
        for side, square in enumerate(squares):
            padded = np.pad(square, (0, blocks * LINES - len(square)))
            top = padded.reshape(blocks, LINES).max(1)
            yield "measure: norms", ratio(peaks[:, side], top, (d + 2) * U * top + 1e-300)
        said = read(decided)
        bound = abs(scale) * LOG2E * np.sqrt(squares[0].max() * squares[1].max()) * 1.01
        room_left = 124 - max(m, n).bit_length()
        want = max(bound - room_left, 0.0) if bound <= room_left + 100 else 0.0
        yield "plan_forward", ratio(said["reference"], np.float64(want), (d + 9) * U * bound)
        j = seen(positives, excluded, n)
        expected = [np.float32(scale * LOG2E), bound > room_left + 100, np.any((j >= 0) & (j != np.arange(m)))]
        yield (
            "plan_forward",
            ratio([said["alpha"], said["status"], said["off_diagonal"]], np.array(expected, "f8"), U * 16),
        )


def lse(x: np.ndarray) -> float:
    """The log-sum-exp of a list; of one number that number, of none -inf."""
    return float(np.logaddexp.reduce(x)) if x.size else -np.inf


def positives(dtype: str, precision: str, d: int) -> Iterator[tuple[str, float]]:
    """Logits of positives by row, their sums and log-sum-exps by column."""
    m, n, scale, bias = 261, 197, -7.3, 0.4
    held = features(m, d, dtype, False), features(n, d, dtype, False)
    (_, rows, q), (_, columns, k) = held
    exact = precision == "ieee" and dtype == "float32"
    chain = (d + 8) * (U if exact else 2 * U)
    error = (1 + (2.0**-11 if precision == "tf32" else 0.0)) ** 2 * (1 + chain) - 1
    alpha = float(np.float32(np.float32(scale) * LOG2E))
    for named, excluded in drawn_pairs(m, n):
        j = seen(named, excluded, n)
        x = np.where(j >= 0, alpha / LOG2E * np.einsum("ik,ik->i", q, k[j]) + np.float32(bias), 0.0)
        # all but the product in float64
        room = abs(scale) * error * np.einsum("ik,ik->i", abs(q), abs(k[j])) + 2.0**-48
        row_lse, row_sum = (cupy.full(m, np.nan) for _ in range(2))
        column_lse, column_sum = (cupy.full(n, np.nan) for _ in range(2))
        off_diagonal = int(np.any((j >= 0) & (j != np.arange(m))))
        decided = plan(off_diagonal=off_diagonal)
        where, by, beta = (cupy.asarray(named), cupy.asarray(excluded)), scalar(scale), scalar(bias)
        common = {"m": m, "n": n, "positives": pointer(where[0]), "excluded": pointer(where[1])}
        common |= {"row_sum": pointer(row_sum)}
        common |= {"column_lse": pointer(column_lse), "column_sum": pointer(column_sum)}
        numbers = {"depth": d, "scale": pointer(by), "bias": pointer(beta), "row_lse": pointer(row_lse)}
        dots = struct("PositiveDotsArguments")(rows=rows, columns=columns, **common, **numbers)
        launch(positives_kernel(dtype, precision), ceil_div(max(m, n), PAIRS), THREADS, dots)
        gather = struct("SumPositivesArguments")(plan=pointer(decided), **common)
        launch(instance("sum_positives", "sum_positives"), ceil_div(n, THREADS), THREADS, gather)
        yield f"positive_dots, {precision}: sum", ratio(row_sum, x, room)
        # the very same bits
        found = cupy.asnumpy(row_sum)
        yield f"positive_dots, {precision}: lse", ratio(row_lse, np.where(j >= 0, found, -np.inf), 1e-300)
        by_column = [found[j == column] for column in range(n)]
        want = np.array([np.sum(each) for each in by_column])
        yield "sum_positives: sum", ratio(column_sum, want, 2.0**-48)
        want = np.array([lse(each) for each in by_column])
        lone = np.array([each.size == 1 for each in by_column])
        yield "sum_positives: lse", ratio(column_lse, want, np.where(lone, 1e-300, 2.0**-44 * (abs(want) + 1)))


def fold(safe: bool) -> Iterator[tuple[str, float]]:
    """Three chunks into one state; sums too small to be trusted."""
    m, tiles, bias = 77, 45, 0.7
    # safe: what is rounded at the size of 1e7 would be off by one
    far = np.float32(1e7) if safe else np.float32(0)
    logs = rng.uniform(-20, 100, (tiles, m))
    references = np.where(rng.random(m) < 0.5, far, 0) + np.round(rng.uniform(-40, 40, (tiles, m)))
    sums = np.exp2(logs if not safe else rng.uniform(-8, 8, (tiles, m)))
    if safe:
        sums[:, 3], references[:, 3] = 0.0, 0.0
        sums[2, 5], sums[7, 6] = np.inf, np.nan
        references[2, 5], references[7, 6] = 0.0, 0.0
        sums[4, :] = 0.0
    held = [cupy.asarray(x.astype("f4")) for x in (sums, references)]
    exact, at = (cupy.asnumpy(x).astype("f8") for x in held)
    reference = 0.0 if safe else 31.25
    decided = plan(status=int(safe), reference=reference, bias=bias)
    state, out = cupy.full(m, np.nan), cupy.full(m, np.nan)

    def side(start: int, stop: int) -> Any:
        return struct("FoldSide")(
            sums=pointer(held[0], start * m),
            references=pointer(held[1], start * m),
            part_stride=m,
            tiles=stop - start,
            length=m,
            terms=m,
            state=pointer(state),
            lse=pointer(out),
            first=start == 0,
            last=stop == tiles,
        )

    def run(rows: Any, columns: Any, by: Any) -> None:
        arguments = struct("FoldArguments")(rows=rows, columns=columns, plan=pointer(by))
        launch(instance("fold", "fold", str(safe).lower()), ceil_div(m, FOLD), THREADS, arguments)

    for start, stop in ((0, 20), (20, 21), (21, tiles)):
        run(side(start, stop), struct("FoldSide")(), decided)
    with np.errstate(all="ignore"):
        if safe:
            top = at.max(0)
            want = top + np.log2((exact * np.exp2(at - top)).sum(0))
            want[5] = np.inf
        else:
            want = np.log2(exact.sum(0)) + reference
        want = want / LOG2E + np.float32(bias)
    # safe: the exponential in float32 of a difference of references, a few roundings of 1
    yield f"fold<{safe}>", ratio(out, want, (8 * U if safe else 2.0**-44) + 2.0**-48 * abs(np.nan_to_num(want)))
    yield f"fold<{safe}>: status", float(read(decided)["status"] != int(safe))
    if not safe:
        held[0] = cupy.full((tiles, m), 2.0**-107, "f4")
        doubted = plan(threshold=2.0**-100)
        run(struct("FoldSide")(), side(0, tiles), doubted)
        yield "fold<False>: doubt", float(read(doubted)["status"] != 1)


def fold_by_ids(safe: bool) -> Iterator[tuple[str, float]]:
    """Statistics of positives that ids name, in two chunks: of none, of one, of several."""
    m, tiles, scale, bias = 45, 19, 3.1, -0.3
    alpha = np.float32(np.float32(scale) * LOG2E)
    counts = rng.integers(0, 2, (tiles, m)) * (rng.random(m) < 0.7)
    counts[:, 0], counts[:, 1], counts[3, 1] = 0, 0, 1
    dots, low = (np.where(counts, rng.normal(0, x, (tiles, m)), 0.0).astype("f4") for x in (1.0, 2.0**-26))
    references = np.round(float(alpha) * dots) if safe else np.zeros_like(dots)
    reference = 0.0 if safe else 2.0
    sums = np.where(counts, np.exp2(float(alpha) * dots.astype("f8") - references - reference), 0.0)
    held = [cupy.asarray(np.asarray(x, "f4")) for x in (dots, low, counts, sums, references)]
    state, total, out = cupy.empty(3 * m), cupy.full(m, np.nan), cupy.full(m, np.nan)
    decided = plan(alpha=alpha, bias=bias, reference=reference, status=int(safe), threshold=2.0**-100)

    def run(by: Any) -> None:
        for first, last in ((0, 7), (7, tiles)):
            chunk = {"tiles": last - first, "first": first == 0, "last": last == tiles, "length": m}
            found = {"state": pointer(state), "state_stride": m, "lse": pointer(out), "sum": pointer(total)}
            side = struct("PositiveSide")(*(pointer(x, first * m) for x in held), part_stride=m, **chunk, **found)
            arguments = struct("FoldPositivesArguments")(rows=struct("PositiveSide")(), columns=side, plan=pointer(by))
            name = instance("fold", "fold_positives", str(safe).lower())
            launch(name, ceil_div(m, FOLD), THREADS, arguments)

    run(decided)
    x = float(alpha) / LOG2E * (dots.astype("f8") + low) + np.float32(bias)
    want = np.where(counts, x, 0.0).sum(0)
    yield f"fold_positives<{safe}>: sum", ratio(total, want, 2.0**-44)
    several = np.array([lse(x[counts[:, i] > 0, i]) for i in range(m)])
    count, found = counts.sum(0), cupy.asnumpy(total)
    want = np.where(count == 1, found, several)
    yield f"fold_positives<{safe}>: lse", ratio(out, want, np.where(count == 1, 1e-300, 8 * U))
    yield f"fold_positives<{safe}>: status", float(read(decided)["status"] != int(safe))
    if not safe:
        held[3] = cupy.where(held[2] > 0, np.float32(2.0**-110), np.float32(0))
        doubted = plan(threshold=2.0**-100)
        run(doubted)
        yield "fold_positives<False>: doubt", float(read(doubted)["status"] != 1)


def fold_sums() -> Iterator[tuple[str, float]]:
    """The sums of the sigmoid loss, in two chunks."""
    m, tiles = 45, 19
    values = [cupy.asarray(rng.standard_normal((tiles, m)).astype("f4")) for _ in range(2)]
    exact = [cupy.asnumpy(x).astype("f8").sum(0) for x in values]
    sizes = [np.abs(cupy.asnumpy(x)).astype("f8").sum(0) for x in values]
    state, outs = cupy.empty(2 * m), [cupy.empty(m, "f4") for _ in range(2)]
    weight = cupy.asarray(np.where(np.arange(m) % 7 == 0, 0.0, rng.standard_normal(m)).astype("f4"))
    chunks = (0, 7), (7, tiles)

    def chunk(first: int, last: int) -> dict[str, Any]:
        """What both kernels are told of the tiles first..last."""
        ends = {"first": first == 0, "last": last == tiles, "state": pointer(state), "state_stride": m}
        return {"part_stride": m, "tiles": last - first, "length": m, **ends}

    for first, last in chunks:
        at = [pointer(x, first * m) for x in values]
        arguments = struct("FoldSigmoidArguments")(
            loss_parts=at[0],
            slope_parts=at[1],
            loss=pointer(outs[0]),
            slope=pointer(outs[1]),
            row_weight=pointer(weight),
            **chunk(first, last),
        )
        launch(instance("fold", "fold_sigmoid"), ceil_div(m, FOLD), THREADS, arguments)
    for out, want, size in zip(outs, (exact[0], exact[1] * cupy.asnumpy(weight)), sizes, strict=True):
        yield "fold_sigmoid", ratio(out, want, U * (abs(want) + 1e-6 * size))


def share(n: np.ndarray, p: np.ndarray) -> np.ndarray:
    """``e^n / (e^n + e^p)``."""
    with np.errstate(all="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(p - n)))


def backward(half: bool, by_ids: bool, certain: bool) -> Iterator[tuple[str, float]]:
    """What the weights allow, the vectors of the epilogue of G, and G of positives by index."""
    lengths, bias, scale = (1500, 1027), float(np.float32(0.6)), 20.0
    sides, held = [], []
    # trained: the positives are far above the rest, and the reference must not be the one nearest 0
    low, high = (90, 100) if certain else (-30, 60)
    for length in lengths:
        negative, positive = rng.uniform(low, high, length), rng.uniform(low, high, length)
        if certain:
            positive += 60
        weight, target = rng.standard_normal(length) / 1e3, np.ones(length) if certain else rng.random(length)
        weight[::11], negative[::22], positive[::22] = 0.0, -np.inf, -np.inf
        negative[::33], positive[::33] = 5.0 + low, -np.inf
        positive[1::33], negative[2::35] = -np.inf, -np.inf
        vectors = [negative, positive, weight.astype("f4"), target.astype("f4")]
        held.append([cupy.asarray(x) for x in vectors])
        sides.append(struct("WeightSide")(*map(pointer, held[-1])))
    blocks = sum(ceil_div(x, LANES) for x in lengths)
    peaks, decided, alpha, beta = cupy.empty((blocks, 8), "f4"), plan(), scalar(scale), scalar(bias)
    rooms = [cupy.full((8 if by_ids else 3, x), np.nan, "f4") for x in lengths]
    index = np.where(np.arange(lengths[0]) % 4, rng.integers(-3, lengths[1] + 3, lengths[0]), 7)
    hidden = np.where(rng.random(lengths[0]) < 0.2, index, -1)
    named, entries = [cupy.asarray(x) for x in (index, hidden)], cupy.full(lengths[0], np.nan, "f4")
    given = {"m": lengths[0], "n": lengths[1], "bias": pointer(beta), "row": sides[0], "column": sides[1]}
    launch(
        instance("weight_bounds", "weight_bounds"),
        blocks,
        THREADS,
        struct("WeightBoundsArguments")(peaks=pointer(peaks), **given),
    )
    by_index = {"positives": named[0], "excluded": named[1], "entries": entries}
    held_by = {"peaks": peaks, "scale": alpha, "plan": decided, "row_vectors": rooms[0], "column_vectors": rooms[1]}
    held_by |= {} if by_ids else by_index
    flags = {"programs": blocks, "two_sided": 1, "half": half, "by_ids": by_ids}
    epilogue = struct("EpilogueScalesArguments")(**{name: pointer(x) for name, x in held_by.items()}, **flags, **given)
    launch(
        instance("epilogue_scales", "epilogue_scales"), sum(ceil_div(x, THREADS) for x in lengths), THREADS, epilogue
    )
    columns = [np.concatenate([cupy.asnumpy(x[i]).astype("f8") for x in held]) for i in range(4)]
    negative, positive, weight, target = columns
    with np.errstate(all="ignore"):
        log = (np.logaddexp(negative, positive) - bias) * LOG2E
        far = (positive - negative) * LOG2E > 8
    counts = weight != 0
    high, low = np.max(log), np.min(log[counts])
    most = 2 * np.max(abs(weight) * (1 + target))
    factor = 2.0 ** (13 - np.floor(np.log2(most))) if half else 1.0
    room = min(120, 125 + np.log2(np.min(abs(weight[counts])) * factor))
    reference = max(high - room, min(low, 0.0))
    sure = by_ids and bool(np.any(counts & (target > 0.5) & far))
    fast = bool(reference <= low) and not sure
    said, case = read(decided), f"half {half}, ids {by_ids}, certain {certain}"
    expected = np.array([factor, fast, sure], "f8")
    yield (f"scales: plan, {case}", ratio([said["gradient_scale"], said["fast"], said["certain"]], expected, 1e-300))
    yield ("scales: reference", ratio(said["reference"], np.float64(reference if fast else 0), 4 * U * 300))
    yield ("scales: output_scale", ratio(said["output_scale"], np.float32(scale / factor), 1e-300))
    yield ("scales: blas_scale", ratio(said["blas_scale"], np.float64(said["output_scale"]), 1e-300))
    yield ("scales: rest", float(any(said[name] != 0 for name in ("zero", "blocks_done", "off_diagonal", "status"))))
    reference = float(said["reference"])
    got = np.concatenate([cupy.asnumpy(x)[:3] for x in rooms], 1).astype("f8")
    quiet = ~counts | np.isneginf(log)
    yield ("scales: log", ratio(got[0], np.where(quiet, np.inf, log), U * abs(np.where(quiet, 1, log)) + 2.0**-44))
    scaled = weight * factor
    # the high part and what it leaves are all of L
    part = np.where(quiet, 0.0, log - np.where(quiet, 0.0, got[0]))
    yield "scales: weight", ratio(got[1], scaled * np.exp2(-part), 8 * U * abs(scaled) + 1e-300)
    folded = np.where(quiet | (not fast), 0.0, scaled * np.exp2(reference - np.where(quiet, 0.0, log)))
    yield "scales: folded", ratio(got[2], folded, 2 * U * abs(folded) + 2.0**-148)
    if by_ids:
        starts = (0, lengths[0])
        taken = np.concatenate([cupy.asnumpy(x)[3] for x in rooms]).astype("f8")
        yield "scales: taken", ratio(taken, scaled * target, U * abs(scaled * target) + 1e-300)
        if not sure:
            return
        own = (positive - bias) * LOG2E
        for x, start in zip(rooms, starts, strict=True):
            part4 = cupy.asnumpy(x)[4:].reshape(-1, 4).astype("f8")
            here = slice(start, start + len(part4))
            there = np.isfinite(own[here])
            p, w = np.where(there, own[here], 0.0), scaled[here]
            rest = w * share(negative[here], positive[here])
            yield (
                "scales: certain, P",
                ratio(np.where(there, part4[:, 0] + part4[:, 1], 0), p, 2.0**-44 * (abs(p) + 1)),
            )
            yield "scales: certain, weight", ratio(part4[:, 2], w, 1e-300)
            yield (
                "scales: certain, rest",
                ratio(np.where(there, part4[:, 3], 0), np.where(there, rest, 0), 4 * U * abs(rest) + 2.0**-148),
            )
        return
    j = seen(index, hidden, lengths[1])
    want, size = np.zeros(lengths[0]), np.zeros(lengths[0])
    logit = positive[: lengths[0]]
    for at in (np.arange(lengths[0]), lengths[0] + j):
        with np.errstate(all="ignore"):
            q = np.exp(logit - positive[at])
            found = weight[at] * ((q - target[at]) - q * share(negative[at], positive[at]))
            # what is subtracted may be far larger than what is left
            parts = abs(weight[at]) * (q + target[at] + q * share(negative[at], positive[at]))
        silent = (weight[at] == 0) | (j < 0)
        want += np.where(silent, 0.0, found)
        size += np.where(silent, 0.0, parts)
    yield (
        f"scales: entries, {case}",
        ratio(entries, factor * want, factor * (2 * U * abs(want) + 2.0**-44 * size) + 1e-300),
    )


def losses() -> Iterator[tuple[str, float]]:
    """The loss of one direction and of two, and its log-sum-exps."""
    arrays, terms, whole = nlls(m := 2 * TERMS + 77)
    # rows, and the same once more as columns
    for stop, sides in product((1, TERMS, m), (1, 2)):
        one = struct("LossSide")(*map(pointer, arrays), length=stop)
        parts = cupy.full(sides * ceil_div(stop, TERMS), np.nan)
        arguments = struct("WeightedNllArguments")(*[one] * sides, out=pointer(parts))
        launch(instance("weighted_nll", "weighted_nll"), parts.size, ONE_BLOCK, arguments)
        want, size = (sides * np.sum(x[:stop]) for x in (terms, abs(terms)))
        yield "weighted_nll", ratio(float(parts.sum()), want, 2.0**-44 * size + 1e-300)
    merged = cupy.empty(m)
    arguments = struct("MergeLseArguments")(*map(pointer, (*arrays[:2], merged)), length=m)
    launch(instance("weighted_nll", "merge_lse"), ceil_div(m, THREADS), THREADS, arguments)
    yield "merge_lse", ratio(merged, whole, 2.0**-50 * (1 + abs(whole)))


def passes(dtype: str, strided: bool) -> Iterator[tuple[str, float]]:
    """Inner products, casts, and the gradient scale applied and taken away."""
    m, d, factor = 133, 77 if strided else 88, 0.37
    (_, a, x), (_, b, y) = keep = features(m, d, dtype, strided), features(m, d, "float32", strided)
    parts, total, rounded = cupy.empty(ceil_div(m, LINES)), cupy.empty(()), cupy.empty((), "f4")
    dots = struct("RowDotsArguments")(a=a, b=b, m=m, depth=d, out=pointer(parts))
    launch(instance("scale_cast", "row_dots", ELEMENTS[dtype], "float"), len(parts), THREADS, dots)
    for out in ({"out": pointer(total)}, {"rounded": pointer(rounded)}):
        added = struct("AddDoublesArguments")(parts=pointer(parts), length=len(parts), **out)
        launch(instance("scale_cast", "add_doubles"), 1, ONE_BLOCK, added)
    yield "add_doubles, rounded", float(rounded.get() != np.float32(total.get()))
    yield "row_dots, add_doubles", ratio(total, np.sum(x * y), 8 * U * np.sum(abs(x * y)))
    out, by = cupy.zeros((m, d), "u2" if dtype == "bfloat16" else dtype), scalar(factor)
    where = struct("Matrix")(data=pointer(out), row_stride=d, column_stride=1)
    cast = struct("ScaleCastArguments")(x=b, out=where, rows=m, columns=d, factor=pointer(by))
    launch(instance("scale_cast", "scale_cast", "float", ELEMENTS[dtype]), 7, THREADS, cast)
    want = stored(y.astype("f4") * np.float32(factor), dtype)[0]
    yield "scale_cast", float(not bool((out == want).all()))
    if dtype == "float32":
        scaled = plan(gradient_scale=2.0**-9)
        strides = {"row_stride": b.row_stride, "column_stride": b.column_stride}
        for divide in (0, 1):
            arguments = struct("ScaleGradientArguments")(
                x=b.data, rows=m, columns=d, **strides, plan=pointer(scaled), divide=divide
            )
            launch(instance("scale_cast", "scale_gradient"), 5, THREADS, arguments)
            got = cupy.asnumpy(keep[1][0])[:, : d * b.column_stride : b.column_stride]
            yield "scale_gradient", ratio(got, y if divide else y * 2.0**-9, 1e-300)


def finalized(dtype: str, strided: bool) -> Iterator[tuple[str, float]]:
    """The rows of two chunks, their inner product added by the last block; a product that finishes columns."""
    m, d, cut, scale, factor = 133, 77 if strided else 88, 80, -3.7, 2.0**-9
    (_, rows, q), (_, sums, r) = keep = features(m, d, dtype, strided), features(m, d, "float32", strided)
    decided, by, out = (
        plan(gradient_scale=factor),
        scalar(scale),
        cupy.zeros((m, d), "u2" if dtype == "bfloat16" else dtype),
    )
    blocks = ceil_div(cut, LINES) + ceil_div(m - cut, LINES)
    parts, inner = cupy.full(blocks, np.nan), cupy.full((), np.nan)

    def below(x: Any, start: int) -> Any:
        """A matrix from a row on."""
        first = x.data + start * x.row_stride * (4 if x is sums or dtype == "float32" else 2)
        return struct("Matrix")(data=first, row_stride=x.row_stride, column_stride=x.column_stride)

    for start, stop in ((0, cut), (cut, m)):
        arguments = struct("FinalizeRowsArguments")(
            sums=below(sums, start),
            features=below(rows, start),
            out=struct("Matrix")(data=pointer(out, start * d), row_stride=d, column_stride=1),
            m=stop - start,
            depth=d,
            scale=pointer(by),
            plan=pointer(decided),
            parts=pointer(parts),
            first=ceil_div(start, LINES),
            all_blocks=blocks,
            inner=pointer(inner),
        )
        launch(
            instance("finalize_rows", "finalize_rows", ELEMENTS[dtype]),
            ceil_div(stop - start, LINES),
            THREADS,
            arguments,
        )
    exact = (r.astype("f4") / np.float32(factor)) * np.float32(scale)
    yield "finalize_rows", float(not bool((out == stored(exact, dtype)[0]).all()))
    yield "finalize_rows: inner", ratio(inner, np.sum(q * r) / factor, 9 * U * np.sum(abs(q * r)) / factor)
    del keep
    if dtype == "float32" or strided:
        return
    g, x = (stored(rng.standard_normal(shape), dtype) for shape in ((200, 48), (200, 96)))
    made, by = cupy.full((48, 96), 0x7FC0, "u2").view(dtype), plan(blas_scale=scale)
    Products().write(made, g[0].view(dtype), x[0].view(dtype), (plan_field(by, "blas_scale"), plan_field(by, "zero")))
    want, size = scale * (g[1].T @ x[1]), abs(scale) * (abs(g[1]).T @ abs(x[1]))
    half, rounding = (True, 2.0**-11) if dtype == "float16" else (False, 2.0**-8)
    got = made.astype("f4") if half else cupy.asarray(made.view("u2").astype("u4") << 16).view("f4")
    x[0][3, 5] = np.nan if half else 0x7FC0
    by = plan(blas_scale=2.0**-149)
    Products().write(made, g[0].view(dtype), x[0].view(dtype), (plan_field(by, "blas_scale"), plan_field(by, "zero")))
    bits = made.view("u2") & 0x7FFF
    silent = np.arange(96) != 5
    lost = not bool((bits[:, 5] > (0x7C00 if half else 0x7F80)).all()) or bool(bits[:, silent].any())
    yield "a product that finishes with the factor for 0", float(lost)
    yield "a product that finishes", ratio(got, want, (1 + rounding) * 200 * 2 * U * size + rounding * abs(want))


CASES: list[tuple[Callable[..., Iterator[tuple[str, float]]], tuple[Any, ...]]] = [
    *product((measure, passes, finalized), product(ELEMENTS, (False, True))),
    *(
        (positives, (dtype, precision, d))
        for dtype in ELEMENTS
        for precision in (ARITHMETICS if dtype == "float32" else ("ieee",))
        for d in (83, 128, 200)
    ),
    *product((fold, fold_by_ids), ((False,), (True,))),
    (fold_sums, ()),
    (losses, ()),
    *product((backward,), product((False, True), repeat=3)),
]


@pytest.mark.parametrize(("check", "given"), CASES, ids=[f"{check.__name__}{[*given]}" for check, given in CASES])
def test_a_small_kernel_is_within_its_bound_and_repeats(check: Any, given: tuple[Any, ...]) -> None:
    runs = []
    for _ in range(2):
        restart()
        runs.append(list(check(*given)))
    assert runs[0]
    for name, value in runs[0]:
        assert value <= 1, f"{name}: {value:.3g}"
    assert runs[0] == runs[1], "a second run has other bits"
