// The additive loss of one pair: softplus(-z x) and its slope -z sigmoid(-z x), z = +1 on a positive and -1 elsewhere.
#pragma once

#include "pairs.cuh"

namespace contrastile {

struct Softplus {
    float loss, slope;
};

// log(1 + e) for e in [0, 1]: e times a polynomial of degree 9, fitted to the least relative error (2^-27).
__device__ __forceinline__ float log1p_unit(float e) {
    float p = -0x1.a93368p-9f;
    p = fmaf(p, e, 0x1.453f0ep-6f);
    p = fmaf(p, e, -0x1.d29ccap-5f);
    p = fmaf(p, e, 0x1.b25360p-4f);
    p = fmaf(p, e, -0x1.397562p-3f);
    p = fmaf(p, e, 0x1.92f696p-3f);
    p = fmaf(p, e, -0x1.ff0f88p-3f);
    p = fmaf(p, e, 0x1.554c80p-2f);
    p = fmaf(p, e, -0x1.ffffbep-2f);
    p = fmaf(p, e, 1.0f);
    return p * e;
}

// x = -inf, what `admit` writes, costs nothing and has no slope. e is in [0, 1]: nothing overflows or cancels.
__device__ __forceinline__ Softplus softplus_of(float x, bool positive) {
    const float at = positive ? -x : x;
    const float e = exp2_fast(-fabsf(at) * static_cast<float>(LOG2E));
    const float rest = reciprocal_fast(1.0f + e);
    // NaN compares false, and e is NaN with it, so NaN comes out
    const float slope = at >= 0.0f ? rest : e * rest;
    return {(at > 0.0f ? at : 0.0f) + log1p_unit(e), positive ? -slope : slope};
}

}  // namespace contrastile
