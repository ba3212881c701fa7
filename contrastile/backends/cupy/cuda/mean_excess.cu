// The loss of one direction from its log-sum-exps: sum_i w_i (L_i - t_i positive_i), in double.
#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

// A log-sum-exp is never below a mean of its own terms: rounding that says so is projected back. A weight of 0
// silences a row that admits nothing, whose log-sum-exp is -inf; NaN compares false and stays.
extern "C" __global__ void __launch_bounds__(256) mean_excess(const __grid_constant__ ExcessArguments a) {
    __shared__ double sums[8];
    const long long first = static_cast<long long>(blockIdx.x) * TERMS;
    double sum = 0.0;
    for (long long i = first + threadIdx.x; i < a.length && i < first + TERMS; i += THREADS) {
        const double t = a.target[i], w = a.weight[i];
        double excess = a.lse[i];
        if (t != 0.0) {
            excess -= t * a.positive[i];
            excess = excess < 0.0 ? 0.0 : excess;
        }
        if (w != 0.0) sum += w * excess;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0.0;
    for (int w = 0; w < 8; ++w) sum += sums[w];
    a.out[blockIdx.x] = sum;
}

}  // namespace contrastile
