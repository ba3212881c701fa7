// The precheck of the backward pass: bounds of the weights and of the log-sum-exps.
#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

// A row or column is certain if it expects one positive and its negatives sum to less than 2^-8 of its positives. Then
// p - t would cancel.
__device__ __forceinline__ bool is_certain(float negatives, float positives, float target) {
    return target > 0.5f && positives - negatives > 8.0f;
}

// Writes the maxima (WeightPeak) over LANES rows or columns to peaks (blocks, 8); epilogue_scales joins the blocks.
//
// All are computed in float: a few rounding errors in L do not matter here.
extern "C" __global__ void __launch_bounds__(256) weight_bounds(const __grid_constant__ WeightBoundsArguments a) {
    const long long row_blocks = ceil_div(a.m, LANES);
    const bool of_rows = blockIdx.x < row_blocks;
    const WeightSide& side = of_rows ? a.row : a.column;
    const long long length = of_rows ? a.m : a.n;
    const long long first = (of_rows ? blockIdx.x : blockIdx.x - row_blocks) * LANES;
    const double bias = a.bias == nullptr ? 0.0 : *a.bias;
    const float upstream = a.upstream == nullptr ? 1.0f : *a.upstream;
    float peaks[WEIGHT_PEAKS] = {-infinity(), -infinity(), -infinity(), 0.0f, 0.0f, -infinity()};
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
        // a bound of |q (1 - share) - t|, for no bar exceeds w
        const float bound = w * ((bars ? 2.0f : 1.0f) + fabsf(target));
        // L is -inf if the row admits no pair, and then nothing can overflow; NaN compares false and counts as infinite
        peaks[LARGEST_LSE] = fmaxf(peaks[LARGEST_LSE], log < infinity() ? log : infinity());
        peaks[LARGEST_BOUND] = fmaxf(peaks[LARGEST_BOUND], bound < infinity() ? bound : infinity());
        if (w != 0.0f) {
            peaks[NEGATED_LSE] = fmaxf(peaks[NEGATED_LSE], log > -infinity() ? -log : infinity());
            peaks[NEGATED_WEIGHT] = fmaxf(peaks[NEGATED_WEIGHT], -w);
            // bars are relative to the largest of their row, so N bounds no term
            const float least = negatives > -infinity() ? negatives : log;
            peaks[NEGATED_NEGATIVES] = fmaxf(peaks[NEGATED_NEGATIVES], bars ? infinity() : -least);
        }
        // with bars L bounds no positive, not even in a row of weight 0
        if (bars || (w != 0.0f && is_certain(negatives, positives, target))) peaks[ANY_CERTAIN] = 1.0f;
    }
    block_largest(peaks);
    if (threadIdx.x != 0) return;
    float4* to = reinterpret_cast<float4*>(a.peaks) + 2 * blockIdx.x;
    to[0] = make_float4(peaks[NEGATED_LSE], peaks[LARGEST_LSE], peaks[NEGATED_WEIGHT], peaks[LARGEST_BOUND]);
    to[1] = make_float4(peaks[ANY_CERTAIN], peaks[NEGATED_NEGATIVES], 0.0f, 0.0f);
}

}  // namespace contrastile
