// What the streamed backward needs beside the package's headers: counters between blocks, and the products of a
// warpgroup with operands whose contraction is not the contiguous dimension: D (64 x 256) += A (64 x 16) B (16 x 256).
#pragma once

#include "pipeline_sm90.cuh"

namespace contrastile {

// ---- counters in global memory, zeroed before the launch; one thread adds, one thread waits

__device__ __forceinline__ void counter_add(unsigned* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Between an acquire or a release and the copies that it is about.
__device__ __forceinline__ void order_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void counter_wait(const unsigned* counter, unsigned target) {
    unsigned found;
#ifdef CONTRASTILE_WATCHDOG
    int spins = 0;
#endif
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
#ifdef CONTRASTILE_WATCHDOG
        if (++spins > CONTRASTILE_WATCHDOG) __trap();
#endif
    } while (found < target);
    order_copies();
}

// ---- products

#define CONTRASTILE_D8(i)                                                                                       \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define CONTRASTILE_D32(i) CONTRASTILE_D8(i), CONTRASTILE_D8(i + 8), CONTRASTILE_D8(i + 16), CONTRASTILE_D8(i + 24)

// d = a b, added to d where `add`; bfloat16. ACROSS_A: a is stored across its contraction; b always is.
template <int ACROSS_A>
__device__ __forceinline__ void product_wide(float (&d)[WIDE_VALUES], unsigned long long a, unsigned long long b,
                                             bool add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, %131, 1;\n}"
        : CONTRASTILE_D32(0), CONTRASTILE_D32(32), CONTRASTILE_D32(64), CONTRASTILE_D32(96)
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(ACROSS_A));
}

#undef CONTRASTILE_D32
#undef CONTRASTILE_D8

// A stage: two boxes of A, one for each consumer, and four of B, which both read.
constexpr int WIDE_A = 2 * BOX_BYTES, WIDE_STAGE = 6 * BOX_BYTES;

// The products of one output tile of 128 x 256, 64 rows a consumer; every stage is read by both consumers.
template <int STAGES, int ACROSS_A>
__device__ __forceinline__ void multiply_wide(unsigned base, unsigned full, unsigned empty, Cursor<STAGES>& at,
                                              int steps, int consumer, int lane, float (&acc)[WIDE_VALUES]) {
    int last = 0;
    for (int k = 0; k < steps; ++k) {
        barrier_wait(full + 8 * at.stage, at.parity);
        const unsigned stage = base + at.stage * WIDE_STAGE, mine = stage + consumer * BOX_BYTES;
        const unsigned a = ACROSS_A ? operand_across(mine) : operand(mine), b = operand_across(stage + WIDE_A);
        products_begin();
#pragma unroll
        for (int part = 0; part < BK / 16; ++part)
            product_wide<ACROSS_A>(acc, descriptor(a + (ACROSS_A ? 128 : 2) * part), descriptor(b + 128 * part),
                                   part > 0 || k > 0);
        products_commit();
        products_done<1>();
        if (k > 0 && lane < 2) barrier_arrive(empty + 8 * last, lane);
        last = at.stage;
        at.step();
    }
    products_done<0>();
    if (lane < 2) barrier_arrive(empty + 8 * last, lane);
}

__device__ __forceinline__ void add_pair(float* to, float x, float y) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y) : "memory");
}

// A warp's 16 rows of the tile, added to what is there where `add`; `out` is the first element of the thread's first
// row. Nobody waits for the sums, which L2 makes.
__device__ __forceinline__ void put_wide(const float (&acc)[WIDE_VALUES], float* out, int stride, bool add) {
#pragma unroll
    for (int g = 0; g < WIDE_COLUMNS / 8; ++g)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            float* to = out + q * 8 * stride + 8 * g;
            const float x = acc[4 * g + 2 * q], y = acc[4 * g + 2 * q + 1];
            if (add)
                add_pair(to, x, y);
            else
                *reinterpret_cast<float2*>(to) = make_float2(x, y);
        }
}

}  // namespace contrastile
