// The power of two that keeps a float16 G in range.
#pragma once

#include "elements.cuh"

namespace contrastile {

// A power of two that brings `most` to 2^13 at least and under 2^14, within 2^-100 and 2^100; 1 for 0 and infinity.
__device__ __forceinline__ float near_top(float most) {
    if (!(most > 0.0f && most < infinity())) return 1.0f;
    int exponent;
    frexpf(most, &exponent);  // most is in [2^(exponent - 1), 2^exponent)
    exponent = min(max(14 - exponent, -100), 100);
    return __int_as_float((exponent + 127) << 23);
}

}  // namespace contrastile
