// Scalar arithmetic.
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

// A sum in two parts: the rounded sum and its rounding error.
struct TwoPart {
    float high = 0.0f, low = 0.0f;

    // Knuth's two-sum. `low` of an infinite sum is NaN: see rest().
    __device__ __forceinline__ void operator+=(float x) {
        const float sum = high + x, seen = sum - high;
        low += (high - (sum - seen)) + (x - seen);
        high = sum;
    }

    __device__ __forceinline__ void operator+=(TwoPart x) {
        low += x.low;
        *this += x.high;
    }

    __device__ __forceinline__ float rest() const { return fabsf(high) < infinity() ? low : 0.0f; }
};

// 2^(dot scale + shift). The rounding error of the exponent is applied as a factor.
__device__ __forceinline__ float exact_power(float dot, float scale, float shift) {
    TwoPart exponent;
    exponent.high = __fmul_rn(dot, scale);
    exponent.low = fmaf(dot, scale, -exponent.high);
    exponent += shift;
    return exp2_fast(exponent.high) * fmaf(exponent.low, static_cast<float>(LN2), 1.0f);
}

// The value of the lane whose number differs in `bit`.
template <class T>
__device__ __forceinline__ T shuffle_xor(T x, int bit) {
    return __shfl_xor_sync(WHOLE_WARP, x, bit);
}

__device__ __forceinline__ TwoPart shuffle_xor(TwoPart x, int bit) {
    return {shuffle_xor(x.high, bit), shuffle_xor(x.low, bit)};
}

// A reference that may be subtracted from logits. An infinite maximum becomes 0, because inf - inf is NaN.
__device__ __forceinline__ float finite_or_zero(float top) { return fabsf(top) < infinity() ? top : 0.0f; }

__device__ __forceinline__ double finite_or_zero(double top) {
    return top > -infinity() && top < infinity() ? top : 0.0;
}

// A sum of exponentials times 2^by. An infinite sum stays infinite even if 2^by is 0.
__device__ __forceinline__ float rescaled(float sum, float by) { return sum < infinity() ? sum * exp2f(by) : sum; }

// log2 (2^a + 2^b); -inf for two -inf, inf for +inf, NaN for NaN.
__device__ __forceinline__ double merge(double a, double b) {
    const double shift = finite_or_zero(fmax(a, b));
    return shift + log2(exp2(a - shift) + exp2(b - shift));
}

// The power of two, from 2^-100 to 2^100, that brings `most` into [2^13, 2^14); 1 for 0, infinity and NaN.
__device__ __forceinline__ float near_top(float most) {
    if (!(most > 0.0f && most < infinity())) return 1.0f;
    int exponent;
    frexpf(most, &exponent);  // most is in [2^(exponent - 1), 2^exponent)
    exponent = min(max(14 - exponent, -100), 100);
    return __int_as_float((exponent + 127) << 23);
}

}  // namespace contrastile
