// The precheck of the backward pass: bounds of the weights and of the log-sum-exps.
#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

// A row or column that expects one positive and whose negatives are together less than 2^-8 of its positives: the excess of
// its loss is that small, and p - t would cancel.
__device__ __forceinline__ bool is_certain(float negatives, float positives, float target) {
    return target > 0.5f && positives - negatives > 8.0f;
}

// Peaks of LANES rows or columns to peaks (blocks, 8): the largest of each, so that epilogue_scales takes the largest of all.
//
// All in float, where an error of a few roundings of L is nothing.
extern "C" __global__ void __launch_bounds__(256) weight_bounds(const __grid_constant__ WeightBoundsArguments a) {
    const long long row_blocks = ceil_div(a.m, LANES);
    const bool of_rows = blockIdx.x < row_blocks;
    const WeightSide& side = of_rows ? a.row : a.column;
    const long long length = of_rows ? a.m : a.n;
    const long long first = (of_rows ? blockIdx.x : blockIdx.x - row_blocks) * LANES;
    const double bias = a.bias == nullptr ? 0.0 : *a.bias;
    const float upstream = a.upstream == nullptr ? 1.0f : *a.upstream;
    float peaks[6] = {-infinity(), -infinity(), -infinity(), 0.0f, 0.0f, -infinity()};
#pragma unroll
    for (int k = 0; k < LANES / THREADS; ++k) {
        const long long i = first + k * THREADS + threadIdx.x;
        if (i >= length) break;
        const float w = fabsf(side.weight[i] * upstream), target = side.target[i];
        const float negatives = static_cast<float>((side.negative_lse[i] - bias) * LOG2E);
        const float positives = static_cast<float>((side.positive_lse[i] - bias) * LOG2E);
        const float shift = finite_or_zero(fmaxf(negatives, positives));
        const bool bars = side.share != nullptr;
        const float log = bars ? negatives : shift + log2f(exp2f(negatives - shift) + exp2f(positives - shift));
        // |q (1 - share) - t|: no bar is more than w
        const float bound = w * ((bars ? 2.0f : 1.0f) + fabsf(target));
        // what admits nothing has no pair that could overflow; NaN compares false and counts as infinite
        peaks[1] = fmaxf(peaks[1], log < infinity() ? log : infinity());
        peaks[3] = fmaxf(peaks[3], bound < infinity() ? bound : infinity());
        if (w != 0.0f) {
            peaks[0] = fmaxf(peaks[0], log > -infinity() ? -log : infinity());
            peaks[2] = fmaxf(peaks[2], -w);
            // bars are relative to the largest of their row: there N says nothing of what a term counts
            peaks[5] = fmaxf(peaks[5], bars ? infinity() : -(negatives > -infinity() ? negatives : log));
        }
        // a silent row's bars say nothing of its positives, which L is no bound of
        if (bars || (w != 0.0f && is_certain(negatives, positives, target))) peaks[4] = 1.0f;
    }
    block_largest(peaks);
    if (threadIdx.x != 0) return;
    float4* to = reinterpret_cast<float4*>(a.peaks) + 2 * blockIdx.x;
    to[0] = make_float4(peaks[0], peaks[1], peaks[2], peaks[3]);
    to[1] = make_float4(peaks[4], peaks[5], 0.0f, 0.0f);
}

}  // namespace contrastile
