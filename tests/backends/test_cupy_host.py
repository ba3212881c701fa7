"""The cupy backend's host code with NumPy in CuPy's place: what a machine without a GPU can say of its launches.

What the kernels then compute is held to the oracle on a GPU.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cupy_hosted import KINDS, block, covered, hosted, sums, weights

pytest.importorskip("ml_dtypes")

from contrastile.backends import registry
from contrastile.backends.contract import BackendUnavailableError, Options, UnsupportedProblemError

SHAPE = M, N, D = 33, 47, 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_what_is_in_the_table_is_launched(dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted() as host:
        backend, given = host.record.backend, block(host, SHAPE, dtype, kind)
        families: set[str] = set()
        for kernels in (None, "sm80"):
            if kernels is not None:
                monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", kernels)
            for two_sided in (True, False):
                for options in (Options(), Options(tile=(20, 30)), Options(precision="tf32")):
                    w = weights(host, given, two_sided)
                    backend.check(given, options)
                    found = backend.lse(given, two_sided, options)
                    names = ("negative_lse", "positive_lse", "positive_sum")
                    vectors = [getattr(found, f"row_{name}") for name in names]
                    vectors += [getattr(found, f"column_{name}") for name in names if two_sided]
                    assert [x.dtype.name for x in vectors] == ["float64"] * len(vectors)
                    assert [x.size for x in vectors] == [M] * 3 + [N] * 3 * two_sided
                    assert len({x.data.ptr for x in vectors}) == len(vectors)
                    backend.gradients(given, w, *sums(host, given), options)
                    for form in (None, "sums", "gradient"):
                        done = backend.finished(given, w, None, form, options)
                        assert (done.rows.dtype, done.rows.shape) == (dtype, (M, D))
                        columns = None if form is None else (dtype if form == "gradient" else "float32", (N, D))
                        assert columns == (done.columns if form is None else (done.columns.dtype, done.columns.shape))
                    backend.sigmoid(given, w.row_weight, *sums(host, given), options)
            families.update(name for name in host.names() if name.startswith("forward"))
        assert families == ({"forward_sm80"} if dtype == "float32" else {"forward_sm80", "forward_sm90"})


@pytest.mark.parametrize("kind", ["plain", "target"])
@pytest.mark.parametrize("tile", [(7, 5), (33, 47), (1, 100), (40, 3)])
def test_chunks_cover_the_block_once_and_partials_stay_in_their_own_memory(tile: tuple[int, int], kind: str) -> None:
    with hosted() as host:
        given = block(host, SHAPE, kind=kind)
        host.record.backend.lse(given, True, Options(tile=tile))
        tiles = [call for call in host.calls if call.name.startswith("forward")]
        # the fast kernels and the safe ones
        assert (covered(tiles, SHAPE) == 2).all()
        folds = [call.arguments for call in host.calls if call.name == "fold"]
        by_ids = [call.arguments for call in host.calls if call.name == "fold_positives"]
        assert len(by_ids) == (len(folds) if kind == "target" else 0)
        for side, size in (("rows", M), ("columns", N)):
            ends, start = np.zeros((2, size), int), min(getattr(x, side).state for x in folds)
            for call, fold, positives in zip(tiles, folds, by_ids or folds, strict=True):
                left, one, other = (getattr(x, side) for x in (call.arguments, fold, positives))
                here = slice((one.state - start) // 8, (one.state - start) // 8 + one.length)
                ends[0, here] += one.first
                ends[1, here] += one.last
                assert (left.sums, left.references, left.stride) == (one.sums, one.references, one.part_stride)
                places = [one.sums, one.references]
                if by_ids:
                    own = left.dots, left.dots_low, left.counts, left.positive_sums, left.positive_references
                    assert own == (other.dots, other.dots_low, other.counts, other.sums, other.references)
                    places += own
                    assert (other.part_stride, other.state_stride) == (left.stride, size)
                    state = other.state - 8 * here.start
                    assert start + 8 * size <= state <= one.sums - 24 * size
                assert min(np.diff(places)) >= 4 * one.tiles * one.part_stride
                assert one.part_stride >= one.length
            # of each path
            assert (ends == 2).all()
        host.calls.clear()
        host.record.backend.gradients(given, weights(host, given), *sums(host, given), Options(tile=tile))
        assert (covered([call for call in host.calls if call.name == "gradient_sm90"], SHAPE) == 1).all()


@pytest.mark.parametrize("shape", [(2000, 1500, 136), (300, 9000, 64)])
def test_g_stays_within_the_workspace_that_is_asked_for(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTRASTILE_WORKSPACE_MIB", "2")
    with hosted() as host:
        given, backend = block(host, shape), host.record.backend
        w, outs = weights(host, given), sums(host, given)
        for options, mib in ((Options(workspace=1), 1), (Options(), 2)):
            for primitive, arguments in (
                (backend.gradients, (w, *outs)),
                (backend.finished, (w, None, "gradient")),
                (backend.sigmoid, (w.row_weight, *outs)),
            ):
                primitive(given, *arguments, options)
                tiles = [call for call in host.calls if call.name in ("gradient_sm90", "sigmoid_sm90")]
                assert (covered(tiles, shape) == 1).all()
                sizes = [2 * call.arguments.g_stride * call.arguments.chunk.height for call in tiles]
                assert mib * 2**19 < max(sizes) <= mib * 2**20
                host.calls.clear()


@pytest.mark.parametrize("form", [None, "sums", "gradient"])
def test_sums_are_begun_afresh_and_parts_of_the_inner_product_written_once(form: Any) -> None:
    with hosted() as host:
        given = block(host, SHAPE)
        host.record.backend.finished(given, weights(host, given), None, form, Options(tile=(11, 20)))
        rows = [how["fresh"] for _, how in host.multiplied if not how.get("transposed")]
        assert rows == [True, False, False] * 3
        columns = [how["fresh"] for _, how in host.multiplied if how.get("transposed")]
        assert columns == ([True] * 3 + [False] * 6 if form else [])
        launches = [call.arguments for call in host.calls if call.name == "finalize_rows"]
        lines = host.backward_pass.LINES
        written = [part for x in launches for part in range(x.first, x.first + -(-x.m // lines))]
        assert written == list(range(launches[0].all_blocks))


def test_one_chunk_of_rows_needs_no_sums_of_the_columns() -> None:
    with hosted() as host:
        given = block(host, SHAPE, "float16")
        host.record.backend.finished(given, weights(host, given), None, "gradient", Options(tile=(M, 20)))
        assert [shape for shape, how in host.multiplied if "factors" in how] == [(20, D), (20, D), (7, D)]
        assert not any(how.get("transposed") for _, how in host.multiplied)
        assert not {"scale_cast", "scale_gradient"} & {*host.names()}


def test_nothing_is_computed_that_nobody_wants() -> None:
    with hosted() as host:
        backend, given = host.record.backend, block(host, SHAPE)
        backend.gradients(given, weights(host, given), None, None, Options())
        assert not host.calls
        backend.sigmoid(given, weights(host, given).row_weight, None, None, Options())
        (arguments,) = (call.arguments for call in host.calls if call.name == "sigmoid_sm90")
        assert arguments.g is None
        assert not host.multiplied


def test_features_are_copied_only_where_the_copy_engine_needs_it() -> None:
    with hosted() as host:
        memory, (start, *_) = host.launch.scratch(1024)
        skip = -start % 16
        good = memory[skip : skip + 160].view("float32").reshape(5, 8)
        assert host.launch.aligned(good) is good
        odd = memory[skip + 4 : skip + 164].view("float32").reshape(5, 8)
        for bad in (good[:, :7].copy(), good.T, odd):
            bad[...] = 1
            copy = host.launch.aligned(bad)
            assert copy is not bad
            assert (copy == bad).all()
            assert copy.strides[0] % 16 == 0


def test_parts_of_one_allocation_are_apart_and_inside() -> None:
    with hosted() as host:
        sizes = (1, 512, 700, 0, 3)
        memory, places = host.launch.scratch(*sizes)
        assert places[0] == memory.data.ptr
        after = *places[1:], memory.data.ptr + memory.nbytes
        assert all(place + size <= end for place, size, end in zip(places, sizes, after, strict=True))
        assert all((place - places[0]) % 512 == 0 for place in places)


def test_refusals_give_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted() as host:
        given = block(host, SHAPE, "float32")
        with pytest.raises(UnsupportedProblemError, match="float64"):
            host.record.backend.check(replace(given, rows=given.rows.astype("float64")))
        with pytest.raises(UnsupportedProblemError, match="at least one column"):
            host.record.backend.check(replace(given, rows=given.rows[:, :0], columns=given.columns[:, :0]))
        monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", "sm70")
        with pytest.raises(ValueError, match="CONTRASTILE_CUPY_KERNELS must be sm80 or unset, got 'sm7"):
            host.record.backend.lse(block(host, SHAPE), True, Options())


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
