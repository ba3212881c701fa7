"""Kept exponentials on the host of the cupy backend, NumPy in CuPy's place: how much is kept, and when."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from cupy_hosted import block, hosted

pytest.importorskip("ml_dtypes")

from contrastile.backends.contract import Options

SHAPE = M, N, D = 901, 1037, 136
STRIDE, PLAN_BYTES = 1040, 56
# of 1 MiB 504 rows, of which whole tile rows; of 2 MiB all
KEPT = {1: 256, 2: M}
EXCLUDED: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "excluded": {"kind": "excluded"},
    "false negatives": {"kind": "drop"},
    "labels": {"kind": "target"},
    "narrow": {"shape": (M, N, 128)},
    "one direction": {},
    "a tile": {},
    "sm_80": {},
    "no rows": {"shape": (0, N, D)},
    "no room for a tile row": {"shape": (M, 2**11 + 2**10, D)},
}


@pytest.mark.parametrize("why", EXCLUDED)
def test_nothing_is_kept_where_it_cannot_be(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "sm_80":
        monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", "sm80")
    with hosted() as host:
        asked: dict[str, Any] = {"shape": SHAPE} | EXCLUDED[why]
        given = block(host, **asked)
        options = Options(keep=1, tile=(1000, 1000) if why == "a tile" else None)
        assert host.record.backend.keeping(given, why != "one direction", options).kept is None
        assert not [name for name in host.names() if "keeping" in name]


@pytest.mark.parametrize(
    ("m", "n", "mib", "rows"),
    [
        (1000, 1000, 1, 512),
        (1000, 1000, 2, 1000),
        (512, 1024, 1, 512),
        # a stride of 1032: 508 rows
        (512, 1025, 1, 256),
        (65536, 65536, 8192, 65536),
        (65536, 65536, 1023, 7936),
        (100, 2**20, 1, 0),
        (100, 2**12, 1, 100),
        (100, 2**12 + 2**11, 1, 0),
        (1, 1, 1, 1),
        (5, 1, 0, 0),
    ],
)
def test_whole_units_of_rows_are_kept(m: int, n: int, mib: int, rows: int) -> None:
    configs = importlib.import_module("contrastile.backends.cupy.configs")
    assert configs.kept_rows(m, n, mib * 2**20) == rows
    assert 2 * rows * configs.kept_stride(n) <= mib * 2**20


def test_room_is_an_option_or_else_the_environment_s_and_what_it_holds_is_said_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    once, twice = 2.0**-8, 2 * 2.0**-8 + 2.0**-16
    monkeypatch.delenv("CONTRASTILE_KEEP_MIB", raising=False)
    with hosted() as host:
        backend = host.record.backend

        def says(options: Options, dtype: str = "bfloat16") -> tuple[int, float]:
            """Bytes that are kept, as they are and as they are announced; the rounding of G."""
            kept = backend.keeping(block(host, SHAPE, dtype), True, options).kept
            size = 0 if kept is None else kept.nbytes
            assert backend.keeps(M, N, dtype, "cuda", options) == size
            return size, backend.accuracy(dtype, "cuda", options).gradient_rounding

        sizes = {mib: 2 * STRIDE * rows + PLAN_BYTES for mib, rows in KEPT.items()}
        assert says(Options()) == says(Options(keep=0)) == (0, once)
        assert [says(Options(keep=mib)) for mib in KEPT] == [(size, twice) for size in sizes.values()]
        assert says(Options(keep=3), "float16") == (0, 2.0**-11)
        assert says(Options(keep=3), "float32") == (0, 0.0)
        assert backend.keeps(M, 0, "bfloat16", "cuda", Options(keep=3)) == 0
        assert backend.keeps(M, N, "bfloat16", "cuda", Options(keep=3, tile=(1000, 1000))) == 0
        monkeypatch.setenv("CONTRASTILE_KEEP_MIB", "1")
        assert (says(Options()), says(Options(keep=0))) == ((sizes[1], twice), (0, once))
        monkeypatch.setenv("CONTRASTILE_KEEP_MIB", "0")
        assert (says(Options()), says(Options(keep=1))) == ((0, once), (sizes[1], twice))
        monkeypatch.setenv("CONTRASTILE_CUPY_KERNELS", "sm80")
        assert says(Options(keep=3)) == (0, once)
