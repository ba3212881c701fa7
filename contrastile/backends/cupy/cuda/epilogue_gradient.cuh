// FACTOR G from dots: G_ij = [admitted] (u_i 2^(x - L_i) + v_j 2^(x - M_j)) - [positive] (u_i t_i + v_j t'_j).
//
// Formed in float32, positive included, and rounded once: for a trained model p is near 1 on a positive, and what is
// left of the difference is the gradient.
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
    float first;   // SHARED: w FACTOR 2^(r - L); else L
    float weight;  // w FACTOR; not read where SHARED
    float target;  // w FACTOR t, what a positive takes away
};

// What lies outside the chunk, its G is not stored; and every column of a loss of one direction.
__device__ __forceinline__ Side no_side() { return {0.0f, 0.0f, 0.0f}; }

// Element i of the block's vectors.
__device__ __forceinline__ Side side_of(const GradientSide& side, long long i, int exponent) {
    if (side.log == nullptr) return no_side();
    const float weight = side.weight[i], target = side.target[i];
    const float first = (exponent == SHARED ? side.folded : side.log)[i];
    // 0 times a target that is not finite would be NaN, and a weight of 0 silences its side
    return {first, weight, weight == 0.0f ? 0.0f : weight * target};
}

// G of an admitted pair, the positive not yet subtracted. alpha and reference as in the plan.
template <int EXPONENT>
__device__ __forceinline__ float attraction(float dot, float alpha, float reference, float row_first, float row_weight,
                                            float column_first, float column_weight) {
    if (EXPONENT == SHARED) return exp2_fast(fmaf(dot, alpha, -reference)) * (row_first + column_first);
    // selected, not multiplied by 0: a weight of 0 silences its side also where the logit is NaN
    const float along_row = row_weight == 0.0f ? 0.0f : row_weight * exp2_fast(fmaf(dot, alpha, -row_first));
    if (EXPONENT == ROWS) return along_row;
    const float along_column = column_weight * exp2_fast(fmaf(dot, alpha, -column_first));
    return along_row + (column_weight == 0.0f ? 0.0f : along_column);
}

}  // namespace contrastile
