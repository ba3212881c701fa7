// The plan of the backward pass, and the vectors that the epilogue of G reads.
#include "arguments_small.cuh"
#include "features.cuh"

namespace contrastile {

// Whether G may be formed as 2^(x - r) (u_i 2^(r - L_i) + v_j 2^(r - M_j)), and with which r.
//
// * No overflow: an admitted logit is at most the log-sum-exp of its row and of its column, so r >= max L - 120 suffices.
// * Flushed terms: if r <= N + 100 for every weight that is not 0, a flushed term is less than 2^-26 (float16: 2^-29) of
//   the negatives of its row and of its column. 2^17 such terms are less than one rounding of G; with more terms the
//   limit of r falls by log2 of their number. The largest such r is taken: products of zeros cost the least energy, which
//   limits the rate. If there is none, r <= L, where a flushed term changes a probability by at most 2^-126; of these the
//   r nearest 0 is taken.
// * Factors: u 2^(r - L) is not flushed while log2 |u| - (L - r) >= -125, nor infinite while |u| <= 2^20.
// If no r satisfies all of these, the exact path is taken.
// peaks: the maxima of weight_bounds over all its blocks.
__device__ __forceinline__ Plan plan_of(const float (&peaks)[WEIGHT_PEAKS], const EpilogueScalesArguments& a) {
    Plan plan{};
    plan.alpha = in_powers_of_two(*a.scale);
    plan.bias = a.bias == nullptr ? 0.0f : *a.bias;
    // G is the sum of both directions
    plan.gradient_scale = a.half ? near_top(a.two_sided ? 2.0f * peaks[LARGEST_BOUND] : peaks[LARGEST_BOUND]) : 1.0f;
    plan.certain = a.by_ids && peaks[ANY_CERTAIN] > 0.0f;
    const float low = -peaks[NEGATED_LSE], high = peaks[LARGEST_LSE];
    const float room = log2f(-peaks[NEGATED_WEIGHT] * plan.gradient_scale) + 125.0f;
    const float least = high - fminf(room, 120.0f);
    const bool modest = peaks[LARGEST_BOUND] * plan.gradient_scale <= 0x1p20f;
    const float many = fmaxf(0.0f, log2f(static_cast<float>(a.m > a.n ? a.m : a.n)) - 17.0f);
    const float most = modest ? fmaxf(low, (a.half ? 97.0f : 100.0f) - many - peaks[NEGATED_NEGATIVES]) : low;
    // fmaxf ignores a NaN from infinities; `finite` below then fails
    const float reference = most > low ? most : fmaxf(least, fminf(low, 0.0f));
    const bool finite = low > -infinity() && high < infinity() && room > -infinity();
    // beyond 2^20 the spacing of floats is too large for the 8 powers of two that remain before overflow
    const bool fine = fabsf(reference) < 0x1p20f;
    const bool between = least <= reference && reference <= most;
    plan.fast = a.two_sided && finite && fine && between && !plan.certain && !a.exact;
    plan.reference = plan.fast ? reference : 0.0f;
    // exact, unless it is so small that every product with it is 0 in float16
    plan.output_scale = *a.scale / plan.gradient_scale;
    // The forward pass kept exponentials against its own r. Its sums hold at least 2^-100 per term, so flushed terms do
    // not matter. The factors must neither be flushed nor infinite. NaN fails these comparisons.
    plan.kept = a.forward != nullptr && a.forward->status == 0 && finite && high - a.forward->reference <= room &&
                a.forward->reference - low + log2f(peaks[LARGEST_BOUND] * plan.gradient_scale) <= 126.0f;
    // cuBLAS takes 0 times NaN for 0. With 2^-149 instead NaN stays, and a finite sum still rounds to 0 in 16 bits
    plan.blas_scale = plan.output_scale == 0.0f ? 0x1p-149f : plan.output_scale;
    return plan;
}

// 2^N / (2^N + 2^P), from N - P, with all its digits.
__device__ __forceinline__ double share_of_negatives(double gap) {
    if (gap > 0.0) return 1.0 / (1.0 + exp2(-gap));
    const double power = exp2(gap);
    return power / (1.0 + power);
}

// The share of element i: given, or computed from the gap.
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
    // 2^(x - inf) is 0 for every logit: a row of weight 0, or one that admits no pair, has no gradient
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

// One side's part of G of a positive by index: w ((q - t) - q s) with q = e^(x - P) and s = e^N / (e^N + e^P). For a row's
// only positive q and t are 1, and the result is -w s without cancellation.
__device__ __forceinline__ double entry_part(const WeightSide& side, long long i, float upstream, double logit) {
    const float w = side.weight == nullptr ? 0.0f : side.weight[i] * upstream;
    if (w == 0.0f) return 0.0;
    const double positives = side.positive_lse[i], q = exp(logit - positives);
    const double share = share_of(side, i, (side.negative_lse[i] - positives) * LOG2E);
    return w * ((q - side.target[i]) - q * share);
}

// gradient_scale * G of row i's positive by index; 0 if it has none. The logit of the only positive is the row's P.
__device__ __forceinline__ float entry_of(const Plan& plan, const EpilogueScalesArguments& a, float upstream, long long i) {
    const long long j = positive_column(a.positives[i], index_or_none(a.excluded, i), a.n);
    if (j < 0) return 0.0f;
    const double logit = a.row.positive_lse[i];
    const double g = entry_part(a.row, i, upstream, logit) + entry_part(a.column, j, upstream, logit);
    return static_cast<float>(plan.gradient_scale * g);
}

// Writes the vectors of GradientSide for rows and columns, G of positives by index, and the factors of kept exponentials.
//
// Every block computes the plan from one entry for each LANES rows, which is cheaper than another launch. The first
// block stores it for later kernels.
extern "C" __global__ void __launch_bounds__(256) epilogue_scales(const __grid_constant__ EpilogueScalesArguments a) {
    float peaks[WEIGHT_PEAKS] = {-infinity(), -infinity(), -infinity(), 0.0f, 0.0f, -infinity()};
#pragma unroll 2
    for (long long i = threadIdx.x; i < a.programs; i += THREADS) {
        const float4 first = reinterpret_cast<const float4*>(a.peaks)[2 * i];
        const float2 last = reinterpret_cast<const float2*>(a.peaks)[4 * i + 2];
        peaks[NEGATED_LSE] = fmaxf(peaks[NEGATED_LSE], first.x);
        peaks[LARGEST_LSE] = fmaxf(peaks[LARGEST_LSE], first.y);
        peaks[NEGATED_WEIGHT] = fmaxf(peaks[NEGATED_WEIGHT], first.z);
        peaks[LARGEST_BOUND] = fmaxf(peaks[LARGEST_BOUND], first.w);
        peaks[ANY_CERTAIN] = fmaxf(peaks[ANY_CERTAIN], last.x);
        peaks[NEGATED_NEGATIVES] = fmaxf(peaks[NEGATED_NEGATIVES], last.y);
    }
    block_largest(peaks);
    const Plan plan = plan_of(peaks, a);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *a.plan = plan;
        // G will overwrite the exponentials: no later pass may use them
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
