"""The cupy backend's host code with NumPy in place of CuPy: its launches, and the arithmetic of its tiles.

Tests on a GPU compare the results of the kernels with the oracle.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from cupy_hosted import KINDS, block, hosted, sums, weights

pytest.importorskip("ml_dtypes")

from contrastile.backends.contract import Options
from contrastile.backends.cupy.configs import (
    AMPERE,
    HOPPER,
    Shares,
    keeping_pays,
    kept_rows,
    kept_stride,
    weighted_shares,
)
from contrastile.backends.passes import forward_chunk

# one-sided passes of the second shape have kernels of their own
SHAPE, NARROW = (33, 47, 40), (300, 300, 100)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [SHAPE, NARROW])
def test_only_kernels_of_the_table_are_launched(
    shape: tuple[int, int, int], dtype: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns, width = shape
    with hosted() as host:
        backend, case = host.record.backend, block(host, shape, dtype, kind)
        for kernels in (None, "sm80"):
            if kernels is not None:
                monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", kernels)
            for two_sided in (True, False):
                for options in (Options(), Options(tile=(3 * rows // 5, 2 * columns // 3)), Options(precision="tf32")):
                    w = weights(host, case, two_sided)
                    backend.check(case, options)
                    statistics = backend.lse(case, two_sided, options)
                    vectors = [*statistics.rows, *(statistics.columns or ())]
                    assert [x.dtype.name for x in vectors] == ["float64"] * len(vectors)
                    assert [x.size for x in vectors] == [rows] * 3 + [columns] * 3 * two_sided
                    assert len({x.data.ptr for x in vectors}) == len(vectors)
                    backend.gradients(case, w, *sums(host, case), options)
                    for form in (None, "sums", "gradient"):
                        g = backend.finished(case, w, None, form, options)
                        assert (g.rows.dtype, g.rows.shape) == (dtype, (rows, width))
                        sum_dtype = {None: None, "sums": "float32", "gradient": dtype}[form]
                        column_sums = None if g.columns is None else (g.columns.dtype, g.columns.shape)
                        assert column_sums == (None if sum_dtype is None else (sum_dtype, (columns, width)))
                    if not case.pairs.limited:  # the sigmoid loss has no limits
                        backend.sigmoid(case, w.rows.weight, *sums(host, case), options)
        families = {name for name in host.launched if name.startswith("forward")}
        assert families == ({"forward_sm80"} if dtype == "float32" else {"forward_sm80", "forward_sm90"})


def test_a_first_call_compiles_all_its_kernels_and_those_of_its_gradients_before_it_launches_any() -> None:
    with hosted() as host:
        host.record.backend.keeping(block(host, SHAPE), True, Options())
        compiled_ahead = {kernel.partition("<")[0] for kernel, launches in host.compiled if not launches}
        assert compiled_ahead == {*host.launched, "gradient_sm90"} > {"forward_sm90", "fold"}
        # a call stops launching at its first unknown kernel until all are compiled
        host.record.backend.lse(block(host, SHAPE, kind="drop"), True, Options())
        assert [host.launched.count(kernel) for kernel in ("forward_sm90", "fold")] == [4, 4]


LARGE = ((4_194_304, 4_194_304), (65536, 1000), (1000, 65536), (1, 10**7), (10**7, 1), (40001, 40003))


def test_partial_results_of_the_forward_pass_stay_bounded() -> None:
    for (m, n), numbers, family in product(LARGE, (1, 2, 6), (HOPPER, AMPERE)):
        height, width = forward_chunk(m, n, family.shape, Options(), numbers, family.cluster)
        tile_columns, tile_rows = -(-width // family.bn), -(-height // family.bm)
        # a chunk that is one tile wide has one partial result per row, whatever its height
        assert numbers * (tile_columns * height + tile_rows * width) <= 16 * 2**20 * 1.1 + numbers * (height + width)


@pytest.mark.parametrize("multiprocessors", [1, 7, 132])
@pytest.mark.parametrize("columns", [1, 2, 5, 131, 300])
@pytest.mark.parametrize("rows", [1, 2, 3, 100, 131, 133, 400])
def test_the_number_of_blocks_that_share_a_tile_row_is_bounded(rows: int, columns: int, multiprocessors: int) -> None:
    shares = Shares.of(128 * rows - 5, 128 * columns - 3, multiprocessors)
    assert (shares.rows, shares.blocks) == (rows, min(multiprocessors, rows * columns))
    # block b begins at tile b (rows columns) // blocks, as in narrow_sm90.cuh
    starts = np.arange(shares.blocks + 1) * (rows * columns) // shares.blocks
    assert (np.diff(starts) > 0).all()
    ends = (np.arange(rows) + 1) * columns
    first = np.searchsorted(starts, ends - columns, side="right")
    last = np.searchsorted(starts, ends - 1, side="right")
    assert (last - first + 1).max() <= shares.most <= columns


@pytest.mark.parametrize(
    ("m", "n", "mib", "rows"),
    [
        (1000, 1000, 1, 512),
        (1000, 1000, 2, 1000),
        # a stride of 1032: 508 rows
        (512, 1025, 1, 256),
        (65536, 65536, 8192, 65536),
        (65536, 65536, 1023, 7936),
        (100, 2**20, 1, 0),
        (1, 1, 1, 1),
        (5, 1, 0, 0),
    ],
)
def test_rows_are_kept_in_whole_units(m: int, n: int, mib: int, rows: int) -> None:
    assert kept_rows(m, n, mib * 2**20) == rows
    assert 2 * rows * kept_stride(n) <= mib * 2**20


def test_exponentials_are_kept_where_keeping_them_is_faster_on_a_hopper_gpu() -> None:
    sizes = [2**k for k in range(8, 15)]
    pays = {width: [b for b in sizes if keeping_pays(b, b, width)] for width in (192, 256, 384, 512, 768, 1024)}
    two_largest = [8192, 16384]
    assert pays == {192: [16384], 256: two_largest, 384: [], 512: two_largest, 768: [16384], 1024: two_largest}
    assert [weighted_shares(b, 512, b) for b in (1, 64, 2048, 4096, 8192, 12288)] == [1, 1, 4, 2, 1, 2]
