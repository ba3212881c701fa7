"""Kept exponentials on the host of the cupy backend, NumPy in CuPy's place: what is kept, where, and who is told."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cupy_hosted import Call, Host, hosted

pytest.importorskip("ml_dtypes")

from contrastile.backends.contract import Backend, Block, Options, Pairs, Statistics, Weights

M, N, D = 901, 47, 136
STRIDE = 48
# room for 600 rows: 512, the multiple of 256
PARTLY, WHOLLY = 2 * STRIDE * 600, 2 * STRIDE * M
KEPT = {PARTLY: 512, WHOLLY: M}
BF16 = "contrastile::bfloat16"
PLAN_BYTES = 56
ROW_BYTES = 2 * STRIDE


def made(host: Host, keep: int) -> Backend:
    """The backend, which may keep so many bytes."""
    # of so small a block a MiB would hold all
    host.keeping.kept_bytes = lambda options: keep
    found: Backend = host.record.backend
    return found


def block(host: Host, dtype: str = "bfloat16", depth: int = D, **pairs: Any) -> Block:
    arrays = host.record.backend.arrays
    random = np.random.default_rng(0)
    like = arrays.from_numpy(np.zeros(1))
    rows, columns = (arrays.asarray(random.standard_normal((size, depth)), dtype, like) for size in (M, N))
    index, other = arrays.arange(0, M, like), arrays.arange(0, N, like)
    named = {"index": index, "other": other, None: None, "target": "target", "drop": "drop"}
    given = {name: named[each] for name, each in ({"positives": "index"} | pairs).items()}
    return Block(rows, columns, arrays.asarray(3.0, "float32", like), None, Pairs(**given))


def weights(host: Host, kept: Any) -> Weights:
    arrays = host.record.backend.arrays
    lse, one = (arrays.full((M,), 1.0, x, arrays.from_numpy(np.zeros(1))) for x in ("float64", "float32"))
    return Weights(lse, lse, one, one, lse[:N], lse[:N], one[:N], one[:N], kept)


def statistics(backend: Backend, given: Block, columns: bool = True, options: Options = Options()) -> Statistics:  # noqa: B008 (frozen)
    assert backend.keeping is not None
    return backend.keeping(given, columns, options)


def address(x: Any) -> int:
    return int(x.data.ptr)


def same(x: Any, y: Any) -> bool:
    """The same values: features may have been copied to where the copy engine takes them from."""
    return x.shape == y.shape and x.tobytes() == y.tobytes()


def rows_of(calls: list[Call]) -> list[tuple[int, int, int, int]]:
    chunks = [call.arguments.chunk for call in calls]
    return [(chunk.row, chunk.column, chunk.height, chunk.width) for chunk in chunks]


@pytest.mark.parametrize("keep", [PARTLY, WHOLLY])
@pytest.mark.parametrize("height", [256, 1024])
def test_the_fast_forward_keeps_the_first_rows_and_no_chunk_lies_on_both_sides(
    keep: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosted() as host:
        monkeypatch.setattr(host.forward_pass, "forward_chunk", lambda *_: (height, 24))
        given, kept = block(host), KEPT[keep]
        memory = statistics(made(host, keep), given).kept
        assert (memory.dtype, memory.shape) == ("uint8", (ROW_BYTES * kept + PLAN_BYTES,))
        keeping, plain, safe = (
            [call for call in host.calls if call.kernel == name]
            for name in (
                f"forward_keeping_sm90<{BF16}>",
                f"forward_sm90<{BF16}, 0, 0>",
                f"forward_sm90<{BF16}, 1, 0>",
            )
        )
        assert rows_of(keeping + plain) == rows_of(safe)
        covered = np.zeros((M, N), int)
        for call, (row, column, high, wide) in zip(keeping + plain, rows_of(safe), strict=True):
            covered[row : row + high, column : column + wide] += 1
            assert (call in keeping) == (row < kept)
            assert row >= kept or row + high <= kept
        assert (covered == 1).all()
        for call, (row, column, high, wide) in zip(keeping, rows_of(keeping), strict=True):
            assert call.shared == "forward_keeping_sm90_shared"
            assert call.threads == 384
            assert [same(x, y) for (x, _), y in zip(call.maps, (given.rows, given.columns), strict=False)] == [True] * 2
            view, box = call.maps[2]
            assert (view.shape, view.strides, view.dtype.name) == ((high, wide), (2 * STRIDE, 2), "bfloat16")
            assert address(view) == address(memory) + 2 * (STRIDE * row + column)
            assert box == (16, 64)
        # every kernel of the pass obeys the plan that is kept too
        plans = {call.arguments.plan for call in host.calls if hasattr(call.arguments, "plan")}
        assert plans == {address(memory) + ROW_BYTES * kept}
        folds = [call.arguments for call in host.calls if call.kernel == "fold<false>"]
        assert sum(fold.columns.first * fold.columns.length for fold in folds) == N
        assert sum(fold.columns.last * fold.columns.length for fold in folds) == N
        assert sum(fold.rows.last * fold.rows.length for fold in folds) == M


@pytest.mark.parametrize("form", [None, "sums", "gradient"])
@pytest.mark.parametrize("positives", ["index", None])
@pytest.mark.parametrize("keep", [PARTLY, WHOLLY])
def test_the_backward_begins_with_what_was_kept(
    keep: int, positives: str | None, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hosted() as host:
        backend, given, kept = made(host, keep), block(host, positives=positives), KEPT[keep]
        monkeypatch.setattr(host.backward_pass, "backward_chunk", lambda *_: (200, 24))
        memory = statistics(backend, given).kept
        host.calls.clear()
        assert backend.finished is not None
        found = backend.finished(given, weights(host, memory), None, form, Options())
        assert found.rows.shape == (M, D)
        assert found.columns is None if form is None else found.columns.shape == (N, D)
        rest = -(-(M - kept) // 200)
        expected = ["weight_bounds", "epilogue_scales", *(["kept_positives"] if positives else []), "gradient_sm90"]
        expected += ["weighted_sm90", "finalize_rows", *(["weighted_sm90"] if form else [])]
        expected += ["gradient_sm90", "gradient_sm90", "finalize_rows"] * rest
        # cuBLAS follows each G: rows are finished before the columns' sums of their last chunk
        assert [call.name for call in host.calls] == expected + (["scale_cast"] if form == "gradient" else [])
        by_row = [how["fresh"] for _, how in host.multiplied if not how.get("transposed")]
        assert by_row == [True, False] * rest
        # the columns' sums begin with what was kept
        by_column = [how["fresh"] for _, how in host.multiplied if how.get("transposed")]
        assert by_column == ([False, False] * rest if form else [])


def backward(host: Host, keep: int) -> tuple[Block, Any, dict[str, list[Call]]]:
    """A block, what was kept of it, and the launches of its backward by name."""
    backend, given = made(host, keep), block(host)
    memory = statistics(backend, given).kept
    host.calls.clear()
    assert backend.finished is not None
    backend.finished(given, weights(host, memory), None, "gradient", Options())
    found: dict[str, list[Call]] = {}
    for call in host.calls:
        found.setdefault(call.name, []).append(call)
    return given, memory, found


@pytest.mark.parametrize("keep", [PARTLY, WHOLLY])
def test_the_vectors_of_the_kept_rows_reach_who_needs_them(keep: int) -> None:
    with hosted() as host:
        _, memory, calls = backward(host, keep)
        (scales,), (positives,) = calls["epilogue_scales"], calls["kept_positives"]
        tail = address(memory) + ROW_BYTES * KEPT[keep]
        assert scales.arguments.forward == positives.arguments.forward == tail
        assert scales.arguments.plan == positives.arguments.plan != tail
        # as many threads as the longer of the vectors of each side
        assert scales.blocks * 256 >= 1024 + 256
        assert scales.blocks == 4 + 1
        row, column = positives.arguments.row_kept, positives.arguments.column_kept
        assert (row, column) == (scales.arguments.row_kept, scales.arguments.column_kept)
        assert (positives.arguments.m, positives.arguments.n) == (KEPT[keep], N)
        assert positives.arguments.entries == scales.arguments.entries
        assert {call.arguments.entries for call in calls["gradient_sm90"]} == {scales.arguments.entries}
        assert (positives.arguments.kept, positives.arguments.kept_stride) == (address(memory), STRIDE)
        assert (positives.blocks, positives.threads) == (-(-KEPT[keep] // 256), 256)
        by_row, by_column = calls["weighted_sm90"]
        for call, lines, steps in ((by_row, row, column), (by_column, column, row)):
            assert (call.arguments.lines, call.arguments.steps) == (lines, steps)
            assert call.arguments.plan == scales.arguments.plan


@pytest.mark.parametrize("keep", [PARTLY, WHOLLY])
def test_both_products_take_the_kept_rows_alone(keep: int) -> None:
    with hosted() as host:
        given, memory, calls = backward(host, keep)
        by_row, by_column = calls["weighted_sm90"]
        assert (by_row.kernel, by_column.kernel) == ("weighted_sm90<0>", "weighted_sm90<1>")
        kept = KEPT[keep]
        for call, features, size, lines in ((by_row, given.columns, N, kept), (by_column, given.rows, kept, N)):
            (e, e_box), (x, x_box) = call.maps
            assert e_box == x_box == (64, 64)
            assert (address(e), e.shape, e.strides[0]) == (address(memory), (kept, N), 2 * STRIDE)
            # past its last row a map gives zeros
            assert same(x, features[:size])
            arguments = call.arguments
            assert (arguments.height, arguments.width, arguments.depth) == (lines, D, size)
            assert (call.blocks, call.threads) == (2 * -(-lines // 256) * -(-D // 256), 384)
            assert call.shared == "weighted_sm90_shared"
            assert arguments.out_stride == D
        first = calls["finalize_rows"][0].arguments
        assert (by_row.arguments.out, by_row.arguments.out_stride) == (first.sums.data, first.sums.row_stride)
        assert by_column.arguments.out == calls["scale_cast"][0].arguments.x.data


@pytest.mark.parametrize("keep", [PARTLY, WHOLLY])
def test_g_can_take_the_place_of_what_was_kept_and_nowhere_else(keep: int) -> None:
    with hosted() as host:
        _, memory, calls = backward(host, keep)
        first, *others = calls["gradient_sm90"]
        kept = KEPT[keep]
        assert rows_of([first]) == [(0, 0, kept, N)]
        assert (first.arguments.g, first.arguments.g_stride) == (address(memory), STRIDE)
        assert first.arguments.in_place_of_kept == 1
        view, box = first.maps[2]
        assert (address(view), view.shape, box) == (address(memory), (kept, N), (16, 64))
        assert [call.arguments.in_place_of_kept for call in others] == [0] * len(others)
        assert rows_of(others) == ([(kept, 0, M - kept, N)] if kept < M else [])
        assert all(call.arguments.g != address(memory) for call in others)


@pytest.mark.parametrize("keep", [PARTLY, WHOLLY])
def test_every_part_of_the_inner_product_is_written_once(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted() as host:
        monkeypatch.setattr(host.backward_pass, "backward_chunk", lambda *_: (100, 64))
        _, _, calls = backward(host, keep)
        launches = [call.arguments for call in calls["finalize_rows"]]
        written = [part for x in launches for part in range(x.first, x.first + -(-x.m // host.backward_pass.LINES))]
        assert written == list(range(launches[0].all_blocks))
        assert sum(x.m for x in launches) == M
        assert len({(x.parts, x.inner) for x in launches}) == 1
        starts = np.cumsum([0, *(x.m for x in launches)])[:-1]
        assert [(x.out.data - launches[0].out.data) // (2 * D) for x in launches] == starts.tolist()


EXCLUDED: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "excluded": {"excluded": "index"},
    "false negatives": {"row_ids": "index", "column_ids": "other"},
    "labels": {"row_ids": "index", "column_ids": "other", "match": "target"},
    "narrow": {"depth": 128},
    "one direction": {},
    "a tile": {},
    "sm_80": {},
    "nothing to be kept": {},
    "no room for a tile row": {},
}


@pytest.mark.parametrize("why", EXCLUDED)
def test_nothing_is_kept_where_it_cannot_be(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTRASTILE_KEEP_MIB", raising=False)
    with hosted() as host:
        keep = {"nothing to be kept": 0, "no room for a tile row": 2 * STRIDE * 255}.get(why, WHOLLY)
        backend, given = made(host, keep), block(host, **EXCLUDED[why])
        options = Options(tile=(1000, 1000) if why == "a tile" else None)
        with monkeypatch.context() as kernels:
            if why == "sm_80":
                kernels.setenv("CONTRASTILE_CUPY_KERNELS", "sm80")
            found = statistics(backend, given, why != "one direction", options)
        assert found.kept is None
        assert {call.name for call in host.calls if "keeping" in call.name} == set()
        # the same block without the reason
        assert statistics(made(host, WHOLLY), block(host)).kept is not None


def test_only_keeping_keeps_and_only_finished_uses_it() -> None:
    with hosted() as host:
        backend, given = made(host, WHOLLY), block(host)
        assert backend.lse(given, True, Options()).kept is None
        memory = statistics(backend, given).kept
        host.calls.clear()
        arrays = backend.arrays
        sums = [arrays.full((size, D), 0.0, "float32", given.rows) for size in (M, N)]
        backend.gradients(given, weights(host, memory), *sums, Options())
        assert backend.finished is not None
        backend.finished(given, weights(host, None), None, "gradient", Options())
        assert not {call.name for call in host.calls} & {"weighted_sm90", "kept_positives"}
        assert [call.arguments.forward for call in host.calls if call.name == "epilogue_scales"] == [None] * 2
        none = replace(given, rows=given.rows[:0], pairs=Pairs())
        assert statistics(backend, none).kept is None


@pytest.mark.parametrize(
    ("m", "n", "mib", "rows"),
    [
        (1000, 1000, 1, 512),
        (1000, 1000, 2, 1000),
        (512, 1024, 1, 512),
        # a stride of 1032: 508 rows
        (512, 1025, 1, 256),
        (65536, 65536, 8192, 65536),
        (65536, 65536, 2048, 16384),
        (65536, 65536, 1023, 7936),
        (100, 2**20, 1, 0),
        (100, 2**12, 1, 100),
        (100, 2**12 + 2**11, 1, 0),
        (5, 1, 0, 0),
    ],
)
def test_whole_units_of_rows_are_kept(m: int, n: int, mib: int, rows: int) -> None:
    configs = importlib.import_module("contrastile.backends.cupy.configs")
    found = configs.kept_rows(m, n, mib * 2**20)
    assert found == rows
    assert 2 * found * configs.kept_stride(n) <= mib * 2**20


def test_room_is_an_option_or_else_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted() as host:
        backend, given = host.record.backend, block(host)
        monkeypatch.delenv("CONTRASTILE_KEEP_MIB", raising=False)
        assert statistics(backend, given).kept is None
        for mib in ("1", "0"):
            monkeypatch.setenv("CONTRASTILE_KEEP_MIB", mib)
            assert (statistics(backend, given).kept is None) == (mib == "0")
            assert statistics(backend, given, options=Options(keep=1)).kept is not None
            assert statistics(backend, given, options=Options(keep=0)).kept is None


def test_how_much_is_kept_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTRASTILE_KEEP_MIB", raising=False)
    with hosted() as host:
        backend, given = host.record.backend, block(host)
        for options in (Options(keep=1), Options(keep=3)):
            kept = statistics(backend, given, options=options).kept
            assert backend.keeps(M, N, "bfloat16", "cuda", options) == kept.nbytes
        for options in (Options(), Options(keep=0), Options(keep=3, tile=(1000, 1000))):
            assert backend.keeps(M, N, "bfloat16", "cuda", options) == 0
        assert backend.keeps(M, N, "float32", "cuda", Options(keep=3)) == 0
        assert backend.keeps(M, 0, "bfloat16", "cuda", Options(keep=3)) == 0
        monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", "sm80")
        assert backend.keeps(M, N, "bfloat16", "cuda", Options(keep=3)) == 0


def test_two_roundings_are_counted_where_exponentials_may_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONTRASTILE_KEEP_MIB", raising=False)
    once, twice = 2.0**-8, 2 * 2.0**-8 + 2.0**-16
    with hosted() as host:

        def rounding(keep: int | None, dtype: str = "bfloat16") -> float:
            found: float = host.record.backend.accuracy(dtype, "cuda", Options(keep=keep)).gradient_rounding
            return found

        assert (rounding(None), rounding(3)) == (once, twice)
        assert rounding(3, "float16") == rounding(None, "float16") == 2.0**-11
        assert rounding(3, "float32") == 0.0
        with monkeypatch.context() as kernels:
            kernels.setenv("CONTRASTILE_CUPY_KERNELS", "sm80")
            assert rounding(3) == once
        monkeypatch.setenv("CONTRASTILE_KEEP_MIB", "1")
        assert (rounding(None), rounding(0)) == (twice, once)


def test_the_only_row_may_be_kept() -> None:
    with hosted() as host:
        backend, whole, one = made(host, WHOLLY), block(host), weights(host, None)
        given = replace(whole, rows=whole.rows[:1], pairs=Pairs())
        memory = statistics(backend, given).kept
        row = ("row_negative_lse", "row_positive_lse", "row_weight", "row_target")
        side = {name: getattr(one, name)[:1] for name in row}
        host.calls.clear()
        assert backend.finished is not None
        backend.finished(given, replace(one, kept=memory, **side), None, "gradient", Options())
        names = [call.name for call in host.calls]
        assert names[-4:] == ["weighted_sm90", "finalize_rows", "weighted_sm90", "scale_cast"]
        assert not host.multiplied
