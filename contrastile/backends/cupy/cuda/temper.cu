// The plan of the backward pass, and the vectors that the epilogue of G reads.
#include "arguments_small.cuh"
#include "factor.cuh"
#include "reduce.cuh"

namespace contrastile {

// Whether G may be formed as 2^(x - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j)), and with which r.
//
// An admitted logit is at most its row's and its column's log-sum-exp, so with r >= max L - 120 nothing admitted
// overflows. With r <= L wherever a weight counts, a term that is flushed costs at most 2^-126 in a probability.
// A factor that counts is not flushed while log2 |u| - (L - r) >= -125. Of the r that these allow, the one nearest 0
// is taken; where there is none, the exact path is. peaks: those of weigh, over all its blocks.
__device__ __forceinline__ Plan plan_of(const float (&peaks)[4], const TemperArguments& a) {
    Plan plan{};
    plan.alpha = in_powers_of_two(*a.scale);
    plan.bias = a.bias == nullptr ? 0.0f : *a.bias;
    // the two directions add up
    plan.factor = a.half ? near_top(a.two_sided ? 2.0f * peaks[3] : peaks[3]) : 1.0f;
    const float low = -peaks[0], high = peaks[1], least = -peaks[2] * plan.factor;
    const float reference = fmaxf(high - 120.0f, fminf(low, 0.0f));
    // the comparisons fail for NaN and for infinities
    const bool safe = a.two_sided && low > -infinity() && high < infinity() && reference <= low &&
                      log2f(least) - (high - reference) >= -125.0f;
    plan.fast = safe;
    plan.reference = safe ? reference : 0.0f;
    // exact but where it is so small that nothing it multiplies would show in float16
    plan.finishing = *a.scale / plan.factor;
    // Exponentials were kept against the forward pass's r, whose sums hold at least 2^-100 a term: what was flushed does
    // not count, and nothing overflows. What is left to ask is that no factor that counts is flushed; false for NaN.
    plan.kept = a.forward != nullptr && a.forward->status == 0 && low > -infinity() && high < infinity() &&
                log2f(least) - (high - a.forward->reference) >= -125.0f;
    // a product times 0 is 0 to cuBLAS, also where it is NaN; times this, a finite sum rounds to 0 in 16 bits
    plan.multiplier = plan.finishing == 0.0f ? 0x1p-149f : plan.finishing;
    return plan;
}

__device__ __forceinline__ void temper_one(const Plan& plan, const TemperArguments& a, float upstream,
                                           const WeightSide& side, long long i, long long length, float* out,
                                           float* kept) {
    if (i >= length) {
        if (kept != nullptr && i < ceil_div(length, KEPT_UNIT) * KEPT_UNIT) kept[i] = 0.0f;
        return;
    }
    const float w = side.weight[i] * upstream;
    const double exact = (static_cast<double>(side.lse[i]) - plan.bias) * LOG2E;
    // whatever the logit, 2^(x - inf) is 0: a silent row, or one that admits nothing, gives nothing
    const float log = w == 0.0f || exact == -infinity() ? infinity() : static_cast<float>(exact);
    const float carried = w * plan.factor;
    out[i] = log;
    out[length + i] = carried;
    out[2 * length + i] = carried == 0.0f ? 0.0f : carried * exp2f(plan.reference - log);
    if (kept != nullptr) kept[i] = carried == 0.0f || !plan.kept ? 0.0f : carried * exp2f(a.forward->reference - log);
}

// L in powers of two, w FACTOR, and w FACTOR 2^(r - L), for rows and columns; and what goes with kept exponentials.
//
// Every block comes to the plan by itself, from a list of one entry for LANES rows: cheaper than a launch that all
// would wait for. The first block writes it down for the kernels that follow.
extern "C" __global__ void __launch_bounds__(256) temper(const __grid_constant__ TemperArguments a) {
    float peaks[4] = {-infinity(), -infinity(), -infinity(), 0.0f};
#pragma unroll 2
    for (long long i = threadIdx.x; i < a.programs; i += THREADS) {
        const float4 some = reinterpret_cast<const float4*>(a.peaks)[i];
        peaks[0] = fmaxf(peaks[0], some.x);
        peaks[1] = fmaxf(peaks[1], some.y);
        peaks[2] = fmaxf(peaks[2], some.z);
        peaks[3] = fmaxf(peaks[3], some.w);
    }
    block_largest(peaks);
    const Plan plan = plan_of(peaks, a);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *a.plan = plan;
        // G takes the place of the exponentials: nobody may take it for them another time. The same from every block.
        if (a.forward != nullptr && !plan.kept) a.forward->status = 1;
    }
    const float upstream = a.upstream == nullptr ? 1.0f : *a.upstream;
    const long long row_blocks = ceil_div(a.m, THREADS);
    if (blockIdx.x < row_blocks) {
        const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
        temper_one(plan, a, upstream, a.row, i, a.m, a.row_vectors, a.row_kept);
    } else {
        const long long j = (blockIdx.x - row_blocks) * THREADS + threadIdx.x;
        temper_one(plan, a, upstream, a.column, j, a.n, a.column_vectors, a.column_kept);
    }
}

}  // namespace contrastile
