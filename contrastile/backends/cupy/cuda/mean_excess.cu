// The loss of one direction from its log-sum-exps: sum_i w_i (L_i - t_i positive_i), in double.
#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

// A log-sum-exp is never below a mean of its own terms: rounding that says so is projected back. A weight of 0
// silences a row that admits nothing, whose log-sum-exp is -inf; NaN compares false and stays.
extern "C" __global__ void __launch_bounds__(1024) mean_excess(const __grid_constant__ ExcessArguments a) {
    __shared__ double sums[32];
    const long long first = static_cast<long long>(blockIdx.x) * TERMS;
    double sum = 0.0;
    // selected, not left out: all loads of a thread are then under way together
#pragma unroll
    for (int k = 0; k < TERMS; k += 1024) {
        const long long i = first + k + threadIdx.x;
        const bool there = i < a.length;
        const float lse = there ? a.lse[i] : 0.0f, positive = there ? a.positive[i] : 0.0f;
        const double t = there ? a.target[i] : 0.0f, w = there ? a.weight[i] : 0.0f;
        double excess = lse;
        if (t != 0.0) {
            excess -= t * positive;
            excess = excess < 0.0 ? 0.0 : excess;
        }
        if (w != 0.0) sum += w * excess;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = warp_sum(sums[threadIdx.x]);
    if (threadIdx.x == 0) a.out[blockIdx.x] = sum;
}

}  // namespace contrastile
