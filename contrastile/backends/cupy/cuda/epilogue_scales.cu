// The plan of the backward pass, and the vectors that the epilogue of G reads.
#include "arguments_small.cuh"
#include "features.cuh"

namespace contrastile {

// Whether G may be formed as 2^(x - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j)), and with which r.
//
// An admitted logit is at most its row's and its column's log-sum-exp, so with r >= max L - 120 nothing admitted
// overflows. With r <= N + 100 wherever a weight counts, a term that is flushed is less than 2^-26 of the negatives of
// its row and of its column, for float16 2^-29: 2^17 of them are less than a rounding of G, and of more each is less by
// their number. Then the largest r is taken: products of zeros cost the least energy, which limits the rate. Otherwise
// r <= L, and what is flushed costs at most 2^-126 in a probability; of those the r nearest 0 is taken. A factor that
// counts is not flushed while log2 |u| - (L - r) >= -125, and none is infinite while |u| <= 2^20. Where no r is left, the
// exact path is taken.
// peaks: those of weight_bounds, over all its blocks.
__device__ __forceinline__ Plan plan_of(const float (&peaks)[6], const EpilogueScalesArguments& a) {
    Plan plan{};
    plan.alpha = in_powers_of_two(*a.scale);
    plan.bias = a.bias == nullptr ? 0.0f : *a.bias;
    // the two directions add up
    plan.gradient_scale = a.half ? near_top(a.two_sided ? 2.0f * peaks[3] : peaks[3]) : 1.0f;
    plan.certain = a.by_ids && peaks[4] > 0.0f;
    const float low = -peaks[0], high = peaks[1], room = log2f(-peaks[2] * plan.gradient_scale) + 125.0f;
    const float least = high - fminf(room, 120.0f);
    const bool modest = peaks[3] * plan.gradient_scale <= 0x1p20f;
    const float many = fmaxf(0.0f, log2f(static_cast<float>(a.m > a.n ? a.m : a.n)) - 17.0f);
    const float most = modest ? fmaxf(low, (a.half ? 97.0f : 100.0f) - many - peaks[5]) : low;
    // fmaxf passes over a NaN, of infinities that the comparisons fail for
    const float reference = most > low ? most : fmaxf(least, fminf(low, 0.0f));
    const bool finite = low > -infinity() && high < infinity() && room > -infinity();
    // beyond 2^20 a step of float is too large a part of the 8 powers of two that are left to overflow
    const bool fine = fabsf(reference) < 0x1p20f;
    const bool between = least <= reference && reference <= most;
    plan.fast = a.two_sided && finite && fine && between && !plan.certain && !a.exact;
    plan.reference = plan.fast ? reference : 0.0f;
    // exact but where it is so small that nothing it multiplies would show in float16
    plan.output_scale = *a.scale / plan.gradient_scale;
    // Exponentials were kept against the forward pass's r, whose sums hold at least 2^-100 a term: what was flushed does
    // not count. What is left to ask is that no factor that counts is flushed, and none infinite; false for NaN.
    plan.kept = a.forward != nullptr && a.forward->status == 0 && finite && high - a.forward->reference <= room &&
                a.forward->reference - low + log2f(peaks[3] * plan.gradient_scale) <= 126.0f;
    // a product times 0 is 0 to cuBLAS, also where it is NaN; times this, a finite sum rounds to 0 in 16 bits
    plan.blas_scale = plan.output_scale == 0.0f ? 0x1p-149f : plan.output_scale;
    return plan;
}

// 2^N / (2^N + 2^P), from N - P, with all its digits.
__device__ __forceinline__ double share_of_negatives(double gap) {
    if (gap > 0.0) return 1.0 / (1.0 + exp2(-gap));
    const double power = exp2(gap);
    return power / (1.0 + power);
}

// The same of element i, or what comes instead.
__device__ __forceinline__ double share_of(const WeightSide& side, long long i, double gap) {
    return side.share == nullptr ? share_of_negatives(gap) : side.share[i];
}

__device__ __forceinline__ float low_part(double x, float high) {
    return fabsf(high) < infinity() ? static_cast<float>(x - high) : 0.0f;
}

__device__ __forceinline__ void write_scales(const Plan& plan, const EpilogueScalesArguments& a, float upstream,
                                           const WeightSide& side, long long i, long long length, float* out,
                                           float* kept) {
    if (i >= length) {
        if (kept != nullptr && i < ceil_div(length, KEPT_UNIT) * KEPT_UNIT) kept[i] = 0.0f;
        return;
    }
    const float w = side.weight[i] * upstream, scaled = w * plan.gradient_scale;
    const double negatives = (side.negative_lse[i] - plan.bias) * LOG2E;
    const double positives = (side.positive_lse[i] - plan.bias) * LOG2E;
    const double exact = side.share == nullptr ? merge(negatives, positives) : negatives;
    // whatever the logit, 2^(x - inf) is 0: a silent row, or one that admits nothing, gives nothing
    const bool silent = scaled == 0.0f || exact == -infinity();
    // infinite logits have no softmax
    const float log = silent ? infinity() : exact < infinity() ? static_cast<float>(exact) : nanf("");
    out[i] = log;
    out[length + i] = scaled * exp2f(-low_part(exact, log));
    out[2 * length + i] = silent || !plan.fast ? 0.0f : static_cast<float>(scaled * exp2(plan.reference - exact));
    if (kept != nullptr)
        kept[i] = silent || !plan.kept ? 0.0f : static_cast<float>(scaled * exp2(a.forward->reference - exact));
    if (!a.by_ids) return;
    out[3 * length + i] = scaled == 0.0f ? 0.0f : scaled * side.target[i];
    if (!plan.certain) return;
    const float high = static_cast<float>(positives);
    reinterpret_cast<float4*>(out + 4 * length)[i] =
        make_float4(high, low_part(positives, high), scaled,
                    static_cast<float>(scaled * share_of(side, i, negatives - positives)));
}

// One side's part of G of a positive by index: w ((q - t) - q s) with q = e^(x - P) and s = e^N / (e^N + e^P). Of the only
// positive of a row, q and t being 1, that is -w s with all its digits.
__device__ __forceinline__ double entry_part(const WeightSide& side, long long i, float upstream, double logit) {
    const float w = side.weight == nullptr ? 0.0f : side.weight[i] * upstream;
    if (w == 0.0f) return 0.0;
    const double positives = side.positive_lse[i], q = exp(logit - positives);
    const double share = share_of(side, i, (side.negative_lse[i] - positives) * LOG2E);
    return w * ((q - side.target[i]) - q * share);
}

// gradient_scale * G of the positive that an index names for row i; 0 where it has none. Its logit is the row's own P.
__device__ __forceinline__ float entry_of(const Plan& plan, const EpilogueScalesArguments& a, float upstream, long long i) {
    const long long j = named(a.positives[i], listed(a.excluded, i), a.n);
    if (j < 0) return 0.0f;
    const double logit = a.row.positive_lse[i];
    const double g = entry_part(a.row, i, upstream, logit) + entry_part(a.column, j, upstream, logit);
    return static_cast<float>(plan.gradient_scale * g);
}

// The vectors of GradientSide for rows and columns, G of positives by index, and what goes with kept exponentials.
//
// Every block computes the plan itself, from one entry for each LANES rows: that is cheaper than a launch of its own.
// The first block stores it for the kernels that follow.
extern "C" __global__ void __launch_bounds__(256) epilogue_scales(const __grid_constant__ EpilogueScalesArguments a) {
    float peaks[6] = {-infinity(), -infinity(), -infinity(), 0.0f, 0.0f, -infinity()};
#pragma unroll 2
    for (long long i = threadIdx.x; i < a.programs; i += THREADS) {
        const float4 some = reinterpret_cast<const float4*>(a.peaks)[2 * i];
        const float2 more = reinterpret_cast<const float2*>(a.peaks)[4 * i + 2];
        peaks[0] = fmaxf(peaks[0], some.x);
        peaks[1] = fmaxf(peaks[1], some.y);
        peaks[2] = fmaxf(peaks[2], some.z);
        peaks[3] = fmaxf(peaks[3], some.w);
        peaks[4] = fmaxf(peaks[4], more.x);
        peaks[5] = fmaxf(peaks[5], more.y);
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
        write_scales(plan, a, upstream, a.row, i, a.m, a.row_vectors, a.row_kept);
        if (a.entries != nullptr && i < a.m) a.entries[i] = entry_of(plan, a, upstream, i);
    } else {
        const long long j = (blockIdx.x - row_blocks) * THREADS + threadIdx.x;
        write_scales(plan, a, upstream, a.column, j, a.n, a.column_vectors, a.column_kept);
    }
}

}  // namespace contrastile
