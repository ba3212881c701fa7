"""What the profilers print becomes the tables, and the page says what the records say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gpu_profile
import pytest
from gpu_run import profile_limits, profile_sanitizers, profile_tables, profile_times, profiler

STEPS = ["32768,512,100,bfloat16,ieee", "16384,512,100,float32,split"]
NVJET = "nvjet_sm90_tss_128x256_64x4_2x1_v_badd_coopA_"
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
TMA_READ = "void cutlass::Kernel2<cutlass_75_tensorop_s1688gemm_bf16_64x64_nn_align1>(T1::Params)"
GRADIENT = "void contrastile::gradient_sm90<contrastile::bfloat16, (int)0>(contrastile::TensorMap)"


def printed(*kernels: tuple[str, float, float]) -> str:
    """What ncu prints for (name, nanoseconds, tensor share) of each launch."""
    names = ["ID", "Kernel Name", *profiler.METRICS.values()]
    units = ["", "", *["%"] * len(profiler.METRICS)]
    lines = ["==PROF== Connected", '==PROF== Profiling "lse_tiles" - 1: 0%....50%....100% - 2 passes', '{"step": 1}']
    lines += [",".join(f'"{x}"' for x in each) for each in (names, units)]
    for number, (name, ns, tensor) in enumerate(kernels):
        values = dict.fromkeys(profiler.METRICS, 7.0) | {"ns": ns, "tensor": tensor}
        lines.append(",".join(f'"{x}"' for x in (number, name, *(f"{v:,}" for v in values.values()))))
    return "\n".join(lines)


def test_launches_of_a_kernel_add_up_and_shares_are_weighted_by_time() -> None:
    text = printed(
        (SPIN, 1, 0),
        ("lse_tiles", 3000, 80),
        ("lse_tiles", 1000, 0),
        ("void at::native::vectorized<float>(int)", 50, 0),
        ("(anonymous namespace)::spin_kernel(long)", 1, 0),
        (NVJET + "NTN", 2000, 90),
    )
    found = {(row["step"], row["kernel"]): row for row in profiler.rows_of(text, "triton", STEPS)}
    assert list(found) == [(STEPS[0], "lse_tiles"), (STEPS[0], "torch"), (STEPS[1], "cuBLAS NT")]
    tiles = found[STEPS[0], "lse_tiles"]
    assert (tiles["launches"], tiles["ns"], tiles["tensor"], tiles["read"], tiles["passes"]) == (2, 4000, 60, 14, 2)
    assert {row["backend"] for row in found.values()} == {"triton"}


@pytest.mark.parametrize(
    ("raw", "short"),
    [
        (GRADIENT, "gradient_sm90"),
        ("void contrastile::fold<(int)0>(contrastile::FoldArguments)", "fold"),
        ("plan_forward", "plan_forward"),
        ("gradient_tiles", "gradient_tiles"),
        (NVJET + "NNT", "cuBLAS NN"),
        (TMA_READ, "cuBLAS NN"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "cuBLAS TN"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(cublasLt::cublasSplitKParams<float>)", "cuBLAS"),
        ("void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange>(int)", "torch"),
        ("cupy_copy__float32_bfloat16", "CuPy"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("(anonymous namespace)::somebody(int)", "somebody"),
        ("", "unnamed"),
    ],
)
def test_kernels_are_named_by_whose_they_are(raw: str, short: str) -> None:
    assert profiler.kernel(raw) == short


def test_a_trace_is_cut_at_the_marks_and_host_calls_are_no_kernels() -> None:
    def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, Any]:
        return {"name": name, "ts": ts, "dur": dur, "cat": cat, "ph": "X"}

    events = [
        event("warming", 0, 9),
        # a trace is in no order
        event("lse_tiles", 5, 3),
        event("lse_tiles", 9, 1),
        event("cudaLaunchKernel", 6, 7, "cuda_runtime"),
        event("Memset (Device)", 12, 0.5, "gpu_memset"),
        event(SPIN, 4, 1),
        event(NVJET + "NNT", 2, 2),
        event(SPIN, 1, 1),
        event(SPIN, 13, 1),
        event(NVJET + "NNT", 14, 4),
    ]
    order = ["bfloat16", "step", "bfloat16"]
    found = profile_times.stretches(events, order)
    assert profile_times.total(found["bfloat16"]) == 6000
    assert profile_times.by_kernel(found["step"], 2) == [
        {"kernel": "lse_tiles", "launches": 1, "ns": 2000.0},
        {"kernel": "Memset", "launches": 0, "ns": 250.0},
    ]
    with pytest.raises(RuntimeError, match="must have 4 marks"):
        profile_times.stretches(events, [*order, "step"])


def record() -> dict[str, Any]:
    """A record of one step of two kernels."""
    about = {"backend": "cupy", "step": "1000,500,100,bfloat16,ieee"}
    counters = {"tensor": 70.0, "read": 2e6, "written": 1e6, "cycles": 1000.0, "xu": 2640.0}
    return {
        "environment": {"date": "2026-01-02", "commit": None, "device": "G", "multiprocessors": 132},
        "times": [
            {**about, "kernel": "gradient_sm90", "launches": 2, "ns": 2000.0},
            {**about, "kernel": "cuBLAS NN", "launches": 1, "ns": 1000.0},
        ],
        "ceilings": [{**about, "bfloat16": 1e6, "copy": 2000.0}],
        "ncu": [{**about, "kernel": "gradient_sm90", "launches": 2, "ns": 1900.0, **counters}],
    }


def test_limits_follow_from_counters_rates_and_sizes() -> None:
    (backend,) = profile_limits.backends(record())
    ours, blas = profile_limits.lines(record(), backend, "1000,500,100,bfloat16,ieee")
    # 2 1000^2 500 FLOP at 10^6 a ns; 2640 instructions of 32 results at 132 x 16 a cycle; 3 10^6 bytes at 2000 a ns
    assert (ours.kernel, ours.products, ours.special, ours.bytes) == ("gradient_sm90", 0.5, 0.04, 0.75)
    assert (ours.limit, ours.left, ours.tensor) == (("bytes", 0.75), 500.0, 0.7)
    assert (blas.limit, blas.left, blas.special) == (("products", 1.0), 0.0, None)
    text = profile_tables.kernels(record(), "cupy")
    assert "| `gradient_sm90` | 2 | 2.00 | 66.7 % | 500 | 70 % | 50 % | 4 % | **75 %** | 0.500 |" in text
    assert "| `cuBLAS NN`, dQ | 1 | 1.00 | 33.3 % | 1,000 | - | **100 %** | - | - | 0 |" in text
    assert "| **all** | 3 | 3.00 | 100.0 % |" in text


def test_products_count_what_tensor_cores_carry_out() -> None:
    one = 2.0 * 16384**2 * 512
    assert profile_limits.work("lse_tiles", STEPS[1]) == (6 * one, "bfloat16")
    assert profile_limits.work("cuBLAS NT", STEPS[1]) == (6 * one, "bfloat16")
    tf32 = STEPS[1].replace("split", "tf32")
    assert profile_limits.work("gradient_tiles", tf32) == (one, "tf32")
    assert profile_limits.work("cuBLAS NN", tf32) == (3 * one, "bfloat16")
    assert profile_limits.work("fold", tf32)[0] == 0


@pytest.mark.parametrize("missing", ["times", "ncu", "ceilings", "environment", "backend"])
def test_a_section_shows_what_a_record_has(missing: str) -> None:
    data = record()
    if missing == "environment":
        del data[missing]["multiprocessors"]
    elif missing == "backend":
        for part in ("times", "ncu", "ceilings"):
            for row in data[part]:
                del row[missing]
        data["ceilings"] = []
    else:
        del data[missing]
    text = profile_tables.section(data)
    assert "`gradient_sm90`" in text
    assert ("| 70 % |" in text) == (missing != "ncu")
    assert ("triton" in text) == (missing == "backend")
    assert "#### First call" not in text


def test_kernels_of_this_package_are_known_by_its_sources() -> None:
    known = profiler.own_kernels()
    assert {"lse_tiles", "gradient_tiles", "fold", "plan_backward", "measure", "finalize_rows"} <= known
    assert set(profile_limits.PRODUCTS) <= known


FOUND = f"""========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 2 bytes
=========     at {TMA_READ}+0xbc0
=========     by thread (0,0,0) in block (0,0,2)
=========     Address 0x7f2db081ee20
========= 
========= Error: Race reported between Write access at {GRADIENT}+0x7e0
=========     and Read access at {GRADIENT}+0xc50 [64 hazards]
========= 
========= Error: Race reported between Write access at {GRADIENT}+0x7e0
=========     and Read access at {GRADIENT}+0xc50 [88 hazards]
========= 
========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on CUDA API call to cuGetProcAddress.
=========     Saved host backtrace up to driver entry point at error
========= 
PASS: 60 passed, 0 failed, 12 skipped; largest error 0.773 of its bound
========= Warning: Error buffer overflow has been detected. Some records have been dropped
========= 4 errors were skipped (error buffer overflow).
========= ERROR SUMMARY: 7 errors
========= ERROR SUMMARY: 3 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""  # noqa: W291


def test_findings_are_laid_to_the_kernel_that_they_are_in() -> None:
    row = profile_sanitizers.report(FOUND)
    assert (row["own"], row["others"]) == ({"gradient_sm90": 2}, {"cuBLAS NN": 1})
    assert (len(row["elsewhere"]), row["lost"], row["clean"]) == (1, 7, False)
    assert row["first"]["gradient_sm90"][1].endswith("[64 hazards]")
    text = profile_tables.sanitizers([{"backend": "cupy", "tool": "racecheck", "what": "verify", **row}])
    assert "| cupy | racecheck | verify | **no** | `gradient_sm90`: 2 | `cuBLAS NN`: 1, " in text
    assert "| 7 | ERROR SUMMARY: 7 errors | PASS: 60 passed, 0 failed, 12 skipped |" in text


def test_a_tool_is_clean_where_only_others_kernels_are_reported() -> None:
    blocks = FOUND.split("========= \n")
    row = profile_sanitizers.report(blocks[0] + "PASS: all\n========= ERROR SUMMARY: 1 error\n")
    assert row["clean"]
    checks = "304 checks, {} failed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert profile_sanitizers.report(checks.format(0))["clean"]
    assert profile_sanitizers.report(checks.format(0).replace("(0 errors", "(3 errors"))["lost"] == 3
    assert not profile_sanitizers.report(checks.format(10))["clean"]
    assert not profile_sanitizers.report("PASS: all\n")["clean"]
    assert profile_sanitizers.report("cupy, all memory poisoned: pass, 80 checks passed, 0 failed\n")["clean"]
    assert not profile_sanitizers.report("cupy, all memory poisoned: pass, 0 checks passed, 0 failed\n")["clean"]
    assert not profile_sanitizers.report("cupy, all memory poisoned: fail, 8 checks passed, 1 failed\n")["clean"]
    assert not profile_sanitizers.report("========= ERROR SUMMARY: 0 errors\n")["clean"]
    assert profile_sanitizers.report("2 steps ran\n========= ERROR SUMMARY: 0 errors\n")["clean"]
    assert not profile_sanitizers.report("0 steps ran\n========= ERROR SUMMARY: 0 errors\n")["clean"]


def test_verdicts_are_counted_by_backend_and_dtype() -> None:
    rows = [
        {"dtype": "float32", "status": "pass", "ratio": 0.25},
        {"dtype": "float32", "status": "skip", "ratio": None},
        {"dtype": "float32", "status": "pass", "ratio": 0.5, "backend": "cupy"},
        {"dtype": "float32/tf32", "status": "fail", "ratio": 3.0},
    ]
    one, other, two = profile_tables.counted(rows)
    assert one == {"backend": "triton", "dtype": "float32", "pass": 1, "fail": 0, "skip": 1, "worst": 0.25}
    assert (other["backend"], other["pass"], two["fail"], two["worst"]) == ("cupy", 1, 1, 3.0)
    assert "| triton | float32/tf32 | 0 | 1 | 0 | 3.00 |" in profile_tables.verified([one, other, two])


def test_verdicts_stand_beside_each_other() -> None:
    same = {"property": "value", "case": "hot"}
    rows = [
        {**same, "dtype": "float32", "status": "pass", "ratio": 0.123456},
        {**same, "dtype": "float16", "status": "skip", "ratio": None},
        {**same, "dtype": "float32/tf32", "status": "fail", "ratio": 3.0},
    ]
    (one,) = profile_tables.beside(rows)
    assert one == {**same, "float32": 0.123, "float16": "skip", "float32/tf32": "fail 3.0"}


def test_a_record_keeps_other_backends_of_the_same_commit_alone(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    facts = {"commit": "a", "torch": "2"}
    assert gpu_profile.kept(path, facts) == {"environment": facts}
    path.write_text(json.dumps({"environment": facts, "ncu": [1]}), encoding="utf-8")
    assert gpu_profile.kept(path, {**facts, "date": "d"})["ncu"] == [1]
    assert "ncu" not in gpu_profile.kept(path, {**facts, "commit": "b"})
    old = [{"backend": "triton", "n": 1}, {"backend": "cupy", "n": 1}]
    assert gpu_profile.merged(old, [{"backend": "triton", "n": 2}]) == [old[1], {"backend": "triton", "n": 2}]


def test_the_committed_page_is_what_the_records_say() -> None:
    assert gpu_profile.main(["--check"]) == 0
