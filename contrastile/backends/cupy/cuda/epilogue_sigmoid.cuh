// The additive loss of pairs: softplus(a) and its slope -z sigmoid(a) at a = -z x, z = +1 on a positive and -1 elsewhere.
#pragma once

#include "pairs.cuh"

namespace contrastile {

// Sums over pairs of one row. softplus(a) = max(a, 0) + log(1 + e), e = exp(-|a|) in [0, 1]. The logarithms of many pairs
// are the logarithm of one product: one multiply-add per pair instead of a polynomial.
// The product is stored as p, the product less 1: the update p + e + p e keeps all digits of a small p, 1 + p would not.
// It rounds twice per pair, so two chains halve the error. Each has at most 64 pairs, for p may reach 2^pairs.
struct AdditiveSums {
    float above = 0.0f;            // of max(a, 0) log2 e
    float product_less_1[2] = {};  // prod (1 + e) - 1 over the pairs of either chain
    float slope = 0.0f;

    // Adds one pair, y = x log2 e, and returns its slope. y = -inf, which `admit` writes, adds nothing and has slope 0.
    __device__ __forceinline__ float add(float y, bool positive, int chain) {
        const float at = positive ? -y : y;
        const float e = exp2_fast(-fabsf(at)), one_plus_e = 1.0f + e;  // neither overflows nor cancels
        const float reciprocal = reciprocal_fast(one_plus_e);
        // NaN compares false, and e is NaN with it, so NaN comes out
        const float sigma = at >= 0.0f ? reciprocal : e * reciprocal;
        const float signed_sigma = positive ? -sigma : sigma;
        above += at > 0.0f ? at : 0.0f;
        product_less_1[chain] = fmaf(product_less_1[chain], one_plus_e, e);
        slope += signed_sigma;
        return signed_sigma;
    }

    __device__ __forceinline__ float loss() const {
        const float all = fmaf(product_less_1[0], 1.0f + product_less_1[1], product_less_1[1]);
        return fmaf(above, static_cast<float>(LN2), log1pf(all));
    }
};

}  // namespace contrastile
