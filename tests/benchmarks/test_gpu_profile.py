"""What the profilers print becomes the tables, and the page says what the records say."""

from __future__ import annotations

import gpu_profile
from gpu_run import profile_tables, profiler

STEPS = ["32768,512,100,bfloat16,ieee", "16384,512,100,float32,split"]


def printed(*kernels: tuple[str, float, float]) -> str:
    """What ncu prints for (name, nanoseconds, tensor share) of each launch."""
    names = ["ID", "Kernel Name", *profiler.METRICS.values()]
    units = ["", "", *["%"] * len(profiler.METRICS)]
    lines = ["==PROF== Connected", '{"step": 1}', ",".join(f'"{x}"' for x in names), ",".join(f'"{x}"' for x in units)]
    for number, (name, ns, tensor) in enumerate(kernels):
        values = dict.fromkeys(profiler.METRICS, 7.0) | {"ns": ns, "tensor": tensor}
        lines.append(",".join(f'"{x}"' for x in (number, name, *(f"{v:,}" for v in values.values()))))
    return "\n".join(lines)


def test_launches_of_a_kernel_add_up_and_shares_are_weighted_by_time() -> None:
    text = printed(
        ("spin_kernel(long)", 1, 0),
        ("lse_tiles", 3000, 80),
        ("lse_tiles", 1000, 0),
        ("void at::native::vectorized<float>(int)", 50, 0),
        ("spin_kernel(long)", 1, 0),
        ("nvjet_sm90_tss_128x256_64x4_2x1_v_badd_coopA_NTN", 2000, 90),
    )
    found = {(row["step"], row["kernel"]): row for row in profiler.rows_of(text, STEPS)}
    assert list(found) == [(STEPS[0], "lse_tiles"), (STEPS[0], "torch"), (STEPS[1], "cuBLAS NTN")]
    tiles = found[STEPS[0], "lse_tiles"]
    assert (tiles["launches"], tiles["ns"], tiles["tensor"], tiles["read"]) == (2, 4000, 60, 14)
    page = profile_tables.kernels(list(found.values()))
    assert "| `lse_tiles` | 2 | 4.00 | 98.8 % | 60 % |" in page
    assert "scale 100, float32/split | `cuBLAS NTN` | 1 | 2.00 | 100.0 % | 90 % |" in page


def test_verdicts_are_counted_by_dtype() -> None:
    rows = [
        {"dtype": "float32", "status": "pass", "ratio": 0.25},
        {"dtype": "float32", "status": "skip", "ratio": None},
        {"dtype": "float32/tf32", "status": "fail", "ratio": 3.0},
    ]
    one, two = profile_tables.counted(rows)
    assert one == {"dtype": "float32", "pass": 1, "fail": 0, "skip": 1, "worst": 0.25}
    assert (two["fail"], two["worst"]) == (1, 3.0)
    assert "| float32/tf32 | 0 | 1 | 0 | 3.00 |" in profile_tables.verified([one, two])


def test_verdicts_stand_beside_each_other() -> None:
    same = {"property": "value", "case": "hot"}
    rows = [
        {**same, "dtype": "float32", "status": "pass", "ratio": 0.123456},
        {**same, "dtype": "float16", "status": "skip", "ratio": None},
        {**same, "dtype": "float32/tf32", "status": "fail", "ratio": 3.0},
    ]
    (one,) = profile_tables.beside(rows)
    assert one == {**same, "float32": 0.123, "float16": "skip", "float32/tf32": "fail 3.0"}


def test_a_rate_counts_the_products_that_a_kernel_holds() -> None:
    rows = [{"step": "1000,500,1,float32,ieee", "kernel": x, "launches": 1, "ns": 1e3} for x in ("add_product", "fold")]
    text = profile_tables.times(rows)
    assert "| `add_product` | 1 | 1.00 | 50.0 % | 2,000 |" in text
    assert "| `fold` | 1 | 1.00 | 50.0 % | - |" in text


def test_a_tool_that_is_not_clean_is_said_to_be_so() -> None:
    rows = [
        {"tool": "memcheck", "clean": True, "summary": "ERROR SUMMARY: 0 errors", "verify": "PASS"},
        {"tool": "racecheck", "clean": False, "summary": "RACECHECK SUMMARY: 2 hazards", "verify": "PASS"},
    ]
    text = profile_tables.sanitizers(rows)
    assert "| memcheck | yes |" in text
    assert "| racecheck | **no** |" in text


def test_the_committed_page_is_what_the_records_say() -> None:
    assert gpu_profile.main(["--check"]) == 0
