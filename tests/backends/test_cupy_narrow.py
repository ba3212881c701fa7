"""The kernels of narrow features on the host: where they are used, and how a chunk is divided among their blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cupy_hosted import block, hosted, sums, weights

pytest.importorskip("ml_dtypes")

from contrastile.backends.contract import Options

N = 300


@pytest.mark.parametrize(("width", "dtype"), [(65, "float16"), (100, "bfloat16"), (128, "bfloat16")])
def test_rows_alone_of_narrow_features_have_kernels_of_their_own(width: int, dtype: str) -> None:
    with hosted() as host:
        given, backend = block(host, (N, N, width), dtype, "excluded"), host.record.backend
        backend.lse(given, False, Options())
        found = host.names()
        assert found[found.index("narrow_forward_sm90") + 1] == "fold"
        # where the fast path does not hold, the tile kernel takes the rows
        assert found[-2:] == ["forward_sm90", "fold"]
        assert found.count("forward_sm90") == 1
        w = weights(host, given)
        for primitive, arguments in (
            (backend.gradients, (w, sums(host, given)[0], None)),
            (backend.finished, (w, None, None)),
        ):
            primitive(given, *arguments, Options())
            found = host.names()
            assert found[found.index("narrow_gradient_sm90") + 1] == "narrow_join"
            assert "gradient_sm90" not in found
            assert not host.multiplied


@pytest.mark.parametrize(
    ("width", "dtype", "tile"),
    [(64, "bfloat16", None), (129, "bfloat16", None), (128, "float32", None), (128, "bfloat16", (64, 64))],
)
def test_other_features_and_tiles_that_are_asked_for_have_not(width: int, dtype: str, tile: Any) -> None:
    with hosted() as host:
        given, backend, options = block(host, (N, N, width), dtype, "excluded"), host.record.backend, Options(tile=tile)
        backend.lse(given, False, options)
        backend.finished(given, weights(host, given), None, None, options)
        assert not any(name.startswith("narrow") for name in host.names())
        assert not backend.rows_alone(width, dtype, options)


def test_both_sides_together_have_not() -> None:
    with hosted() as host:
        given, backend = block(host, (N, N, 128), kind="excluded"), host.record.backend
        backend.lse(given, True, Options())
        backend.finished(given, weights(host, given), None, "gradient", Options())
        backend.gradients(given, weights(host, given), *sums(host, given), Options())
        backend.gradients(given, weights(host, given), None, sums(host, given)[1], Options())
        # its kernel writes along the rows of the sums
        across = sums(host, given)[0].T.copy().T
        backend.gradients(given, weights(host, given), across, None, Options())
        assert not any(name.startswith("narrow") for name in host.names())


def test_sums_that_do_not_fit_in_the_workspace_are_made_in_parts() -> None:
    with hosted() as host:
        given = block(host, (3000, N, 128))
        host.record.backend.finished(given, weights(host, given), None, None, Options(workspace=1))
        launches = [call.arguments for call in host.calls if call.name == "narrow_gradient_sm90"]
        chunks = [(x.row, x.height, x.column, x.width) for x in (each.gradient.chunk for each in launches)]
        # 1 MiB holds 2,048 rows of 128 float32
        assert chunks == [(0, 2048, 0, N), (2048, 952, 0, N)]
        assert all(x.fresh for x in launches)


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
