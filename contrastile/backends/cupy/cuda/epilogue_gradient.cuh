// s G from dots, s = plan->gradient_scale: G_ij = u_i 2^(x - L_i) + v_j 2^(x - M_j) of an admitted pair, less
// u_i t_i + v_j t'_j where ids make it positive. Formed in float32, positive included, and rounded once.
//
// Of a positive by index all of G comes from elsewhere, formed in double. One by ids whose row or column is certain of it
// has p near t, and what is left of the difference is the gradient: it takes another form, certain_part.
#pragma once

#include "pairs.cuh"

namespace contrastile {

enum Exponent {
    SHARED = 0,  // 2^(x - r) (u_i' + v_j'): one exponential; where plan->fast
    ROWS = 1,    // u_i 2^(x - L_i): one direction, one exponential
    BOTH = 2     // two exponentials, right for any logits
};

__device__ __forceinline__ int exponent_of(const GradientArguments& a) {
    return a.column.log == nullptr ? ROWS : a.plan->fast ? SHARED : BOTH;
}

// What the epilogue needs of a row or of a column.
struct Side {
    float first;   // SHARED: w s 2^(r - L); else the high part of L
    float weight;  // w s 2^-low; not read where SHARED
    float taken;   // w s t, what a positive by ids takes away
};

// What lies outside the chunk, its G is not stored; and every column of a loss of one direction.
__device__ __forceinline__ Side no_side() { return {0.0f, 0.0f, 0.0f}; }

// Element i of the block's vectors.
template <int MASK>
__device__ __forceinline__ Side side_of(const GradientSide& side, long long i, int exponent) {
    if (side.log == nullptr) return no_side();
    return {(exponent == SHARED ? side.folded : side.log)[i], side.weight[i], MASK == TARGET ? side.taken[i] : 0.0f};
}

// G of an admitted pair, the positive not yet subtracted; a side beyond whose limit it is has no part in it, for its
// exponential may be infinite. alpha and reference as in the plan. LIMITED: a side may be beyond its limit.
template <int EXPONENT, bool LIMITED = false>
__device__ __forceinline__ float attraction(float dot, float alpha, float reference, float row_first, float row_weight,
                                            float column_first, float column_weight, bool beyond_row = false,
                                            bool beyond_column = false) {
    if (EXPONENT == SHARED) {
        const float power = exp2_fast(fmaf(dot, alpha, -reference));
        if (!LIMITED) return power * (row_first + column_first);
        // an instruction with a predicate for each side, and no selections
        float value = 0.0f;
        if (!beyond_row) value = power * row_first;
        if (!beyond_column) value = fmaf(power, column_first, value);
        return value;
    }
    // selected, not multiplied by 0: a weight of 0 silences its side also where the logit is NaN
    const bool no_row = beyond_row || row_weight == 0.0f, no_column = beyond_column || column_weight == 0.0f;
    const float along_row = no_row ? 0.0f : row_weight * exp2_fast(fmaf(dot, alpha, -row_first));
    if (EXPONENT == ROWS) return along_row;
    const float along_column = column_weight * exp2_fast(fmaf(dot, alpha, -column_first));
    return along_row + (no_column ? 0.0f : along_column);
}

// One side's part of G of a positive by ids, element i of its vectors: w ((q - t) - q s) with q = 2^(x - P) and
// s = 2^N / (2^N + 2^P), which for the only positive of a row, q and t being 1, is -w s with all its digits.
//
// x - high is exact there, and less the low part it is 0 but for roundings of P in double, which are taken for nothing:
// they are less than 2^-44 of P. An exponential is not exact by more than 2^-24 anyhow.
__device__ __forceinline__ float certain_part(float dot, float alpha, const GradientSide& side, long long i) {
    if (side.log == nullptr) return 0.0f;
    const float4 of = reinterpret_cast<const float4*>(side.certain)[i];
    if (of.z == 0.0f) return 0.0f;
    float above = fmaf(dot, alpha, -of.x) - of.y;
    if (fabsf(above) < fmaf(fabsf(of.x), 0x1p-44f, 0x1p-24f)) above = 0.0f;  // false for an infinite P
    const float q = exp2_fast(above);
    return fmaf(of.z, q, -side.taken[i]) - of.w * q;
}

}  // namespace contrastile
