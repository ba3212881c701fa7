"""The small kernels of the cupy backend against NumPy in float64, on the GPU at hand.

``python benchmarks/cupy_small_kernels.py`` prints, for each kernel, its largest error as a multiple of a bound derived
from the operations it does (at most 1), and whether a second run gave the same bits. Shapes are ragged, features
strided. The exit code says whether all is well.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np
from cupy_small_inputs import LOG2E, U, features, plan, ratio, read, restart, rng, scalar, stored

from contrastile.backends.cupy.arguments import struct
from contrastile.backends.cupy.common import FOLD, LANES, LINES, ONE_BLOCK, PAIRS, THREADS, ceil_div, planned
from contrastile.backends.cupy.instances import ARITHMETICS, ELEMENTS, instance, positives_kernel
from contrastile.backends.cupy.launch import launch, pointer
from contrastile.backends.cupy.products import Products


def drawn_pairs(m: int, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Positives, own, drawn and none, and what is excluded; a positive that is excluded is none."""
    for positives in (np.arange(m), rng.integers(-3, n + 3, m), np.full(m, -1)):
        yield positives, np.where(rng.random(m) < 0.2, positives, -1)


def seen(positives: np.ndarray, excluded: np.ndarray, n: int) -> np.ndarray:
    """The column of each row's positive, -1 for none."""
    return np.where((positives >= 0) & (positives < n) & (positives != excluded), positives, -1)


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
        survey = struct("MeasureArguments")(rows=rows, columns=columns, **sizes, **named)
        launch(instance("measure", "measure", ELEMENTS[dtype]), blocks, THREADS, survey)
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
        yield "plan_forward", ratio([said["alpha"], said["status"], said["stray"]], np.array(expected, "f8"), U * 16)


def positives(dtype: str, precision: str, d: int) -> Iterator[tuple[str, float]]:
    """Logits of positives by row and by column."""
    m, n, scale, bias = 261, 197, -7.3, 0.4
    held = features(m, d, dtype, False), features(n, d, dtype, False)
    (_, rows, q), (_, columns, k) = held
    exact = precision == "ieee" and dtype == "float32"
    chain = (3 if precision == "split" else 1) * (d + 8) * (U if exact else 2 * U)
    error = (1 + {"tf32": 2.0**-11, "split": 2.0**-21}.get(precision, 0.0)) ** 2 * (1 + chain) - 1
    for named, excluded in drawn_pairs(m, n):
        j = seen(named, excluded, n)
        x = np.where(j >= 0, scale * np.einsum("ik,ik->i", q, k[j]) + bias, 0.0)
        room = abs(scale) * error * np.einsum("ik,ik->i", abs(q), abs(k[j])) + 4 * U * (abs(x) + abs(bias))
        row, column = (cupy.full(size, np.nan, "f4") for size in (m, n))
        decided = plan(stray=int(np.any((j >= 0) & (j != np.arange(m)))))
        where, alpha, beta = (cupy.asarray(named), cupy.asarray(excluded)), scalar(scale), scalar(bias)
        common = {"m": m, "n": n, "positives": pointer(where[0]), "excluded": pointer(where[1])}
        common |= {"row_positive": pointer(row), "column_positive": pointer(column)}
        numbers = {"depth": d, "scale": pointer(alpha), "bias": pointer(beta)}
        dots = struct("PositiveDotsArguments")(rows=rows, columns=columns, **common, **numbers)
        launch(positives_kernel(dtype, precision), ceil_div(max(m, n), PAIRS), THREADS, dots)
        gather = struct("SumPositivesArguments")(plan=pointer(decided), **common)
        launch(instance("sum_positives", "sum_positives"), ceil_div(n, THREADS), THREADS, gather)
        yield f"positive_dots, {precision}", ratio(row, x, room)
        sums, rooms = np.zeros(n), np.zeros(n)
        np.add.at(sums, j[j >= 0], x[j >= 0])
        np.add.at(rooms, j[j >= 0], (room + U * abs(x))[j >= 0])
        yield "sum_positives", ratio(column, sums, rooms + U * abs(sums) + 1e-300)


def fold(safe: bool) -> Iterator[tuple[str, float]]:
    """Three chunks into one state; sums too small to be trusted."""
    m, tiles, bias = 77, 45, 0.7
    logs = rng.uniform(-130, 120, (tiles, m)) if safe else rng.uniform(-20, 100, (tiles, m))
    if safe:
        logs[:, 3] = -np.inf
        logs[2, 5], logs[7, 6] = np.inf, np.nan
    parts = cupy.asarray((logs if safe else np.exp2(logs)).astype("f4"))
    exact = cupy.asnumpy(parts).astype("f8")
    reference = 0.0 if safe else 31.25
    decided = plan(status=int(safe), reference=reference, bias=bias)
    state, lse = cupy.full(m, np.nan), cupy.full(m, np.nan, "f4")
    for start, stop in ((0, 20), (20, 21), (21, tiles)):
        side = struct("FoldSide")(
            parts=pointer(parts, start * m),
            part_stride=m,
            tiles=stop - start,
            length=m,
            terms=m,
            state=pointer(state),
            lse=pointer(lse),
            first=start == 0,
            last=stop == tiles,
        )
        other = struct("FoldSide")()
        launch(
            instance("fold", "fold", str(safe).lower()),
            ceil_div(m, FOLD),
            THREADS,
            struct("FoldArguments")(rows=side, columns=other, plan=pointer(decided)),
        )
    with np.errstate(all="ignore"):
        want = (np.logaddexp2.reduce(exact) if safe else np.log2(exact.sum(0)) + reference) / LOG2E + bias
    yield f"fold<{safe}>", ratio(lse, want, (8 if safe else 1) * U * (abs(want) + 1))
    yield f"fold<{safe}>: status", float(read(decided)["status"] != int(safe))
    if not safe:
        doubted = plan(threshold=2.0**-100)
        small = cupy.full(m, 2.0**-101, "f4")
        side = struct("FoldSide")(
            parts=pointer(small),
            part_stride=m,
            tiles=1,
            length=m,
            terms=1,
            state=pointer(state),
            lse=pointer(lse),
            first=1,
            last=1,
        )
        launch(
            instance("fold", "fold", "false"),
            ceil_div(m, FOLD),
            THREADS,
            struct("FoldArguments")(rows=struct("FoldSide")(), columns=side, plan=pointer(doubted)),
        )
        yield "fold<False>: doubt", float(read(doubted)["status"] != 1)


def fold_sums() -> Iterator[tuple[str, float]]:
    """Positives that ids name, and the sums of the sigmoid loss, in two chunks."""
    m, tiles, scale, bias = 45, 19, 3.1, -0.3
    values = [cupy.asarray(rng.standard_normal((tiles, m)).astype("f4")) for _ in range(2)]
    exact = [cupy.asnumpy(x).astype("f8").sum(0) for x in values]
    sizes = [np.abs(cupy.asnumpy(x)).astype("f8").sum(0) for x in values]
    state, outs = cupy.empty(2 * m), [cupy.empty(m, "f4") for _ in range(2)]
    alpha = np.float32(np.float32(scale) * LOG2E)
    decided = plan(alpha=alpha, bias=bias)
    weight = cupy.asarray(np.where(np.arange(m) % 7 == 0, 0.0, rng.standard_normal(m)).astype("f4"))
    chunks = (0, 7), (7, tiles)

    def chunk(first: int, last: int) -> dict[str, Any]:
        """What both kernels are told of the tiles first..last."""
        ends = {"first": first == 0, "last": last == tiles, "state": pointer(state), "state_stride": m}
        return {"part_stride": m, "tiles": last - first, "length": m, **ends}

    for first, last in chunks:
        at = [pointer(x, first * m) for x in values]
        side = struct("PositiveSide")(dots=at[0], counts=at[1], out=pointer(outs[0]), **chunk(first, last))
        arguments = struct("FoldPositivesArguments")(rows=struct("PositiveSide")(), columns=side, plan=pointer(decided))
        launch(instance("fold_positives", "fold_positives", "false"), ceil_div(m, FOLD), THREADS, arguments)
    want = exact[0] * float(alpha) / LOG2E + exact[1] * np.float32(bias)
    yield "fold_positives", ratio(outs[0], want, U * (abs(want) + 1e-6 * (sizes[0] + sizes[1])))
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
        launch(instance("fold_sigmoid", "fold_sigmoid"), ceil_div(m, FOLD), THREADS, arguments)
    for out, want, size in zip(outs, (exact[0], exact[1] * cupy.asnumpy(weight)), sizes, strict=True):
        yield "fold_sigmoid", ratio(out, want, U * (abs(want) + 1e-6 * size))


def backward(half: bool) -> Iterator[tuple[str, float]]:
    """What the weights allow, and the vectors of the epilogue of G."""
    lengths, bias, scale = (1500, 1027), 0.6, 20.0
    sides, held = [], []
    for length in lengths:
        lse, weight, target = rng.uniform(-30, 60, length), rng.standard_normal(length) / 1e3, rng.random(length)
        weight[::11], lse[::22], lse[::33] = 0.0, -np.inf, 5.0
        held.append([cupy.asarray(x.astype("f4")) for x in (lse, weight, target)])
        sides.append(struct("WeightSide")(*map(pointer, held[-1])))
    blocks = sum(ceil_div(x, LANES) for x in lengths)
    peaks, decided, alpha, beta = cupy.empty((blocks, 4), "f4"), plan(), scalar(scale), scalar(bias)
    vectors = [cupy.full((3, x), np.nan, "f4") for x in lengths]
    given = {"m": lengths[0], "n": lengths[1], "bias": pointer(beta), "row": sides[0], "column": sides[1]}
    launch(instance("weigh", "weigh"), blocks, THREADS, struct("WeighArguments")(peaks=pointer(peaks), **given))
    temper = struct("TemperArguments")(
        peaks=pointer(peaks),
        programs=blocks,
        scale=pointer(alpha),
        plan=pointer(decided),
        row_vectors=pointer(vectors[0]),
        column_vectors=pointer(vectors[1]),
        two_sided=1,
        half=half,
        **given,
    )
    launch(instance("temper", "temper"), sum(ceil_div(x, THREADS) for x in lengths), THREADS, temper)
    given_ = [np.concatenate([cupy.asnumpy(x[i]).astype("f8") for x in held]) for i in range(3)]
    lse, weight, target = given_
    log, counts = (lse - np.float32(bias)) * LOG2E, weight != 0
    high, low = np.max(log), np.min(log[counts])
    most = 2 * np.max(abs(weight) * (1 + target))
    factor = 2.0 ** (13 - np.floor(np.log2(most))) if half else 1.0
    reference = max(high - 120, min(low, 0.0))
    least = np.log2(np.min(abs(weight[counts])) * factor) - (high - reference)
    fast = reference <= low and least >= -125
    said = read(decided)
    yield "weigh, temper: plan", ratio([said["factor"], said["fast"]], np.array([factor, fast], "f8"), 1e-300)
    yield "weigh, temper: plan", ratio(said["reference"], np.float64(reference if fast else 0), U * 130)
    yield "weigh, temper: plan", ratio(said["finishing"], np.float32(scale / factor), 1e-300)
    yield "weigh, temper: plan", ratio(said["multiplier"], np.float64(said["finishing"]), 1e-300)
    yield "weigh, temper: plan", float(any(said[name] != 0 for name in ("zero", "finished", "stray", "status")))
    reference = float(said["reference"])
    got = np.concatenate([cupy.asnumpy(x) for x in vectors], 1)
    quiet = ~counts | np.isneginf(lse)
    yield "temper: log", ratio(got[0], np.where(quiet, np.inf, log), U * (abs(log) + 1))
    yield "temper: weight", ratio(got[1], weight * factor, 1e-300)
    folded = np.where(quiet, 0.0, weight * factor * np.exp2(reference - np.where(quiet, 0.0, got[0].astype("f8"))))
    yield "temper: folded", ratio(got[2], folded, U * (4 + 2 * 150) * abs(folded) + 2.0**-148)


def passes(dtype: str, strided: bool) -> Iterator[tuple[str, float]]:
    """Inner products, casts, and the factor carried in and out."""
    m, d, factor = 133, 77 if strided else 88, 0.37
    (_, a, x), (_, b, y) = keep = features(m, d, dtype, strided), features(m, d, "float32", strided)
    parts, total = cupy.empty(ceil_div(m, LINES)), cupy.empty(())
    launch(
        instance("scale_cast", "row_dots", ELEMENTS[dtype], "float"),
        len(parts),
        THREADS,
        struct("RowDotsArguments")(a=a, b=b, m=m, depth=d, out=pointer(parts)),
    )
    launch(
        instance("scale_cast", "add_doubles"),
        1,
        ONE_BLOCK,
        struct("AddDoublesArguments")(parts=pointer(parts), length=len(parts), out=pointer(total)),
    )
    yield "row_dots, add_doubles", ratio(total, np.sum(x * y), 8 * U * np.sum(abs(x * y)))
    out, by = cupy.zeros((m, d), "u2" if dtype == "bfloat16" else dtype), scalar(factor)
    where = struct("Matrix")(data=pointer(out), row_stride=d, column_stride=1)
    launch(
        instance("scale_cast", "scale_cast", "float", ELEMENTS[dtype]),
        7,
        THREADS,
        struct("ScaleCastArguments")(x=b, out=where, rows=m, columns=d, factor=pointer(by)),
    )
    want = stored(y.astype("f4") * np.float32(factor), dtype)[0]
    yield "scale_cast", float(not bool((out == want).all()))
    if dtype == "float32":
        carried = plan(factor=2.0**-9)
        for divide in (0, 1):
            launch(
                instance("scale_cast", "carry"),
                5,
                THREADS,
                struct("CarryArguments")(
                    x=b.data,
                    rows=m,
                    columns=d,
                    row_stride=b.row_stride,
                    column_stride=b.column_stride,
                    plan=pointer(carried),
                    divide=divide,
                ),
            )
            got = cupy.asnumpy(keep[1][0])[:, : d * b.column_stride : b.column_stride]
            yield "carry", ratio(got, y if divide else y * 2.0**-9, 1e-300)


def finishing(dtype: str, strided: bool) -> Iterator[tuple[str, float]]:
    """The rows of two chunks finished, their inner product added by the last block; a product that finishes columns."""
    m, d, cut, scale, factor = 133, 77 if strided else 88, 80, -3.7, 2.0**-9
    (_, rows, q), (_, sums, r) = keep = features(m, d, dtype, strided), features(m, d, "float32", strided)
    decided, by, out = plan(factor=factor), scalar(scale), cupy.zeros((m, d), "u2" if dtype == "bfloat16" else dtype)
    blocks = ceil_div(cut, LINES) + ceil_div(m - cut, LINES)
    parts, inner = cupy.full(blocks, np.nan), cupy.full((), np.nan)

    def below(x: Any, start: int) -> Any:
        """A matrix from a row on."""
        first = x.data + start * x.row_stride * (4 if x is sums or dtype == "float32" else 2)
        return struct("Matrix")(data=first, row_stride=x.row_stride, column_stride=x.column_stride)

    for start, stop in ((0, cut), (cut, m)):
        arguments = struct("FinishRowsArguments")(
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
            instance("finish_rows", "finish_rows", ELEMENTS[dtype]), ceil_div(stop - start, LINES), THREADS, arguments
        )
    exact = (r.astype("f4") / np.float32(factor)) * np.float32(scale)
    yield "finish_rows", float(not bool((out == stored(exact, dtype)[0]).all()))
    yield "finish_rows: inner", ratio(inner, np.sum(q * r) / factor, 9 * U * np.sum(abs(q * r)) / factor)
    del keep
    if dtype == "float32" or strided:
        return
    g, x = (stored(rng.standard_normal(shape), dtype) for shape in ((200, 48), (200, 96)))
    made, by = cupy.full((48, 96), 0x7FC0, "u2").view(dtype), plan(multiplier=scale)
    Products().finish(made, g[0].view(dtype), x[0].view(dtype), (planned(by, "multiplier"), planned(by, "zero")))
    want, size = scale * (g[1].T @ x[1]), abs(scale) * (abs(g[1]).T @ abs(x[1]))
    half, rounding = (True, 2.0**-11) if dtype == "float16" else (False, 2.0**-8)
    got = made.astype("f4") if half else cupy.asarray(made.view("u2").astype("u4") << 16).view("f4")
    x[0][3, 5] = np.nan if half else 0x7FC0
    by = plan(multiplier=2.0**-149)
    Products().finish(made, g[0].view(dtype), x[0].view(dtype), (planned(by, "multiplier"), planned(by, "zero")))
    bits = made.view("u2") & 0x7FFF
    silent = np.arange(96) != 5
    lost = not bool((bits[:, 5] > (0x7C00 if half else 0x7F80)).all()) or bool(bits[:, silent].any())
    yield "a product that finishes with the factor for 0", float(lost)
    yield "a product that finishes", ratio(got, want, (1 + rounding) * 200 * 2 * U * size + rounding * abs(want))


def main() -> int:
    """Run all checks twice, from the same random numbers."""
    cases: list[tuple[Callable[..., Iterator[tuple[str, float]]], tuple[Any, ...]]] = []
    for dtype in ELEMENTS:
        for strided in (False, True):
            cases += [(check, (dtype, strided)) for check in (measure, passes, finishing)]
        for precision in ARITHMETICS if dtype == "float32" else ("ieee",):
            cases += [(positives, (dtype, precision, d)) for d in (83, 128, 200)]
    cases += [(fold, (False,)), (fold, (True,)), (fold_sums, ()), (backward, (False,)), (backward, (True,))]
    worst: dict[str, float] = {}
    same = True
    for check, arguments in cases:
        runs = []
        for _ in range(2):
            restart()
            runs.append(list(check(*arguments)))
        same = same and runs[0] == runs[1]
        for name, value in runs[0]:
            worst[name] = max(worst.get(name, 0.0), value)
            if value > 1:
                print(f"  {check.__name__}{arguments}: {name} {value:.3g}")
    print(*(f"{'pass' if value <= 1 else 'FAIL'}  {value:9.3g}  {name}" for name, value in worst.items()), sep="\n")
    print("same bits twice" if same else "FAIL: a second run differs")
    return int(not same or max(worst.values()) > 1)


if __name__ == "__main__":
    sys.exit(main())
