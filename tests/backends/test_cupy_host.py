"""The cupy backend's host code with NumPy in CuPy's place: what it launches, over which chunks, with what."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cupy_hosted import Host, hosted

pytest.importorskip("ml_dtypes")

from contrastile.backends import registry
from contrastile.backends.contract import (
    BackendUnavailableError,
    Block,
    Options,
    Pairs,
    UnsupportedProblemError,
    Weights,
)

M, N, D = 33, 47, 40


def block(host: Host, dtype: str, kind: str = "plain") -> Block:
    arrays = host.record.backend.arrays
    random = np.random.default_rng(0)
    like = arrays.full((1,), 0.0, "float32", arrays.from_numpy(np.zeros(1)))
    rows, columns = (arrays.asarray(random.standard_normal((size, D)), dtype, like) for size in (M, N))
    index, other = arrays.arange(0, M, like), arrays.arange(0, N, like)
    pairs = {
        "plain": Pairs(positives=index),
        "excluded": Pairs(positives=index, excluded=index),
        "drop": Pairs(positives=index, row_ids=index, column_ids=other),
        "target": Pairs(excluded=index, row_ids=index, column_ids=other, match="target"),
    }[kind]
    scale, bias = (arrays.asarray(x, "float32", like) for x in (3.0, 1.0))
    return Block(rows, columns, scale, bias, pairs)


def weights(host: Host, two_sided: bool) -> Weights:
    arrays = host.record.backend.arrays
    lse, one = (arrays.full((max(M, N),), 1.0, x, arrays.from_numpy(np.zeros(1))) for x in ("float64", "float32"))
    row, column = ((lse[:size], lse[:size], one[:size], one[:size]) for size in (M, N))
    return Weights(*row, *(column if two_sided else ()))


def sums(host: Host) -> tuple[Any, Any]:
    arrays = host.record.backend.arrays
    like = arrays.from_numpy(np.zeros(1))
    return tuple(arrays.full((size, D), 0.0, "float32", like) for size in (M, N))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["plain", "excluded", "drop", "target"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_what_is_in_the_table_is_launched(dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted() as host:
        for kernels in (None, "sm80"):
            if kernels is not None:
                monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", kernels)
            backend, given = host.record.backend, block(host, dtype, kind)
            for two_sided in (True, False):
                for tile in (None, (20, 30)):
                    options = Options(tile=tile)
                    backend.check(given, options)
                    backend.lse(given, two_sided, options)
                    backend.gradients(given, weights(host, two_sided), *sums(host), options)
                    for form in (None, "sums", "gradient"):
                        backend.finished(given, weights(host, two_sided), None, form, options)
                    backend.sigmoid(given, weights(host, False).row_weight, *sums(host), options)
        families = {name.partition("<")[0] for name, _, _ in host.launched if name.startswith("forward")}
        assert families == ({"forward_sm80"} if dtype == "float32" else {"forward_sm80", "forward_sm90"})
        scalings = [name for name, _, _ in host.launched if name == "scale_gradient"]
        assert bool(scalings) == (dtype == "float16")


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("kind", ["plain", "excluded", "drop", "target", "none"])
@pytest.mark.parametrize(
    ("dtype", "precision", "product"),
    [
        ("bfloat16", "ieee", "Half<contrastile::bfloat16>"),
        ("float16", "ieee", "Half<contrastile::float16>"),
        ("float32", "ieee", "Ieee"),
        ("float32", "tf32", "Tf32"),
    ],
)
def test_positives_by_index_are_multiplied_as_the_tiles_are(
    dtype: str, precision: str, product: str, kind: str, two_sided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", "sm80")
    with hosted() as host:
        given = block(host, dtype, "plain" if kind == "none" else kind)
        given = replace(given, pairs=Pairs()) if kind == "none" else given
        found = host.record.backend.lse(given, two_sided, Options(precision=precision))
        dots = [call for call in host.calls if call.name == "positive_dots"]
        # ids name theirs from the tiles themselves
        assert len(dots) == (kind not in ("target", "none"))
        for call in dots:
            assert call.kernel == f"positive_dots<contrastile::{product}>"
            assert any(name.startswith(f"forward_sm80<contrastile::{product},") for name, _, _ in host.launched)
            assert call.blocks * 64 >= max(M, N) > (call.blocks - 1) * 64
            out = call.arguments
            assert (out.row_lse, out.row_sum) == (found.row_positive_lse.data.ptr, found.row_positive_sum.data.ptr)
            columns = [host.launch.pointer(x) for x in (found.column_positive_lse, found.column_positive_sum)]
            assert [out.column_lse, out.column_sum] == columns
            assert (columns[0] is not None) == two_sided
        gathered = [call.arguments for call in host.calls if call.name == "sum_positives"]
        assert len(gathered) == (len(dots) and two_sided)
        for out in gathered:
            assert out.row_sum == dots[0].arguments.row_sum
            assert (out.column_lse, out.column_sum) == (dots[0].arguments.column_lse, dots[0].arguments.column_sum)
        if kind == "none":
            assert np.isneginf(found.row_positive_lse).all()
            assert not found.row_positive_sum.any()


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("kind", ["plain", "target"])
@pytest.mark.parametrize("tile", [None, (7, 5)])
def test_statistics_are_float64_and_every_vector_is_its_own(tile: Any, kind: str, two_sided: bool) -> None:
    with hosted() as host:
        found = host.record.backend.lse(block(host, "bfloat16", kind), two_sided, Options(tile=tile))
        names = ("negative_lse", "positive_lse", "positive_sum")
        vectors = [getattr(found, f"row_{name}") for name in names]
        vectors += [getattr(found, f"column_{name}") for name in names if two_sided]
        assert [(x.dtype.name, x.size) for x in vectors] == [("float64", M)] * 3 + [("float64", N)] * 3 * two_sided
        # what a kernel writes: folds by rows and by columns, of negatives and of positives
        written = [
            {getattr(found, f"{side}_{name}").data.ptr: name for name in names}
            for side in ("row", "column")[: 1 + two_sided]
        ]
        for fold in (x for name, x, _ in host.launched if name.startswith("fold<")):
            for side, own in zip((fold.rows, fold.columns), written, strict=False):
                starts = [place for place, name in own.items() if name == "negative_lse"]
                assert 0 <= side.lse - starts[0] < 8 * max(M, N)
                # a reference for each sum, behind the sums of the largest chunk
                assert side.references - side.sums >= 4 * side.tiles * side.part_stride
        for fold in (x for name, x, _ in host.launched if name.startswith("fold_positives<")):
            side = fold.rows
            places = [side.dots, side.counts, side.sums, side.references]
            assert min(np.diff(places)) >= 4 * side.tiles * side.part_stride
            assert 0 <= side.lse - found.row_positive_lse.data.ptr < 8 * M
            assert 0 <= side.sum - found.row_positive_sum.data.ptr < 8 * M
            assert side.state_stride == M


def test_partials_of_the_tile_kernels_are_those_that_are_folded() -> None:
    with hosted() as host:
        host.record.backend.lse(block(host, "bfloat16", "target"), True, Options(tile=(7, 5)))
        forward = [x for name, x, _ in host.launched if name.startswith("forward")]
        folds = [x for name, x, _ in host.launched if name.startswith("fold<")]
        positives = [x for name, x, _ in host.launched if name.startswith("fold_positives<")]
        for tiles, fold, by_ids in zip(forward, folds, positives, strict=True):
            for side in ("rows", "columns"):
                left, negatives, others = (getattr(x, side) for x in (tiles, fold, by_ids))
                assert left.stride == negatives.part_stride == others.part_stride
                assert (left.sums, left.references) == (negatives.sums, negatives.references)
                assert (left.dots, left.counts) == (others.dots, others.counts)
                assert (left.positive_sums, left.positive_references) == (others.sums, others.references)


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("kind", ["plain", "excluded", "drop", "target"])
def test_the_backward_forms_g_of_positives_by_index_before_the_tiles(kind: str, two_sided: bool) -> None:
    with hosted() as host:
        given, w = block(host, "bfloat16", kind), weights(host, two_sided)
        host.record.backend.gradients(given, w, *sums(host), Options(tile=(7, 5)))
        (scales,) = (x for name, x, _ in host.launched if name == "epilogue_scales")
        assert scales.by_ids == (kind == "target")
        assert bool(scales.entries) == bool(scales.positives) == (kind != "target")
        assert bool(scales.excluded) == (kind != "plain" and kind != "drop")
        assert scales.row.negative_lse == w.row_negative_lse.data.ptr
        # a positive may be any column of the block, also where columns have no weights
        assert (scales.m, scales.n, scales.two_sided) == (M, N, two_sided)
        blocks = [call.blocks for call in host.calls if call.name in ("weight_bounds", "epilogue_scales")]
        assert blocks == [1 + two_sided, 1 + two_sided]
        if two_sided:
            assert scales.column.positive_lse == host.launch.pointer(w.column_positive_lse)
        for x in (x for name, x, _ in host.launched if name.startswith("gradient")):
            assert x.entries == scales.entries
            sides = (x.row, scales.row_vectors, M), (x.column, scales.column_vectors, N)
            for side, start, length in sides[: 1 + two_sided]:
                places = [start + 4 * k * length for k in range(5 if scales.by_ids else 3)]
                found = [side.log, side.weight, side.folded, side.taken, side.certain]
                assert found == places + [None] * (5 - len(places))


def covered(launched: list[Any], name: str) -> np.ndarray:
    """How often each pair of the block was in a chunk of a kernel."""
    count = np.zeros((M, N), int)
    for kernel, arguments, _ in launched:
        if kernel.startswith(name):
            chunk = arguments.chunk
            count[chunk.row : chunk.row + chunk.height, chunk.column : chunk.column + chunk.width] += 1
    return count


@pytest.mark.parametrize("tile", [(7, 5), (33, 47), (1, 100), (40, 3)])
def test_chunks_cover_the_block_once_and_each_state_has_one_first_and_one_last(tile: tuple[int, int]) -> None:
    with hosted() as host:
        given = block(host, "bfloat16")
        host.record.backend.lse(given, True, Options(tile=tile))
        # the fast kernels and the safe ones
        assert (covered(host.launched, "forward") == 2).all()
        folds = [arguments for name, arguments, _ in host.launched if name == "fold<false>"]
        for side, size in (("rows", M), ("columns", N)):
            ends = np.zeros((2, size), int)
            for fold in folds:
                one = getattr(fold, side)
                start = (one.state - min(getattr(x, side).state for x in folds)) // 8
                ends[0, start : start + one.length] += one.first
                ends[1, start : start + one.length] += one.last
                assert one.part_stride >= one.length
            assert (ends == 1).all()
        host.launched.clear()
        host.record.backend.gradients(given, weights(host, True), *sums(host), Options(tile=tile))
        assert (covered(host.launched, "gradient") == 1).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", [None, "sums", "gradient"])
def test_what_is_finished_starts_afresh(form: Any, dtype: str) -> None:
    with hosted() as host:
        found = host.record.backend.finished(
            block(host, dtype), weights(host, True), None, form, Options(tile=(11, 20))
        )
        rows = [how["fresh"] for _, how in host.multiplied if not how.get("transposed")]
        assert rows == [True, False, False] * 3
        columns = [how["fresh"] for _, how in host.multiplied if how.get("transposed")]
        assert columns == ([True] * 3 + [False] * 6 if form else [])
        names = [name.partition("<")[0] for name, _, _ in host.launched]
        assert names.count("finalize_rows") == 3
        assert names.count("scale_cast") == (form == "gradient")
        # no sums come from outside: float16's factor is only taken out of those that go there
        assert names.count("scale_gradient") == (form == "sums" and dtype == "float16")
        assert found.rows.dtype == dtype
        assert found.columns is None if form is None else found.columns.dtype == (dtype if form == "gradient" else "f4")


def test_parts_of_the_inner_product_are_each_written_once() -> None:
    with hosted() as host:
        host.record.backend.finished(block(host, "bfloat16"), weights(host, True), None, None, Options(tile=(11, 20)))
        launches = [x for name, x, _ in host.launched if name.startswith("finalize_rows")]
        lines = host.backward_pass.LINES
        written = [part for x in launches for part in range(x.first, x.first + -(-x.m // lines))]
        assert written == list(range(launches[0].all_blocks))
        assert len({x.parts for x in launches}) == len({x.inner for x in launches}) == 1


def test_one_chunk_of_rows_needs_no_sums_of_the_columns() -> None:
    with hosted() as host:
        host.record.backend.finished(
            block(host, "float16"), weights(host, True), None, "gradient", Options(tile=(M, 20))
        )
        assert [shape for shape, how in host.multiplied if "factors" in how] == [(20, D), (20, D), (7, D)]
        assert not any(how.get("transposed") for _, how in host.multiplied)
        assert not any(name.startswith(("scale_cast", "scale_gradient")) for name, _, _ in host.launched)


def test_the_workspace_of_the_options_reaches_every_pass_over_g(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRASTILE_WORKSPACE_MIB", "1")
    with hosted() as host:
        given, asked = block(host, "bfloat16"), []

        def chunk(m: int, n: int, size: int, family: Any, options: Options) -> tuple[int, int]:
            asked.append(options.workspace)
            return m, n

        for module in (host.backward_pass, host.sigmoid_pass):
            monkeypatch.setattr(module, "backward_chunk", chunk)
        for mib in (3, None):
            options = Options(workspace=mib)
            host.record.backend.gradients(given, weights(host, True), *sums(host), options)
            host.record.backend.finished(given, weights(host, True), None, "gradient", options)
            host.record.backend.sigmoid(given, weights(host, False).row_weight, *sums(host), options)
        assert asked == [3] * 3 + [None] * 3


def test_unknown_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", "sm70")
    with hosted() as host, pytest.raises(ValueError, match="CONTRASTILE_CUPY_KERNELS must be sm80 or unset, got 'sm7"):
        host.record.backend.lse(block(host, "bfloat16"), True, Options())


def test_upstream_reaches_the_precheck_and_the_vectors() -> None:
    with hosted() as host:
        backend, given = host.record.backend, block(host, "bfloat16")
        upstream = given.scale + 1
        backend.finished(given, weights(host, True), upstream, None, Options())
        backend.gradients(given, weights(host, True), *sums(host), Options())
        found = [x.upstream for name, x, _ in host.launched if name in ("weight_bounds", "epilogue_scales")]
        assert found == [upstream.data.ptr] * 2 + [None] * 2


def test_nothing_is_computed_that_nobody_wants() -> None:
    with hosted() as host:
        backend, given = host.record.backend, block(host, "bfloat16")
        backend.gradients(given, weights(host, True), None, None, Options())
        assert not host.launched
        backend.sigmoid(given, weights(host, False).row_weight, None, None, Options())
        (arguments,) = (x for name, x, _ in host.launched if name.startswith("sigmoid"))
        assert arguments.g is None
        assert not host.multiplied


def test_features_are_copied_only_where_the_copy_engine_needs_it() -> None:
    with hosted() as host:
        cupy = host.launch.cupy
        good = cupy.empty((5, 8), dtype="float32")
        # NumPy aligns as it likes: what is aligned is what workspace made
        good = host.launch.workspace(5, 8, "float32") if good.data.ptr % 16 else good
        if good.data.ptr % 16 == 0:
            assert host.launch.aligned(good) is good
        for bad in (cupy.ones((5, 7), dtype="float32"), cupy.ones((8, 5), dtype="float32").T):
            copy = host.launch.aligned(bad)
            assert copy is not bad
            assert (copy == bad).all()
            assert copy.strides[0] % 16 == 0


def test_parts_of_one_allocation_are_apart_and_inside() -> None:
    with hosted() as host:
        sizes = (1, 512, 700, 0, 3)
        memory, places = host.launch.scratch(*sizes)
        assert len(places) == len(sizes)
        assert places[0] == memory.data.ptr
        after = *places[1:], memory.data.ptr + memory.nbytes
        assert all(place + size <= end for place, size, end in zip(places, sizes, after, strict=True))
        assert all((place - places[0]) % 512 == 0 for place in places)


def test_refusals_give_their_reason() -> None:
    with hosted() as host:
        given = block(host, "float32")
        with pytest.raises(UnsupportedProblemError, match="float64"):
            host.record.backend.check(replace(given, rows=given.rows.astype("float64")))
        with pytest.raises(UnsupportedProblemError, match="at least one column"):
            host.record.backend.check(replace(given, rows=given.rows[:, :0], columns=given.columns[:, :0]))


def test_without_cupy_the_error_ends_in_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    # an earlier test may have imported the record
    monkeypatch.delitem(sys.modules, "contrastile.backends.cupy.record", raising=False)
    monkeypatch.delattr(importlib.import_module("contrastile.backends.cupy"), "record", raising=False)
    registry.load.cache_clear()
    with pytest.raises(BackendUnavailableError, match=r"is not available: .*; run: pip install 'contrastile\[cupy\]'$"):
        registry.load("contrastile.backends.cupy:backend")


def test_without_a_gpu_the_error_says_so() -> None:
    with hosted() as host:

        def none() -> int:
            raise host.record.cupy.cuda.runtime.CUDARuntimeError("no driver")

        host.record.cupy.cuda.runtime.getDeviceCount = none
        with pytest.raises(BackendUnavailableError, match=r"reaches no NVIDIA GPU \(no driver\); use a machine"):
            host.record.require_gpu()


def test_the_guarded_merge_has_no_nan() -> None:
    with hosted() as host:
        arrays, inf = host.record.backend.arrays, np.inf
        a, b = (
            arrays.from_numpy(np.array(x, dtype="float32")) for x in ([-inf, -inf, inf, 1.0], [-inf, 2.0, 0.0, 1.0])
        )
        with np.errstate(all="ignore"):
            found = arrays.to_numpy(arrays.merge(a, b))
        assert found[:3].tolist() == [-inf, 2.0, inf]
        assert abs(found[3] - (1 + np.log(2.0))) <= 4 * 2.0**-24
