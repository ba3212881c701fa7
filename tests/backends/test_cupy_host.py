"""The cupy backend's host code with NumPy in CuPy's place: what a machine without a GPU can say of its launches.

What the kernels then compute is held to the oracle on a GPU.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import numpy as np
import pytest
from cupy_hosted import KINDS, block, hosted, sums, weights

pytest.importorskip("ml_dtypes")

from contrastile.backends import registry
from contrastile.backends.contract import BackendUnavailableError, Bars, Options, UnsupportedProblemError, Weights

SHAPE = ROWS, COLUMNS, WIDTH = 33, 47, 40
N = 300


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
                    vectors = [*found.rows, *(found.columns or ())]
                    assert [x.dtype.name for x in vectors] == ["float64"] * len(vectors)
                    assert [x.size for x in vectors] == [ROWS] * 3 + [COLUMNS] * 3 * two_sided
                    assert len({x.data.ptr for x in vectors}) == len(vectors)
                    backend.gradients(given, w, *sums(host, given), options)
                    for form in (None, "sums", "gradient"):
                        done = backend.finished(given, w, None, form, options)
                        assert (done.rows.dtype, done.rows.shape) == (dtype, (ROWS, WIDTH))
                        of = {None: None, "sums": "float32", "gradient": dtype}[form]
                        columns = None if done.columns is None else (done.columns.dtype, done.columns.shape)
                        assert columns == (None if of is None else (of, (COLUMNS, WIDTH)))
                    backend.sigmoid(given, w.rows.weight, *sums(host, given), options)
            families.update(name for name in host.names() if name.startswith("forward"))
        assert families == ({"forward_sm80"} if dtype == "float32" else {"forward_sm80", "forward_sm90"})


def test_nothing_is_computed_that_nobody_wants() -> None:
    with hosted() as host:
        backend, given = host.record.backend, block(host, SHAPE)
        backend.gradients(given, weights(host, given), None, None, Options())
        assert not host.calls
        backend.sigmoid(given, weights(host, given).rows.weight, None, None, Options())
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


# rows alone of bfloat16 or float16 features of 65 to 128 columns, no tile asked for
NARROW = [
    *((width, dtype, None, True) for width, dtype in ((65, "float16"), (100, "bfloat16"), (128, "bfloat16"))),
    *((width, "bfloat16", None, False) for width in (64, 129)),
    (128, "float32", None, False),
    (128, "bfloat16", (64, 64), False),
]


@pytest.mark.parametrize(("width", "dtype", "tile", "narrow"), NARROW)
def test_rows_alone_of_narrow_features_have_kernels_of_their_own(
    width: int, dtype: str, tile: tuple[int, int] | None, narrow: bool
) -> None:
    with hosted() as host:
        given, backend, options = block(host, (N, N, width), dtype, "excluded"), host.record.backend, Options(tile=tile)
        w = weights(host, given)
        assert backend.rows_alone(width, dtype, options) == narrow
        backend.lse(given, False, options)
        assert ("narrow_forward_sm90" in host.names()) == narrow
        for primitive, arguments in (
            (backend.gradients, (w, sums(host, given)[0], None)),
            (backend.finished, (w, None, None)),
        ):
            primitive(given, *arguments, options)
            assert {"narrow_gradient_sm90", "narrow_join"} <= {*(found := host.names())} or not narrow
            assert any(name.startswith("gradient_") for name in found) == (not narrow)


@pytest.mark.parametrize("multiprocessors", [1, 7, 132])
@pytest.mark.parametrize("columns", [1, 2, 5, 131, 300])
@pytest.mark.parametrize("rows", [1, 2, 3, 100, 131, 133, 400])
def test_no_more_blocks_have_a_part_of_a_tile_row(rows: int, columns: int, multiprocessors: int) -> None:
    with hosted() as host:
        shares = host.tiles.Shares.of(128 * rows - 5, 128 * columns - 3, multiprocessors)
        assert (shares.rows, shares.blocks) == (rows, min(multiprocessors, rows * columns))
        # block b begins at tile b (rows columns) // blocks, as in narrow_sm90.cuh
        starts = np.arange(shares.blocks + 1) * (rows * columns) // shares.blocks
        assert (np.diff(starts) > 0).all()
        ends = (np.arange(rows) + 1) * columns
        first = np.searchsorted(starts, ends - columns, side="right")
        last = np.searchsorted(starts, ends - 1, side="right")
        assert (last - first + 1).max() <= shares.most <= columns


@pytest.mark.parametrize("two_sided", [True, False])
def test_bars_come_as_a_log_sum_exp_and_a_share_and_nothing_kept_is_used(two_sided: bool) -> None:
    with hosted() as host:
        backend, given = host.record.backend, block(host, (901, 1037, 136))
        memory = backend.keeping(given, True, Options(keep=1)).kept
        plain = weights(host, given, two_sided, kept=memory)
        sides = [side and side._replace(bars=Bars(*[side.negative_lse] * 3)) for side in (plain.rows, plain.columns)]
        for w in (plain, Weights(*sides, memory)):
            before = len(host.calls)
            backend.finished(given, w, None, "gradient", Options())
            asked = {call.name: call.arguments for call in host.calls[before:]}
            assert ("weighted_sm90" in asked) == (w is plain)
            for name in ("weight_bounds", "epilogue_scales"):
                shares = [bool(getattr(asked[name], side).share) for side in ("row", "column")]
                assert shares == ([False] * 2 if w is plain else [True, two_sided])
