// The plans: which path a pass takes, decided on the device from the peaks that the prechecks left.
#include "arguments_small.cuh"
#include "reduce.cuh"

namespace contrastile {

// The reference r of the fast path, and whether it can be tried (status 0) or not (1).
//
// room: the exponent that one term may have so that the sum over the longer side stays finite. With B >= |alpha dot|
// (Cauchy and Schwarz, with room for rounding and for squares that vanish) and r = max(0, B - room) nothing overflows.
// Terms under 2^-126 are flushed, at most one a column: with B + r <= 125 there are none; else a sum of at least
// 2^-100 a term loses less than 2^-26 of itself, and fold checks that it is so. A reference that no likely sum would
// survive is not tried, nor any where an exact result is asked for.
extern "C" __global__ void __launch_bounds__(1024) plan_forward(const __grid_constant__ PlanForwardArguments a) {
    const float alpha = in_powers_of_two(*a.scale), bias = a.bias == nullptr ? 0.0f : *a.bias;
    // largest squared norm of the rows, of the columns, and whether a positive is off the diagonal
    float top[3] = {0.0f, 0.0f, 0.0f};
#pragma unroll 4
    for (long long i = threadIdx.x; i < ceil_div(max(a.m, a.n), LINES); i += 1024) {
        const float4 peaks = reinterpret_cast<const float4*>(a.peaks)[i];
        top[0] = fmaxf(top[0], peaks.x);
        top[1] = fmaxf(top[1], peaks.y);
        top[2] = fmaxf(top[2], peaks.z);
    }
    block_largest(top);
    if (threadIdx.x != 0) return;
    const float vanished = static_cast<float>(a.depth) * 1e-36f;
    const float bound = fabsf(alpha) * sqrtf(top[0] + vanished) * sqrtf(top[1] + vanished) * 1.01f;
    const float room = 124.0f - (64 - __clzll(max(a.m, a.n)));
    const float reference = fmaxf(bound - room, 0.0f);
    // false for NaN
    const bool fast = !a.exact && bound <= room + 100.0f;
    Plan plan{};
    plan.alpha = alpha;
    plan.reference = fast ? reference : 0.0f;
    plan.threshold = bound + reference <= 125.0f ? 0.0f : 0x1p-100f;
    plan.gradient_scale = 1.0f;
    plan.bias = bias;
    plan.fast = fast;
    plan.status = !fast;
    plan.off_diagonal = top[2] > 0.0f;
    *a.plan = plan;
}

// The gradient scale and the bias, for the sigmoid loss.
extern "C" __global__ void __launch_bounds__(1024) plan_sigmoid(const __grid_constant__ PlanSigmoidArguments a) {
    float most[1] = {0.0f};
#pragma unroll 4
    for (long long i = threadIdx.x; i < (a.half ? a.m : 0); i += 1024) {
        const float w = fabsf(a.row_weight[i]);
        most[0] = fmaxf(most[0], w < infinity() ? w : infinity());
    }
    block_largest(most);
    if (threadIdx.x != 0) return;
    Plan plan{};
    plan.alpha = in_powers_of_two(*a.scale);
    plan.gradient_scale = a.half ? near_top(most[0]) : 1.0f;
    plan.bias = a.bias == nullptr ? 0.0f : *a.bias;
    *a.plan = plan;
}

}  // namespace contrastile
