// s G from dots, s = plan->gradient_scale. For an admitted pair G_ij = u_i 2^(x - L_i) + v_j 2^(x - M_j), less
// u_i t_i + v_j t'_j if ids make it positive. G is formed in float32, positives included, and rounded once.
//
// G of a positive by index is computed elsewhere, in double. If a row or column is certain of a positive by ids, p is near
// t and the difference would cancel: certain_gradient avoids that.
#pragma once

#include "pairs.cuh"

namespace contrastile {

enum Exponent {
    SHARED = 0,  // 2^(x - r) (u_i' + v_j'): one exponential; if plan->fast
    ROWS = 1,    // u_i 2^(x - L_i): one direction, one exponential
    BOTH = 2     // two exponentials, right for any logits
};

__device__ __forceinline__ int exponent_of(const GradientArguments& a) {
    return a.column.log == nullptr ? ROWS : a.plan->fast ? SHARED : BOTH;
}

// The numbers of one row or column that the epilogue reads.
struct Side {
    float first;   // SHARED: w s 2^(r - L); else the high part of L
    float weight;  // w s 2^-low; not read if SHARED
    float taken;   // w s t, which G of a positive by ids subtracts
};

// For rows and columns outside the chunk, whose G is not stored, and for all columns of a one-directional loss.
__device__ __forceinline__ Side no_side() { return {0.0f, 0.0f, 0.0f}; }

// Element i of the block's vectors.
template <int MASK>
__device__ __forceinline__ Side side_of(const GradientSide& side, long long i, int exponent) {
    if (side.log == nullptr) return no_side();
    return {(exponent == SHARED ? side.folded : side.log)[i], side.weight[i], MASK == TARGET ? side.taken[i] : 0.0f};
}

// G of an admitted pair, before a positive's target is subtracted. A side whose limit the pair exceeds adds nothing, for
// its exponential may be infinite. alpha and reference: the plan's. LIMITED: sides have limits.
template <int EXPONENT, bool LIMITED = false>
__device__ __forceinline__ float admitted_gradient(float dot, float alpha, float reference, float row_first,
                                                   float row_weight, float column_first, float column_weight,
                                                   bool beyond_row = false, bool beyond_column = false) {
    if (EXPONENT == SHARED) {
        const float power = exp2_fast(fmaf(dot, alpha, -reference));
        if (!LIMITED) return power * (row_first + column_first);
        // compiles to one predicated instruction per side, without selects
        float value = 0.0f;
        if (!beyond_row) value = power * row_first;
        if (!beyond_column) value = fmaf(power, column_first, value);
        return value;
    }
    // a select, not a product with 0: a weight of 0 silences its side even if the logit is NaN
    const bool no_row = beyond_row || row_weight == 0.0f, no_column = beyond_column || column_weight == 0.0f;
    const float along_row = no_row ? 0.0f : row_weight * exp2_fast(fmaf(dot, alpha, -row_first));
    if (EXPONENT == ROWS) return along_row;
    const float along_column = column_weight * exp2_fast(fmaf(dot, alpha, -column_first));
    return along_row + (no_column ? 0.0f : along_column);
}

// One side's part of G of a positive by ids, from element i of its vectors: w ((q - t) - q s) with q = 2^(x - P) and
// s = 2^N / (2^N + 2^P). For a row's only positive q and t are 1, and the result is -w s without cancellation.
//
// For such a positive x - P is 0, up to the rounding of P in double: less than 2^-44 of P. So a smaller difference, or
// one below the 2^-24 to which an exponential is exact, counts as 0.
__device__ __forceinline__ float certain_gradient(float dot, float alpha, const GradientSide& side, long long i) {
    if (side.log == nullptr) return 0.0f;
    const float4 packed = reinterpret_cast<const float4*>(side.certain)[i];
    if (packed.z == 0.0f) return 0.0f;
    float above = fmaf(dot, alpha, -packed.x) - packed.y;
    if (fabsf(above) < fmaf(fabsf(packed.x), 0x1p-44f, 0x1p-24f)) above = 0.0f;  // false for an infinite P
    const float q = exp2_fast(above);
    return fmaf(packed.z, q, -side.taken[i]) - packed.w * q;
}

}  // namespace contrastile
