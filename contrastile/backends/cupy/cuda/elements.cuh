// Feature types and their conversions. No toolkit header is included: NVRTC then needs no include path.
#pragma once

namespace contrastile {

struct bfloat16 {
    unsigned short bits;
};

struct float16 {
    unsigned short bits;
};

template <class T>
constexpr bool IS_BFLOAT16 = false;
template <>
constexpr bool IS_BFLOAT16<bfloat16> = true;

__device__ __forceinline__ float widen(bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }

__device__ __forceinline__ float widen(float16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ __forceinline__ float widen(float x) { return x; }

// Rounded to nearest even; NaN stays NaN, what is too large becomes infinite.
template <class T>
__device__ __forceinline__ T narrow(float x) {
    if constexpr (sizeof(T) == 4) {
        return x;
    } else {
        T y;
        if constexpr (IS_BFLOAT16<T>)
            asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        else
            asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
}

// Rounds two numbers into one 32-bit word, the first in the low half: the order of tensor cores and 4-byte stores.
template <class T>
__device__ __forceinline__ unsigned narrow_pair(float low, float high) {
    unsigned y;
    if constexpr (IS_BFLOAT16<T>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

constexpr double LOG2E = 1.4426950408889634;
constexpr double LN2 = 0.6931471805599453;

// scale log2 e, rounded once. Every kernel uses this alpha, so that the rounding error is the same in all logits.
__device__ __forceinline__ float in_powers_of_two(float scale) {
    return static_cast<float>(static_cast<double>(scale) * LOG2E);
}

}  // namespace contrastile
