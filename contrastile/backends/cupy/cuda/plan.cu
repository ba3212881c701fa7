// The plans: which path a pass takes, decided on the device from the peaks that the surveys left.
#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

// A power of two that brings `most` to 2^13 at least and under 2^14, within 2^-100 and 2^100; 1 for 0 and infinity.
__device__ __forceinline__ float near_top(float most) {
    if (!(most > 0.0f && most < infinity())) return 1.0f;
    int exponent;
    frexpf(most, &exponent);  // most is in [2^(exponent - 1), 2^exponent)
    exponent = min(max(14 - exponent, -100), 100);
    return __int_as_float((exponent + 127) << 23);
}

// The reference r of the fast path, and whether it can be tried (status 0) or not (1).
//
// room: the exponent that one term may have so that the sum over the longer side stays finite. With B >= |alpha dot|
// (Cauchy and Schwarz, with room for rounding and for squares that vanish) and r = max(0, B - room) nothing overflows.
// Terms under 2^-126 are flushed, at most one a column: with B + r <= 125 there are none; else a sum of at least
// 2^-100 a term loses less than 2^-26 of itself, and fold checks that it is so. A reference that no likely sum would
// survive is not tried.
extern "C" __global__ void __launch_bounds__(1024) plan_forward(const __grid_constant__ PlanForwardArguments a) {
    __shared__ float buffer[32];
    const long long row_blocks = ceil_div(a.m, LINES), column_blocks = ceil_div(a.n, LINES);
    const float row = choice_of<Largest>(a.peaks, row_blocks, 2, buffer);
    const float column = choice_of<Largest>(a.peaks + 2 * row_blocks, column_blocks, 2, buffer);
    const float stray = choice_of<Largest>(a.peaks + 1, row_blocks, 2, buffer);
    if (threadIdx.x != 0) return;
    const float alpha = in_powers_of_two(*a.scale);
    const float vanished = static_cast<float>(a.depth) * 1e-36f;
    const float bound = fabsf(alpha) * sqrtf(row + vanished) * sqrtf(column + vanished) * 1.01f;
    const float room = 124.0f - (64 - __clzll(max(a.m, a.n)));
    const float reference = fmaxf(bound - room, 0.0f);
    // false for NaN
    const bool fast = bound <= room + 100.0f;
    Plan plan{};
    plan.alpha = alpha;
    plan.reference = fast ? reference : 0.0f;
    plan.threshold = bound + reference <= 125.0f ? 0.0f : 0x1p-100f;
    plan.factor = 1.0f;
    plan.bias = a.bias == nullptr ? 0.0f : *a.bias;
    plan.fast = fast;
    plan.status = !fast;
    plan.stray = stray > 0.0f;
    *a.plan = plan;
}

// Whether G may be formed as 2^(x - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j)), and with which r.
//
// An admitted logit is at most its row's and its column's log-sum-exp, so with r >= max L - 120 nothing admitted
// overflows. With r <= L wherever a weight counts, a term that is flushed costs at most 2^-126 in a probability.
// A factor that counts is not flushed while log2 |u| - (L - r) >= -125. Of the r that these allow, the one nearest 0
// is taken; where there is none, the exact path is.
extern "C" __global__ void __launch_bounds__(1024) plan_backward(const __grid_constant__ PlanBackwardArguments a) {
    __shared__ float buffer[32];
    const float low = choice_of<Least>(a.peaks, a.programs, 4, buffer);
    const float high = choice_of<Largest>(a.peaks + 1, a.programs, 4, buffer);
    float least = choice_of<Least>(a.peaks + 2, a.programs, 4, buffer);
    const float most = choice_of<Largest>(a.peaks + 3, a.programs, 4, buffer);
    if (threadIdx.x != 0) return;
    Plan plan{};
    plan.alpha = in_powers_of_two(*a.scale);
    // the two directions add up
    plan.factor = a.half ? near_top(a.two_sided ? 2.0f * most : most) : 1.0f;
    plan.bias = a.bias == nullptr ? 0.0f : *a.bias;
    const float reference = fmaxf(high - 120.0f, fminf(low, 0.0f));
    least *= plan.factor;
    // the comparisons fail for NaN and for infinities
    const bool safe = a.two_sided && low > -infinity() && high < infinity() && reference <= low &&
                      log2f(least) - (high - reference) >= -125.0f;
    plan.fast = safe;
    plan.reference = safe ? reference : 0.0f;
    *a.plan = plan;
}

// FACTOR and the bias, for the sigmoid loss.
extern "C" __global__ void __launch_bounds__(1024) plan_sigmoid(const __grid_constant__ PlanSigmoidArguments a) {
    __shared__ float buffer[32];
    float most = 0.0f;
    for (long long i = threadIdx.x; a.half && i < a.m; i += blockDim.x) {
        const float w = fabsf(a.row_weight[i]);
        most = fmaxf(most, w < infinity() ? w : infinity());
    }
    most = block_choice<Largest>(most, buffer);
    if (threadIdx.x != 0) return;
    Plan plan{};
    plan.alpha = in_powers_of_two(*a.scale);
    plan.factor = a.half ? near_top(most) : 1.0f;
    plan.bias = a.bias == nullptr ? 0.0f : *a.bias;
    *a.plan = plan;
}

}  // namespace contrastile
