// The plans: from the maxima of the prechecks, decide on the device which path a pass takes.
#include "arguments_small.cuh"
#include "reduce.cuh"

namespace contrastile {

// The reference r of the fast path, and whether to try that path (status 0) or not (status 1).
//
// room is the largest exponent of one term for which the sum over the longer side stays finite. B is a Cauchy-Schwarz
// bound of |alpha dot|, enlarged for rounding and for squares that underflow. With r = max(0, B - room) no term overflows.
// The hardware flushes terms below 2^-126. If B + r <= 125 there are none. Otherwise a sum of at least 2^-100 per term
// loses less than 2^-26 of itself, and fold checks each sum for that. The fast path is not tried if hardly any sum would
// pass, nor if an exact result is requested.
extern "C" __global__ void __launch_bounds__(1024) plan_forward(const __grid_constant__ PlanForwardArguments a) {
    const float alpha = in_powers_of_two(*a.scale), bias = a.bias == nullptr ? 0.0f : *a.bias;
    // the largest squared norm of the rows, that of the columns, and 1 if a positive is off the diagonal
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
    // NaN fails this comparison
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
