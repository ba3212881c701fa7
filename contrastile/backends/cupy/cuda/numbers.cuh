// Scalar arithmetic of the epilogues.
#pragma once

#include "elements.cuh"

namespace contrastile {

constexpr unsigned WHOLE_WARP = 0xffffffffu;

// One MUFU instruction; results under 2^-126 are flushed to 0. Relative error under 2^-22.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// One MUFU instruction; relative error under 2^-23.
__device__ __forceinline__ float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The value of the lane that differs in `bit`.
__device__ __forceinline__ float across(float x, int bit) { return __shfl_xor_sync(WHOLE_WARP, x, bit); }

// What may be subtracted from logits: an infinite maximum may not, inf - inf is NaN.
__device__ __forceinline__ float finite_or_zero(float top) { return fabsf(top) < infinity() ? top : 0.0f; }

__device__ __forceinline__ double finite_or_zero(double top) {
    return top > -infinity() && top < infinity() ? top : 0.0;
}

// A sum of exponentials times 2^by; what is infinite stays so, also where 2^by is 0.
__device__ __forceinline__ float rescaled(float sum, float by) { return sum < infinity() ? sum * exp2f(by) : sum; }

// log2 (2^a + 2^b); -inf for two -inf, inf for +inf, NaN for NaN.
__device__ __forceinline__ double merge(double a, double b) {
    const double shift = finite_or_zero(fmax(a, b));
    return shift + log2(exp2(a - shift) + exp2(b - shift));
}

}  // namespace contrastile
