"""The Hopper tile kernels of the cupy backend by themselves, on ragged chunks with every mask, against float64.

``compute-sanitizer python -m pytest tests/gpu/test_cupy_tiles.py -k small`` takes the smallest shapes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a GPU of compute capability 9.0", allow_module_level=True)

from contrastile.backends.cupy import build  # noqa: E402
from contrastile.backends.cupy.arguments import struct  # noqa: E402
from contrastile.backends.cupy.configs import HOPPER, NARROW_SIDE, Shares  # noqa: E402
from contrastile.backends.cupy.instances import (  # noqa: E402
    DROP,
    EXCLUSIONS,
    PLAIN,
    TARGET,
    instance,
    narrow_kernel,
    tile_kernel,
)
from contrastile.backends.cupy.launch import launch, multiprocessors, pointer  # noqa: E402
from contrastile.backends.cupy.tensor_maps import _encoded  # noqa: E402

LOG2E = 1.4426950408889634
NAMES = {PLAIN: "plain", EXCLUSIONS: "exclusions", DROP: "drop", TARGET: "target"}
BM, BN = HOPPER.bm, HOPPER.bn
PAST = 64  # columns of G past the chunk that must stay as they are, behind what fills its last 16 bytes
POISON = 0x7FC1

# places among the fields of Partials; a reference follows its sums
REFERENCES, POSITIVE_SUMS = 1, 5

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
        off_diagonal: bool = True,
    ) -> None:
        self.m, self.n, self.depth, self.chunk, self.mask, self.dtype, self.band = m, n, depth, chunk, mask, dtype, band
        rng = cupy.random.RandomState(7)
        self.x = features(m, depth, dtype, m)
        self.y = features(n, depth, dtype, n + 1, values(self.x, dtype)[cupy.arange(n) % m])
        self.alpha = np.float32(scale * LOG2E)
        self.reference = np.float32(max(0.0, 1.01 * abs(float(self.alpha)) - 100.0))
        index = cupy.arange(m)
        other = (index * 37) % (n + 3) - 1 if off_diagonal else -1
        self.positives: Any = None if mask == TARGET else cupy.where(index % 5 == 0, other, index)
        self.excluded: Any = None if mask == PLAIN else cupy.where(index % 7 < 3, (index * 11) % (n + 2) - 1, index)
        self.ids: list[Any] = [rng.randint(0, 9, size) for size in (m, n)] if mask >= DROP else [None, None]
        self.off_diagonal = off_diagonal and mask != TARGET
        self.found: list[Any] = []  # of TARGET, sums of dots and counts of rows and of columns
        self.plan = cupy.empty(ctypes.sizeof(struct("Plan")), cupy.uint8)
        self.set_plan()

    def set_plan(self, **given: float) -> None:
        """Write the plan."""
        scales = {"alpha": float(self.alpha), "reference": float(self.reference), "gradient_scale": 1.0}
        plan = struct("Plan")(**(scales | {"fast": 1, "off_diagonal": int(self.off_diagonal)} | given))
        self.plan.set(np.frombuffer(bytes(plan), np.uint8))

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


def held(what: str, error: float, bound: float, same: bool) -> None:
    """One check; NaN fails."""
    assert error <= bound, f"{what}: {error:.2e} of {bound:.2e}"
    assert same, f"{what}: not the same bits"


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


def dots_and_counts(parts: Any) -> list[Any]:
    """Of each row or column, from all tiles' partials: the sum of its positives' dots, and how many there are."""
    _, _, dots, low, counts, *_ = parts.astype(cupy.float64).sum(1)
    return [dots + low, counts]


def check_forward(p: Problem, name: str) -> None:
    """Fast and safe statistics of negatives, and of positives by ids."""
    height, width = p.chunk[2:]
    tiles = -(-width // BN), -(-height // BM)
    dots, positive, admitted = p.truth()
    x = float(p.alpha) * dots
    negatives, positives = (cupy.where(those, x, -cupy.inf) for those in (admitted & ~positive, positive))
    for safe in (False, True):
        p.set_plan(status=int(safe))
        count = 7 if p.mask == TARGET else 2
        rows, columns = (cupy.zeros((count, t, s), cupy.float32) for t, s in zip(tiles, (height, width), strict=True))
        sides = (
            struct("Partials")(*(pointer(z[i]) if i < count else None for i in range(7)), stride=z.shape[2])
            for z in (rows, columns)
        )
        arguments = struct("ForwardArguments")(**p.common(), **dict(zip(("rows", "columns"), sides, strict=True)))
        run = p.launcher("forward", arguments, p.maps(), safe)
        written = [i for i in range(count) if safe or i not in (REFERENCES, POSITIVE_SUMS + 1)]
        same = repeated(run, [z[i] for z in (rows, columns) for i in written])
        for side, parts, axis in (("rows", rows, 1), ("columns", columns, 0)):
            path = f"{name} forward {'safe' if safe else 'fast'} {side}"
            for what, true, at in (("negatives", negatives, 0), ("positives", positives, POSITIVE_SUMS)):
                if at >= count:
                    continue
                sums, reference = parts[at].astype(cupy.float64), parts[at + 1].astype(cupy.float64)
                found = log_sum(cupy.log2(sums) + (reference if safe else float(p.reference)), 0)
                expected = log_sum(true, axis)
                error = worst(cupy.where(expected == found, 0.0, found - expected))
                held(f"{path} {what}", error, LOG_ERROR, same)
            if p.mask == TARGET:
                for what, found, value in zip(("dots", "counts"), dots_and_counts(parts), (dots, 1.0), strict=True):
                    error = worst(found - cupy.where(positive, value, 0.0).sum(axis))
                    held(f"{path} {what} of positives", error, DOT_ERROR if what == "dots" else 0.0, same)
        if p.mask == TARGET:
            p.found = [dots_and_counts(parts) for parts in (rows, columns)]


class GradientSide:
    """One side's vectors as epilogue_scales writes them for the chunk's pairs, and in float64."""

    def __init__(self, p: Problem, axis: int, x: Any, positive: Any, admitted: Any, random: Any) -> None:
        start, size = (p.chunk[0], p.m) if axis == 1 else (p.chunk[1], p.n)
        negatives, positives = (
            log_sum(cupy.where(those, x, -cupy.inf), axis) for those in (admitted & ~positive, positive)
        )
        count = positive.sum(axis)
        if p.mask == TARGET:
            # of one positive its logit is P, of the very dot that the kernels find
            dots, counts = p.found[1 - axis]
            positives = cupy.where(counts == 1, dots * float(p.alpha), positives)
        here = slice(start, start + count.size)
        log = log_sum(cupy.stack([negatives, positives]), 0)
        self.high = cupy.full(size, cupy.inf, cupy.float32)
        self.high[here] = cupy.where(cupy.isfinite(log), log, cupy.inf)
        low = cupy.where(cupy.isfinite(log), log - self.high[here], 0.0)
        w = random.rand(size) + 0.5
        w[here][~cupy.isfinite(log)] = 0
        w = w.astype(cupy.float32)
        target = random.rand(size)
        target[here] = cupy.where(count > 0, 1.0 / cupy.maximum(count, 1), target[here])
        self.weight, self.folded = w.copy(), cupy.zeros(size, cupy.float32)
        self.weight[here] = w[here] * cupy.exp2(-low)
        counted = cupy.where(cupy.isfinite(log), log, 0.0)
        self.folded[here] = cupy.where(w[here] == 0, 0, w[here] * cupy.exp2(float(p.reference) - counted))
        self.taken = (w * target).astype(cupy.float32)
        gap = cupy.where(cupy.isfinite(positives), negatives - positives, 0.0)
        share = 1.0 / (1.0 + cupy.exp2(-gap))
        near = cupy.where(cupy.isfinite(positives), positives, 0.0)
        self.certain = cupy.zeros((size, 4), cupy.float32)
        self.certain[here, 0] = near
        self.certain[here, 1] = near - self.certain[here, 0]
        self.certain[here, 2] = w[here]
        self.certain[here, 3] = w[here] * share
        w64, target = (cupy.expand_dims(z[here].astype(cupy.float64), axis) for z in (w, target))
        chance = cupy.where(admitted & (w64 != 0), cupy.exp2(x - cupy.expand_dims(counted, axis)), 0.0)
        q = cupy.exp2(x - cupy.expand_dims(near, axis))
        lone = cupy.expand_dims(count == 1, axis)
        self.ordinary = w64 * (chance - cupy.where(positive, target, 0.0))
        exact = w64 * cupy.where(lone, 0.0, q - target) - w64 * cupy.where(lone, 1.0, q) * cupy.expand_dims(share, axis)
        self.exact = cupy.where(positive, exact, w64 * chance)
        self.size = w64 * (chance + cupy.where(positive, target, 0.0))
        # of the only positive of a row all that is left is exact
        self.exact_size = cupy.where(positive & lone, cupy.abs(self.exact), self.size)

    def argument(self) -> Any:
        """As the kernel takes it."""
        return struct("GradientSide")(*map(pointer, (self.high, self.weight, self.folded, self.taken, self.certain)))


def exponents(p: Problem) -> Iterator[tuple[str, dict[str, Any], Any, Any, Any]]:
    """Each exponent, and with it of certain positives by ids: arguments; G, what its error is a share of, positives."""
    row, _, height, _ = p.chunk
    dots, positive, admitted = p.truth()
    x = float(p.alpha) * dots
    random = cupy.random.RandomState(3)
    sides = [GradientSide(p, axis, x, positive, admitted, random) for axis in (1, 0)]
    # what is put in place of G of a positive by index is any number
    entries = random.standard_normal(p.m).astype(cupy.float32)
    for exponent in ("shared", "rows", "both", *(("certain rows", "certain both") if p.mask == TARGET else ())):
        certain, both = exponent.startswith("certain"), not exponent.endswith("rows")
        p.set_plan(fast=int(exponent == "shared"), certain=int(certain))
        none = struct("GradientSide")()
        arguments = {
            **p.common(), "row": sides[0].argument(), "column": sides[1].argument() if both else none,
            "entries": None if p.mask == TARGET else pointer(entries),
        }  # fmt: skip
        seen = sides[: 1 + both]
        true = sum(side.exact if certain else side.ordinary for side in seen)
        size = sum(side.exact_size if certain else side.size for side in seen)
        if p.mask != TARGET:
            entry = entries[row : row + height, None].astype(cupy.float64)
            true, size = cupy.where(positive, entry, true), cupy.where(positive, 0.0, size)
        yield exponent, arguments, true, size, positive


def check_gradient(p: Problem, name: str) -> None:
    """G by the three exponents, and of certain positives by ids."""
    _, _, height, width = p.chunk
    space = cupy.empty((height, -(-width // 8) * 8 + PAST), cupy.uint16)
    for exponent, given, true, size, positive in exponents(p):
        arguments = struct("GradientArguments")(**given, g=pointer(space), g_stride=space.shape[1])
        run = p.launcher("gradient", arguments, [*p.maps(), tensor_map(space, height, width, (16, 64), p.dtype)])
        same = repeated(run, [space])
        error = values(space[:, :width], p.dtype) - true
        bound = ROUNDING[p.dtype] * cupy.abs(true) + SUM_ERROR * size + 2.0**-24
        for what, those in (("positives", positive), ("others", ~positive)):
            held(f"{name} gradient {exponent} {what}", worst((error / bound)[those]), 1.0, same)
        held(f"{name} gradient {exponent} past", float((space[:, -PAST:] != POISON).sum()), 0.0, True)


def check_sigmoid(p: Problem, name: str) -> None:
    """Losses, slopes and G; then losses without G."""
    row, _, height, width = p.chunk
    bias, scale, factor = -3.0, float(p.alpha) / LOG2E, 0.25
    p.set_plan(gradient_scale=factor, bias=bias)
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
            held(f"{name} sigmoid {what}", worst(error / (cupy.abs(true).sum(1) + 1e-30)), SUM_ERROR, same)
        past = space[:, -PAST:] if wanted else space
        held(f"{name} sigmoid past", float((past != POISON).sum()), 0.0, True)
        if wanted:
            true = factor * weight[row : row + height, None].astype(cupy.float64) * slope
            error = values(space[:, :width], p.dtype) - true
            bound = (ROUNDING[p.dtype] + SUM_ERROR) * cupy.abs(true) + 2.0**-24
            held(f"{name} sigmoid G", worst(error / bound), 1.0, same)


def narrow_launcher(p: Problem, name: str, arguments: Any) -> Callable[[], None]:
    """One launch of a kernel of narrow features."""
    box = NARROW_SIDE, 64
    maps = tensor_map(p.x, p.m, p.depth, box, p.dtype), tensor_map(p.y, p.n, p.depth, box, p.dtype)
    kernel, shared = narrow_kernel(name, HOPPER, p.dtype, p.mask), f"narrow_{name}_sm90_shared"
    return lambda: launch(kernel, arguments.blocks, HOPPER.threads, *maps, arguments, shared=shared)


def check_narrow_forward(p: Problem, name: str, shares: Shares) -> None:
    """Statistics of the rows over all columns, on the fast path."""
    height = p.chunk[2]
    dots, positive, admitted = p.truth()
    x = float(p.alpha) * dots
    p.set_plan()
    parts = cupy.zeros((7, shares.most, height), cupy.float32)
    rows = struct("Partials")(*map(pointer, parts), stride=height)
    forward = struct("ForwardArguments")(**p.common(), rows=rows)
    arguments = struct("NarrowForwardArguments")(forward=forward, blocks=shares.blocks, parts=shares.most)
    run = narrow_launcher(p, "forward", arguments)
    same = repeated(run, [parts[i] for i in ((0, *range(2, POSITIVE_SUMS + 1)) if p.mask == TARGET else (0,))])
    wide = parts.astype(cupy.float64).sum(1)
    kinds = (("negatives", admitted & ~positive, 0), ("positives", positive, POSITIVE_SUMS))
    for what, those, at in kinds[: 2 if p.mask == TARGET else 1]:
        expected = log_sum(cupy.where(those, x, -cupy.inf), 1)
        found = cupy.log2(wide[at]) + float(p.reference)
        error = worst(cupy.where(expected == found, 0.0, found - expected))
        held(f"{name} narrow forward {what}", error, LOG_ERROR, same)
    if p.mask == TARGET:
        for what, found, value in zip(("dots", "counts"), dots_and_counts(parts), (dots, 1.0), strict=True):
            error = worst(found - cupy.where(positive, value, 0.0).sum(1))
            held(f"{name} narrow forward {what}", error, DOT_ERROR if what == "dots" else 0.0, same)
        p.found = [dots_and_counts(parts), *p.found[1:]]


def check_narrow_gradient(p: Problem, name: str, shares: Shares) -> None:
    """The rows' gradient over all columns, written and added to."""
    height = p.chunk[2]
    columns = values(p.y, p.dtype)
    parts = cupy.empty((2 * shares.blocks, NARROW_SIDE, NARROW_SIDE), cupy.float32)
    out = cupy.empty((height, p.depth + 3), cupy.float32)
    for exponent, given, true, size, _ in exponents(p):
        gradient = struct("GradientArguments")(**given)
        for fresh in (1, 0):
            arguments = struct("NarrowGradientArguments")(
                gradient=gradient, out=pointer(out), out_stride=out.shape[1], parts=pointer(parts),
                blocks=shares.blocks, fresh=fresh,
            )  # fmt: skip
            run, join = narrow_launcher(p, "gradient", arguments), instance("narrow_gradient_sm90", "narrow_join")

            def both(run: Any = run, join: Any = join, arguments: Any = arguments) -> None:
                if not arguments.fresh:
                    out[:, : p.depth] = 0.5
                run()
                launch(join, 8 * shares.rows, 256, arguments)

            same = repeated(both, [out, parts])
            error = cupy.abs(out[:, : p.depth].astype(cupy.float64) - true @ columns - (0.0 if fresh else 0.5))
            bound = (ROUNDING[p.dtype] * cupy.abs(true) + SUM_ERROR * size + 2.0**-24) @ cupy.abs(columns)
            held(f"{name} narrow gradient {exponent}", worst(error / (bound + 2.0**-23)), 1.0, same)
            past = out[:, p.depth :].view(cupy.uint32)
            held(f"{name} narrow gradient {exponent} past", float((past != 0x7FC00001).sum()), 0.0, True)


SMALL = [(200, 390, 72, (0, 0, 200, 390), 2), (300, 500, 200, (130, 77, 170, 321), 1)]
SHAPES = [
    *SMALL,
    (256, 192, 512, (0, 0, 256, 192), 2),
    (1, 1, 8, (0, 0, 1, 1), 16),
    (2560, 4096, 512, (0, 0, 2560, 4096), 3),
    (4353, 5001, 768, (0, 0, 4353, 5001), 16),
    (5000, 9000, 320, (1001, 2003, 3000, 6001), 4),
    (1024, 2048, 1000, (0, 0, 1024, 2048), 16),
]
"""Rows, columns, width, chunk, band: one tile, many, fewer steps than stages, odd offsets, unequal sides."""


@pytest.mark.parametrize("mask", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: f"{'small-' * (x in SMALL)}{x[0]}x{x[1]}x{x[2]}")
def test_tile_kernels_are_within_their_bounds_and_repeat(shape: Any, dtype: str, mask: int) -> None:
    m, n, depth, chunk, band = shape
    for off_diagonal in (True, False)[: 1 if mask == TARGET else 2]:
        problem = Problem(m, n, depth, chunk, mask, dtype, 14.3 if depth == 320 else 100.0, band, off_diagonal)
        for check in (check_forward, check_gradient, check_sigmoid):
            check(problem, f"{'off-diagonal' if off_diagonal else 'diagonal'} positives,")


NARROW = [
    ("small-200x390x72", (200, 390, 72, (0, 0, 200, 390))),
    ("small-300x500x128", (300, 500, 128, (130, 0, 170, 500))),
    ("1x129x100", (1, 129, 100, (0, 0, 1, 129))),
    ("128x128x128", (128, 128, 128, (0, 0, 128, 128))),
    ("4353x5001x96", (4353, 5001, 96, (0, 0, 4353, 5001))),
    ("20000x700x128", (20000, 700, 128, (0, 0, 20000, 700))),
    ("130x30000x128", (130, 30000, 128, (0, 0, 130, 30000))),
]
"""Rows, columns, width, chunk: all columns; one tile, several blocks to a tile row, several tile rows to a block."""


@pytest.mark.parametrize("mask", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [x for _, x in NARROW], ids=[x for x, _ in NARROW])
def test_kernels_of_narrow_features_are_within_their_bounds_and_repeat(shape: Any, dtype: str, mask: int) -> None:
    m, n, depth, chunk = shape
    problem = Problem(m, n, depth, chunk, mask, dtype, 30.0)
    shares = Shares.of(chunk[2], chunk[3], multiprocessors(cupy.cuda.get_device_id()))
    if mask == TARGET:
        check_forward(problem, "first")  # P of the columns comes from their own dots
    check_narrow_forward(problem, "all columns,", shares)
    check_narrow_gradient(problem, "all columns,", shares)
