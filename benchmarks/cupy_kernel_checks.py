"""The Hopper tile kernels of the cupy backend on ragged chunks, with every mask, against float64."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import numpy as np

from contrastile.backends.cupy import build
from contrastile.backends.cupy.arguments import struct
from contrastile.backends.cupy.configs import HOPPER
from contrastile.backends.cupy.instances import DROP, EXCLUSIONS, PLAIN, TARGET, tile_kernel
from contrastile.backends.cupy.launch import launch, multiprocessors, pointer
from contrastile.backends.cupy.tensor_maps import _encoded

LOG2E = 1.4426950408889634
NAMES = {PLAIN: "plain", EXCLUSIONS: "exclusions", DROP: "drop", TARGET: "target"}
BM, BN = HOPPER.bm, HOPPER.bn
PAST = 64  # columns of G past the chunk that must stay as they are, behind what fills its last 16 bytes
POISON = 0x7FC1

# float32 sums of exponentials of dots that tensor cores truncate; G is rounded to 8 bits (bfloat16) or 11
SUM_ERROR, LOG_ERROR, DOT_ERROR = 3e-4, 4e-4, 3e-4
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}

_to_bfloat16 = cupy.ElementwiseKernel(
    "float32 x", "uint16 y", "unsigned u = __float_as_uint(x); y = (u + 0x7fff + (u >> 16 & 1)) >> 16", "to_bfloat16"
)
_widen = cupy.ElementwiseKernel("uint16 x", "float32 y", "y = __uint_as_float((unsigned)x << 16)", "widen")


def bits(x: Any, dtype: str) -> Any:
    """Float32 rounded to the dtype, as 16-bit integers."""
    return _to_bfloat16(x) if dtype == "bfloat16" else x.astype(cupy.float16).view(cupy.uint16)


def values(x: Any, dtype: str) -> Any:
    """What 16-bit integers stand for, float64."""
    return (_widen(x) if dtype == "bfloat16" else x.view(cupy.float16)).astype(cupy.float64)


def tensor_map(x: Any, height: int, width: int, box: tuple[int, int], dtype: str) -> bytes:
    """The map of the first rows and columns of a 16-bit matrix."""
    return _encoded(int(x.data.ptr), height, width, x.strides[0] // 2, dtype, box)


def features(rows: int, depth: int, dtype: str, seed: int, near: Any = None) -> Any:
    """Unit rows, pulled towards ``near`` where it is given; row stride a multiple of 16 bytes."""
    x = cupy.random.RandomState(seed).standard_normal((rows, depth), dtype=cupy.float32)
    if near is not None:
        x += near.astype(cupy.float32) * np.float32(0.12 * depth**0.5)
    x /= cupy.linalg.norm(x, axis=1, keepdims=True)
    out = cupy.zeros((rows, -(-depth // 8) * 8), cupy.uint16)[:, :depth]
    out[...] = bits(x, dtype)
    return out


class Problem:
    """A block, a chunk of it, and what float64 says of the chunk."""

    def __init__(
        self,
        m: int,
        n: int,
        depth: int,
        chunk: tuple[int, int, int, int],
        mask: int,
        dtype: str,
        scale: float = 100.0,
        band: int = 16,
    ) -> None:
        self.m, self.n, self.depth, self.chunk, self.mask, self.dtype, self.band = m, n, depth, chunk, mask, dtype, band
        rng = cupy.random.RandomState(7)
        self.x = features(m, depth, dtype, m)
        self.y = features(n, depth, dtype, n + 1, values(self.x, dtype)[cupy.arange(n) % m])
        self.alpha = np.float32(scale * LOG2E)
        self.reference = np.float32(max(0.0, 1.01 * abs(float(self.alpha)) - 100.0))
        index = cupy.arange(m)
        self.positives: Any = None if mask == TARGET else cupy.where(index % 5 == 0, (index * 37) % (n + 3) - 1, index)
        self.excluded: Any = None if mask == PLAIN else cupy.where(index % 7 < 3, (index * 11) % (n + 2) - 1, index)
        self.ids: list[Any] = [rng.randint(0, 9, size) for size in (m, n)] if mask >= DROP else [None, None]
        self.plan = cupy.zeros(8, cupy.float32)
        self.set_plan()

    def set_plan(self, fast: int = 1, status: int = 0, factor: float = 1.0, bias: float = 0.0) -> None:
        """Write the plan."""
        words = np.array([self.alpha, self.reference, 0.0, factor, bias, 0, 0, 0], np.float32)
        words.view(np.int32)[5:7] = fast, status
        self.plan.set(words)

    def common(self) -> dict[str, Any]:
        """Features, chunk, pairs and plan of any argument structure."""
        row, column, height, width = self.chunk
        whole = struct("Features")(
            pointer(self.x), pointer(self.y), self.x.strides[0] // 2, self.y.strides[0] // 2, self.depth, self.band
        )
        pairs = struct("PairVectors")(*(pointer(x) for x in (self.positives, self.excluded, *self.ids)))
        return {
            "features": whole,
            "chunk": struct("Chunk")(row, column, height, width),
            "pairs": pairs,
            "plan": pointer(self.plan),
        }

    def maps(self) -> list[bytes]:
        """Tensor maps of the features."""
        return [
            tensor_map(self.x, self.m, self.depth, (BM, 64), self.dtype),
            tensor_map(self.y, self.n, self.depth, (BN // 2, 64), self.dtype),
        ]

    def launcher(self, name: str, arguments: Any, maps: list[bytes], safe: bool | None = None) -> Callable[[], None]:
        """One launch of a kernel."""
        kernel = tile_kernel(name, HOPPER, self.dtype, self.mask, safe=safe)
        if "TensorMap g," not in (build.SOURCES / kernel.file).read_text(encoding="utf-8"):
            maps = maps[:2]  # of kernels to compare with, some write G by themselves
        blocks = HOPPER.blocks(self.chunk[2], self.chunk[3], multiprocessors(cupy.cuda.get_device_id()))
        shared = f"{name}_sm90_shared"
        return lambda: launch(kernel, blocks, HOPPER.threads, *maps, arguments, shared=shared)

    def truth(self) -> tuple[Any, Any, Any]:
        """Dots (float64), positive pairs and admitted pairs of the chunk."""
        row, column, height, width = self.chunk
        x = values(self.x[row : row + height], self.dtype)
        y = values(self.y[column : column + width], self.dtype)
        i, j = cupy.arange(row, row + height), cupy.arange(column, column + width)
        none = cupy.zeros((height, width), bool)
        excluded = none if self.excluded is None else self.excluded[i][:, None] == j[None]
        equal = none if self.ids[0] is None else self.ids[0][i][:, None] == self.ids[1][j][None]
        positive = (equal if self.mask == TARGET else self.positives[i][:, None] == j[None]) & ~excluded
        hidden = excluded | equal if self.mask == DROP else excluded
        return x @ y.T, positive, positive | ~hidden


def log_sum(x: Any, axis: int) -> Any:
    """log2 sum 2^x, float64."""
    top = x.max(axis, keepdims=True)
    top = cupy.where(cupy.isfinite(top), top, 0.0)
    return cupy.log2(cupy.exp2(x - top).sum(axis)) + top.squeeze(axis)


class Report:
    """Collects verdicts."""

    def __init__(self, loud: bool) -> None:
        self.loud, self.failed, self.count = loud, 0, 0

    def add(self, what: str, error: float, bound: float, same: bool) -> None:
        """One check; NaN fails."""
        good = error <= bound and same
        self.failed += not good
        self.count += 1
        if self.loud or not good:
            print(
                f"{'ok ' if good else 'BAD'} {what}: {error:.2e} of {bound:.2e}{'' if same else ' NOT THE SAME BITS'}"
            )
            sys.stdout.flush()


def worst(x: Any) -> float:
    """The largest of |x|, NaN if there is one."""
    return float(cupy.abs(x).max()) if x.size else 0.0


def repeated(run: Callable[[], None], outs: list[Any]) -> bool:
    """Run it three times over poisoned outputs; whether the bits are the same."""
    kept = None
    for _ in range(3):
        for out in outs:
            out.view(cupy.uint16 if out.itemsize == 2 else cupy.uint32).fill(
                POISON if out.itemsize == 2 else 0x7FC00001
            )
        run()
        cupy.cuda.Device().synchronize()
        now = [out.copy().view(cupy.uint16) for out in outs]
        if kept is not None and not all(bool((a == b).all()) for a, b in zip(kept, now, strict=True)):
            return False
        kept = now
    return True


def check_forward(p: Problem, report: Report, name: str) -> None:
    """Fast and safe statistics, and positives by ids."""
    height, width = p.chunk[2:]
    tiles = -(-width // BN), -(-height // BM)
    dots, positive, admitted = p.truth()
    x = cupy.where(admitted, float(p.alpha) * dots, -cupy.inf)
    for safe in (False, True):
        p.set_plan(status=int(safe))
        rows, columns = (cupy.empty((t, s), cupy.float32) for t, s in zip(tiles, (height, width), strict=True))
        extra: list[Any] = (
            [cupy.empty_like(z) for z in (rows, rows, columns, columns)] if p.mask == TARGET else [None] * 4
        )
        partials = struct("Partials")
        arguments = struct("ForwardArguments")(
            **p.common(),
            rows=partials(pointer(rows), pointer(extra[0]), pointer(extra[1]), height),
            columns=partials(pointer(columns), pointer(extra[2]), pointer(extra[3]), width),
        )
        run = p.launcher("forward", arguments, p.maps(), safe)
        same = repeated(run, [z for z in (rows, columns, *extra) if z is not None])
        for side, parts, axis in (("rows", rows, 1), ("columns", columns, 0)):
            true = log_sum(x, axis)
            if safe:
                found = log_sum(parts.astype(cupy.float64), 0)
            else:
                found = cupy.log2(parts.astype(cupy.float64).sum(0)) + float(p.reference)
            error = worst(cupy.where(true == found, 0.0, found - true))
            report.add(f"{name} forward {'safe' if safe else 'fast'} {side}", error, LOG_ERROR, same)
        if p.mask == TARGET:
            for parts, axis, what in ((extra[0], 1, dots), (extra[1], 1, 1.0), (extra[2], 0, dots), (extra[3], 0, 1.0)):
                error = worst(parts.astype(cupy.float64).sum(0) - cupy.where(positive, what, 0.0).sum(axis))
                report.add(f"{name} forward positives", error, DOT_ERROR, same)


def check_gradient(p: Problem, report: Report, name: str) -> None:
    """G by the three exponents."""
    row, column, height, width = p.chunk
    dots, positive, admitted = p.truth()
    x = float(p.alpha) * dots
    rng = cupy.random.RandomState(3)
    sides = []
    # log-sum-exps of the chunk's own pairs, so that probabilities are probabilities
    for size, start, axis in ((p.m, row, 1), (p.n, column, 0)):
        log = cupy.zeros(size, cupy.float32)
        own = log_sum(cupy.where(admitted, x, -cupy.inf), axis).astype(cupy.float32)
        log[start : start + own.size] = cupy.where(cupy.isfinite(own), own, cupy.inf)
        weight = (rng.rand(size) + 0.5).astype(cupy.float32)
        weight[cupy.isinf(log)] = 0
        folded = cupy.where(weight == 0, 0, weight * cupy.exp2(p.reference - log)).astype(cupy.float32)
        sides.append((log, weight, folded, rng.rand(size).astype(cupy.float32)))
    space = cupy.empty((height, -(-width // 8) * 8 + PAST), cupy.uint16)
    for exponent in ("shared", "rows", "both"):
        p.set_plan(fast=int(exponent == "shared"))
        side = struct("GradientSide")
        column_side = side() if exponent == "rows" else side(*map(pointer, sides[1]))
        arguments = struct("GradientArguments")(
            **p.common(), row=side(*map(pointer, sides[0])), column=column_side, g=pointer(space),
            g_stride=space.shape[1],
        )  # fmt: skip
        run = p.launcher("gradient", arguments, [*p.maps(), tensor_map(space, height, width, (16, 64), p.dtype)])
        same = repeated(run, [space])
        true = cupy.zeros_like(x)
        size = cupy.zeros_like(x)
        for (log, weight, _, target), start, length, axis in zip(
            sides, (row, column), (height, width), (1, 0), strict=True
        ):
            if axis == 0 and exponent == "rows":
                continue
            log, weight, target = (
                cupy.expand_dims(z[start : start + length].astype(cupy.float64), axis) for z in (log, weight, target)
            )
            p_ = cupy.where(admitted, cupy.exp2(cupy.where(cupy.isinf(log), -cupy.inf, x - log)), 0.0)
            true += weight * (p_ - cupy.where(positive, target, 0.0))
            size += weight * (p_ + cupy.where(positive, target, 0.0))
        error = values(space[:, :width], p.dtype) - true
        bound = ROUNDING[p.dtype] * cupy.abs(true) + SUM_ERROR * size + 2.0**-24
        report.add(f"{name} gradient {exponent}", worst(error / bound), 1.0, same)
        report.add(f"{name} gradient {exponent} past", float((space[:, -PAST:] != POISON).sum()), 0.0, True)


def check_sigmoid(p: Problem, report: Report, name: str) -> None:
    """Losses, slopes and G; then losses without G."""
    row, _, height, width = p.chunk
    bias, scale, factor = -3.0, float(p.alpha) / LOG2E, 0.25
    p.set_plan(factor=factor, bias=bias)
    dots, positive, admitted = p.truth()
    x = cupy.where(positive, -1.0, 1.0) * (scale * dots + bias)
    loss = cupy.where(admitted, cupy.logaddexp(0.0, x), 0.0)
    slope = cupy.where(admitted, cupy.where(positive, -1.0, 1.0) / (1.0 + cupy.exp(-x)), 0.0)
    weight = (cupy.random.RandomState(5).rand(p.m) + 0.5).astype(cupy.float32)
    weight[row + height // 2] = 0
    space = cupy.empty((height, -(-width // 8) * 8 + PAST), cupy.uint16)
    parts = [cupy.empty((-(-width // BN), height), cupy.float32) for _ in range(2)]
    maps = [*p.maps(), tensor_map(space, height, width, (16, 64), p.dtype)]
    for wanted in (True, False):
        arguments = struct("SigmoidArguments")(
            **p.common(), row_weight=pointer(weight), loss_parts=pointer(parts[0]), slope_parts=pointer(parts[1]),
            part_stride=height, g=pointer(space) if wanted else None, g_stride=space.shape[1],
        )  # fmt: skip
        same = repeated(p.launcher("sigmoid", arguments, maps), [space, *parts])
        for what, found, true in (("loss", parts[0], loss), ("slope", parts[1], slope)):
            error = cupy.abs(found.astype(cupy.float64).sum(0) - true.sum(1))
            report.add(f"{name} sigmoid {what}", worst(error / (cupy.abs(true).sum(1) + 1e-30)), SUM_ERROR, same)
        past = space[:, -PAST:] if wanted else space
        report.add(f"{name} sigmoid past", float((past != POISON).sum()), 0.0, True)
        if wanted:
            true = factor * weight[row : row + height, None].astype(cupy.float64) * slope
            error = values(space[:, :width], p.dtype) - true
            bound = (ROUNDING[p.dtype] + SUM_ERROR) * cupy.abs(true) + 2.0**-24
            report.add(f"{name} sigmoid G", worst(error / bound), 1.0, same)


def problems(small: bool) -> Iterator[tuple[str, Problem]]:
    """Ragged chunks: one tile, many, fewer steps than stages, odd offsets, unequal sides."""
    shapes = [(200, 390, 72, (0, 0, 200, 390), 2), (300, 500, 200, (130, 77, 170, 321), 1)]
    if not small:
        shapes += [
            (256, 192, 512, (0, 0, 256, 192), 2),
            (1, 1, 8, (0, 0, 1, 1), 16),
            (2560, 4096, 512, (0, 0, 2560, 4096), 3),
            (4353, 5001, 768, (0, 0, 4353, 5001), 16),
            (5000, 9000, 320, (1001, 2003, 3000, 6001), 4),
            (1024, 2048, 1000, (0, 0, 1024, 2048), 16),
        ]
    for m, n, depth, chunk, band in shapes:
        for dtype in ("bfloat16", "float16"):
            for mask in NAMES:
                name = f"{m} x {n} x {depth} {chunk} {dtype} {NAMES[mask]}"
                yield name, Problem(m, n, depth, chunk, mask, dtype, 14.3 if depth == 320 else 100.0, band)


def verify(small: bool, loud: bool) -> int:
    """All checks; gives how many failed."""
    report = Report(loud)
    for name, problem in problems(small):
        check_forward(problem, report, name)
        check_gradient(problem, report, name)
        check_sigmoid(problem, report, name)
    print(f"{report.count} checks, {report.failed} failed", flush=True)
    return report.failed
