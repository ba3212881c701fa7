// Merges log-sum-exps, and forms the loss sum_i w_i loss_i over rows and columns, all in double.
#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

// log(e^a + e^b); -inf for two -inf, inf for +inf, NaN for NaN.
__device__ __forceinline__ double merged(double a, double b) {
    const double shift = finite_or_zero(fmax(a, b));
    return shift + log(exp(a - shift) + exp(b - shift));
}

extern "C" __global__ void __launch_bounds__(256) merge_lse(const __grid_constant__ MergeLseArguments a) {
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (i < a.length) a.out[i] = merged(a.first[i], a.second[i]);
}

// The loss of one row: log(1 + e^(N - P)) + D, where D = P - t S is the excess of P over the mean of the positive logits.
// D is never negative, so a negative rounding error becomes 0. t is 1 / n rounded, and D is small beside P: rint recovers
// n. Without a positive or a target the loss is the log-sum-exp. A positive whose logit is -inf is still a positive. NaN
// fails the comparisons and stays NaN, that of a target too.
__device__ __forceinline__ double loss_of(double negatives, double positives, double sum, double t) {
    if (t != 0.0 && (positives != -infinity() || sum != 0.0)) {
        const double gap = negatives - positives, above = positives - sum / rint(1.0 / t);
        // fmax ignores NaN; the other term is NaN then
        return fmax(gap, 0.0) + log1p(exp(-fabs(gap))) + (above < 0.0 ? 0.0 : above);
    }
    return merged(negatives, positives) + 0.0 * t;
}

// A weight of 0 silences a row whatever its log-sum-exps are.
extern "C" __global__ void __launch_bounds__(1024) weighted_nll(const __grid_constant__ WeightedNllArguments a) {
    __shared__ double sums[32];
    const long long rows = ceil_div(a.row.length, TERMS);
    const bool of_rows = blockIdx.x < rows;
    const LossSide& x = of_rows ? a.row : a.column;
    const long long i = (blockIdx.x - (of_rows ? 0 : rows)) * TERMS + threadIdx.x;
    const double w = i < x.length ? x.weight[i] : 0.0;
    const double term = w == 0.0 ? 0.0 : w * loss_of(x.negative_lse[i], x.positive_lse[i], x.positive_sum[i], x.target[i]);
    double sum = warp_sum(term);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = warp_sum(sums[threadIdx.x]);
    if (threadIdx.x == 0) a.out[blockIdx.x] = sum;
}

}  // namespace contrastile
