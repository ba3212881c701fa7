"""The streamed backward (``streamed_backward.cu``) against float64 and beside the package's three kernels.

``verify`` compares the gradients of plain symmetric pairs with float64 and with the package's kernels and looks at the
bits of repeated runs; ``measure`` times it, its roles alone, and the package's kernels between samples of cuBLAS
(8192^3, through torch) in one sustained run. ``--watchdog`` compiles waits that trap. Needs a Hopper GPU, CuPy, torch.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from contrastile.backends.cupy import build, cubins  # noqa: E402
from contrastile.backends.cupy.arguments import struct  # noqa: E402

KERNEL = build.Instance(str(HERE / "streamed_backward.cu"), "streamed_backward")
SHARED, THREADS = "streamed_backward_shared", 384
BM, BN, WIDE, LOG2E = 128, 192, 256, 1.4426950408889634
MANY = 2**31 - 1  # a counter that nobody waits for


def compiled(*options: str) -> build.Compiled:
    """The kernel for sm_90a."""
    kept: Any = build.OPTIONS
    try:
        build.OPTIONS = (*kept, f"-I{HERE}", *options)  # type: ignore[assignment]
        return build.compile_instance(KERNEL, "sm_90a")
    finally:
        build.OPTIONS = kept


class Arguments(ctypes.Structure):
    """``StreamedArguments``, field by field."""

    _fields_ = (
        ("plan", ctypes.c_void_p),
        ("row", struct("GradientSide")),
        ("column", struct("GradientSide")),
        *((name, ctypes.c_void_p) for name in ("along", "across", "formed", "used_along", "used_across")),
        *((name, ctypes.c_int) for name in ("bands", "pairs", "tile_columns", "depth", "ring")),
        *((name, ctypes.c_int) for name in ("form_clusters", "along_clusters", "across_clusters")),
    )


class Problem:
    """Features of b plain symmetric pairs, and what the epilogue of G needs."""

    def __init__(self, b: int, depth: int, scale: float = 100.0) -> None:
        import torch

        self.b, self.depth = b, depth
        made = torch.Generator("cuda").manual_seed(b + depth)
        q, near = (torch.randn(b, depth, device="cuda", generator=made) for _ in range(2))
        q /= q.norm(dim=1, keepdim=True)
        k = near / near.norm(dim=1, keepdim=True) + 0.2 * q
        self.q, self.k = q.bfloat16(), (k / k.norm(dim=1, keepdim=True)).bfloat16()
        self.alpha = float(torch.tensor(scale * LOG2E, dtype=torch.float32))
        self.reference = float(torch.tensor(max(0.0, 1.01 * self.alpha - 100.0), dtype=torch.float32))
        sums = [torch.zeros(b, device="cuda", dtype=torch.float64) for _ in range(2)]
        q32, k32 = self.q.float(), self.k.float()
        for at in range(0, b, 2048):
            e = torch.exp2((q32[at : at + 2048] @ k32.T).mul_(self.alpha).sub_(self.reference))
            sums[0][at : at + 2048] = e.sum(1, dtype=torch.float64)
            sums[1] += e.sum(0, dtype=torch.float64)
        self.weight = torch.full((b,), 0.5 / b, device="cuda")
        self.folded = [(0.5 / b / x).float() for x in sums]
        # G of the positives, for the package's kernel: the experiment's takes the weights away in the tile
        own = torch.exp2((q32 * k32).sum(1).double().mul(self.alpha).sub(self.reference))
        self.entries = (own * (self.folded[0].double() + self.folded[1]) - 2 * self.weight).float()
        plan = struct("Plan")(alpha=self.alpha, reference=self.reference, factor=1.0, fast=1)
        self.plan = torch.frombuffer(bytearray(plan), dtype=torch.uint8).cuda()

    def sides(self) -> dict[str, Any]:
        """Fields ``row`` and ``column`` of an argument structure; log is read by no kernel of the fast path."""
        side = struct("GradientSide")
        made = [side(*(x.data_ptr() for x in (f, self.weight, f, self.weight))) for f in self.folded]
        return {"row": made[0], "column": made[1]}

    def truth(self, rows: Any, of_columns: bool) -> Any:
        """float64 gradients of some rows of Q, or of K."""
        import torch

        x, y = (self.k, self.q) if of_columns else (self.q, self.k)
        mine, other = (v.double() for v in (self.folded[::-1] if of_columns else self.folded))
        dots = x[rows].double() @ y.double().T
        g = torch.exp2(dots * self.alpha - self.reference) * (mine[rows, None] + other)
        g[torch.arange(len(rows), device="cuda"), rows] -= 2.0 * self.weight.double()[rows]
        return g @ y.double()


def tensor_map(x: Any, box: tuple[int, int]) -> bytes:
    """The map of a bfloat16 matrix."""
    from contrastile.backends.cupy.tensor_maps import _encoded

    return _encoded(x.data_ptr(), x.shape[0], x.shape[1], x.stride(0), "bfloat16", box)


class Streamed:
    """One configuration of the streamed kernel: bands of 256 ``pairs`` rows, a ring of tile columns, clusters."""

    def __init__(self, p: Problem, kernel: Any, pairs: int, ring: int, form: int, across: int, alone: str = "") -> None:
        import numpy as np
        import torch

        parts = p.depth // WIDE
        if p.b % (2 * BM * pairs) or p.b % 768 or p.depth % WIDE or ring % 4:
            raise ValueError("sizes are not those of the experiment")
        bands, tile_columns = p.b // (2 * BM * pairs), p.b // BN
        if tile_columns < 2 * ring:
            raise ValueError("a band must be longer than two rings")
        clusters = {"form": form, "along": pairs * parts, "across": across}
        if alone:
            clusters = {name: count if name == alone else 0 for name, count in clusters.items()}
        self.outs = [torch.zeros(p.b, p.depth, device="cuda") for _ in range(2)]
        self.g = torch.zeros(2 * BM * pairs, ring * BN, device="cuda", dtype=torch.bfloat16)
        lengths = [bands * tile_columns, bands * tile_columns, bands * (p.b // 256)]
        self.counters = torch.full((sum(lengths),), MANY if alone else 0, device="cuda", dtype=torch.int32)
        self.alone = bool(alone)
        at = [self.counters.data_ptr() + 4 * sum(lengths[:i]) for i in range(3)]
        self.arguments = Arguments(
            p.plan.data_ptr(), **p.sides(), along=self.outs[0].data_ptr(), across=self.outs[1].data_ptr(),
            formed=at[0], used_along=at[1], used_across=at[2], bands=bands, pairs=pairs, tile_columns=tile_columns,
            depth=p.depth, ring=ring, form_clusters=clusters["form"], along_clusters=clusters["along"],
            across_clusters=clusters["across"],
        )  # fmt: skip
        boxes = ((p.q, BM), (p.k, BN // 2), (p.q, 64), (p.k, 64), (self.g, 64), (self.g, 16))
        maps = b"".join(tensor_map(x, (rows, 64)) for x, rows in boxes)
        self.values = tuple(np.frombuffer(x, dtype=f"V{len(x)}")[0] for x in (maps, bytes(self.arguments)))
        self.kernel, self.blocks, self.problem = kernel, 2 * sum(clusters.values()), p

    def __call__(self) -> None:
        """One backward pass, or one role of it."""
        if not self.alone:
            self.counters.zero_()
        self.kernel((self.blocks,), (THREADS,), self.values, shared_mem=self.kernel.max_dynamic_shared_size_bytes)


class Package:
    """The package's way: chunks of G by gradient_sm90, then cuBLAS twice."""

    def __init__(self, p: Problem, chunk: tuple[int, int]) -> None:
        import torch

        from contrastile.backends.cupy.products import Products

        self.p, self.chunk, self.products = p, chunk, Products()
        self.outs = [torch.zeros(p.b, p.depth, device="cuda") for _ in range(2)]
        self.g = torch.empty(chunk, device="cuda", dtype=torch.bfloat16)
        self.positives = torch.arange(p.b, device="cuda")
        self.maps = [tensor_map(p.q, (BM, 64)), tensor_map(p.k, (BN // 2, 64)), tensor_map(self.g, (16, 64))]
        self.views = [_view(x) for x in (self.g, p.q, p.k, *self.outs)]

    def form(self, row: int = 0, column: int = 0) -> None:
        """G of a chunk."""
        from contrastile.backends.cupy.configs import HOPPER
        from contrastile.backends.cupy.instances import PLAIN, tile_kernel
        from contrastile.backends.cupy.launch import launch, multiprocessors

        p, (height, width) = self.p, self.chunk
        arguments = struct("GradientArguments")(
            features=struct("Features")(p.q.data_ptr(), p.k.data_ptr(), p.depth, p.depth, p.depth, HOPPER.band),
            chunk=struct("Chunk")(row, column, height, width),
            pairs=struct("PairVectors")(self.positives.data_ptr(), None, None, None),
            plan=p.plan.data_ptr(), **p.sides(), entries=p.entries.data_ptr(), g=self.g.data_ptr(), g_stride=width,
        )  # fmt: skip
        blocks = HOPPER.blocks(height, width, multiprocessors(0))
        kernel = tile_kernel("gradient", HOPPER, "bfloat16", PLAIN)
        launch(kernel, blocks, HOPPER.threads, *self.maps, arguments, shared="gradient_sm90_shared")

    def along(self, row: int = 0, column: int = 0, fresh: bool = False) -> None:
        """DQ += G K of a chunk."""
        (height, width), (g, _, k, out, _) = self.chunk, self.views
        self.products.accumulate(_lines(out, row, height), g, _lines(k, column, width), fresh=fresh)

    def across(self, row: int = 0, column: int = 0, fresh: bool = False) -> None:
        """DK += G^T Q of a chunk."""
        (height, width), (g, q, _, _, out) = self.chunk, self.views
        self.products.accumulate(_lines(out, column, width), g, _lines(q, row, height), transposed=True, fresh=fresh)

    def __call__(self) -> None:
        """One backward pass."""
        for row in range(0, self.p.b, self.chunk[0]):
            for column in range(0, self.p.b, self.chunk[1]):
                self.form(row, column)
                self.along(row, column, fresh=column == 0)
                self.across(row, column, fresh=row == 0)


def _view(x: Any) -> Any:
    """What ``Products`` asks of a CuPy matrix."""
    return SimpleNamespace(
        shape=tuple(x.shape), strides=(x.stride(0) * x.element_size(), x.element_size()), itemsize=x.element_size(),
        dtype=SimpleNamespace(name=str(x.dtype).removeprefix("torch.")), data=SimpleNamespace(ptr=x.data_ptr()),
    )  # fmt: skip


def _lines(x: Any, first: int, count: int) -> Any:
    """Some rows of a view."""
    data = SimpleNamespace(ptr=x.data.ptr + first * x.strides[0])
    return SimpleNamespace(**{**vars(x), "shape": (count, x.shape[1]), "data": data})


def verify(p: Problem, made: Streamed, package: Package, sample: int) -> bool:
    """Whether the gradients are right, as near to float64 as the package's, and the same bits each time."""
    import torch

    rows = torch.randperm(p.b, device="cuda")[:sample]
    truth = [p.truth(rows, of_columns) for of_columns in (False, True)]
    package()
    for out in made.outs:
        out.fill_(torch.nan)
    made()
    torch.cuda.synchronize()
    first = [out.clone() for out in made.outs]
    same = True
    for _ in range(5):
        made()
        torch.cuda.synchronize()
        same = same and all(torch.equal(x, y) for x, y in zip(first, made.outs, strict=True))
    good = same
    for name, mine, other, true in zip(("dQ", "dK"), first, package.outs, truth, strict=True):
        errors = [float((x[rows].double() - true).norm() / true.norm()) for x in (mine, other)]
        apart = float((mine.double() - other.double()).norm() / other.double().norm())
        good = good and errors[0] < 1.01 * errors[1] and apart < 1e-4
        print(f"  {name}: of float64 {errors[0]:.3e}, package {errors[1]:.3e}, apart {apart:.1e}", flush=True)
    bits = "same bits" if same else "NOT THE SAME BITS"
    print(f"b {p.b} d {p.depth}: {'good' if good else 'BAD'}, {bits}", flush=True)
    return good


def elapsed(run: Callable[[], Any], times: int) -> float:
    """Milliseconds a run."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / times


def measure(made: dict[str, tuple[Callable[[], Any], float]], rounds: int) -> None:
    """Each in samples of equal length between two of cuBLAS: milliseconds, TFLOP/s, share of the mean of the two."""
    import torch

    left, right = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    square = 2.0 * 8192**3
    jobs = {**made, "cuBLAS": ((lambda: torch.mm(left, right.t(), out=out)), square)}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in jobs}
    for run, _ in jobs.values():
        elapsed(run, 2)
    before = 0.0
    for turn in range(rounds + 1):
        for name, (run, work) in jobs.items():
            spent = elapsed(run, max(2, int(9e13 / work)))
            after = square / elapsed(jobs["cuBLAS"][0], 80) / 1e9
            rate = work / spent / 1e9
            if turn > 0:  # the first turn warms the card
                found[name].append((spent, rate, 200 * rate / (before + after)))
            before = after
    for name, samples in found.items():
        spent, rate, share = (statistics.median(x) for x in zip(*samples, strict=True))
        low, high = min(x[2] for x in samples), max(x[2] for x in samples)
        print(f"{name:34} {spent:8.3f} ms {rate:5.0f} TFLOP/s {share:6.1f} % ({low:.1f}..{high:.1f})", flush=True)


def main() -> int:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("verify", "measure", "once"))
    parser.add_argument("--watchdog", action="store_true")
    parser.add_argument("-b", type=int, default=61440)
    parser.add_argument("-d", type=int, default=512)
    parser.add_argument("--chunk", type=int, nargs=2, default=[7680, 30720])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--form", type=int, nargs="+", default=[24], help="clusters that form G")
    parser.add_argument("--ring", type=int, nargs="+", default=[20], help="tile columns of G in the ring")
    parser.add_argument("--roles", action="store_true", help="also each role alone")
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    import cupy

    found = compiled(*(("-DCONTRASTILE_WATCHDOG=400000",) if given.watchdog else ()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "streamed.cubin"
        path.write_bytes(found.cubin)
        kernel = cupy.RawModule(path=str(path)).get_function(found.kernel)
        kernel.max_dynamic_shared_size_bytes = cubins.integer(found.cubin, SHARED)
    clusters = cupy.cuda.Device().attributes["MultiProcessorCount"] // 2
    p = Problem(given.b, given.d)
    package = Package(p, tuple(given.chunk))
    rest = clusters - given.pairs * (given.d // WIDE)

    def streamed(form: int, ring: int, alone: str = "") -> Streamed:
        return Streamed(p, kernel, given.pairs, ring, form, rest - form, alone)

    first = streamed(given.form[0], given.ring[0])
    if given.what == "once":
        first()
        first()
        cupy.cuda.Device().synchronize()
        return 0
    good = verify(p, first, package, p.b if p.b <= 8192 else 512)
    if given.what == "measure" and good:
        work, part = 6.0 * p.b * p.b * p.depth, 2.0 * given.chunk[0] * given.chunk[1] * p.depth
        jobs: dict[str, tuple[Callable[[], Any], float]] = {
            "package: G": (package.form, part), "package: dQ += G K": (package.along, part),
            "package: dK += G^T Q": (package.across, part), "package: backward": (package, work),
        }  # fmt: skip
        for form in given.form:
            for ring in given.ring:
                jobs[f"streamed: {form} form, ring {ring}"] = streamed(form, ring), work
        if given.roles:
            for role in ("form", "along", "across"):
                jobs[f"{role} alone"] = streamed(given.form[0], given.ring[0], role), work / 3
        measure(jobs, given.rounds)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
