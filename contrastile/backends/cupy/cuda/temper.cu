// The vectors that the epilogue of G reads, prepared once a pass.
#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

__device__ __forceinline__ void temper_one(const Plan& plan, float bias, const WeightSide& side, long long i,
                                           long long length, float* out) {
    const float w = side.weight[i];
    const double exact = (static_cast<double>(side.lse[i]) - bias) * LOG2E;
    // whatever the logit, 2^(x - inf) is 0: a silent row, or one that admits nothing, gives nothing, and no NaN
    const float log = w == 0.0f || exact == -infinity() ? infinity() : static_cast<float>(exact);
    const float carried = w * plan.factor;
    out[i] = log;
    out[length + i] = carried;
    out[2 * length + i] = carried == 0.0f ? 0.0f : carried * exp2f(plan.reference - log);
}

// L in powers of two, w FACTOR, and w FACTOR 2^(r - L), for rows and columns.
extern "C" __global__ void __launch_bounds__(256) temper(const __grid_constant__ TemperArguments a) {
    const long long row_blocks = ceil_div(a.m, THREADS);
    const float bias = a.bias == nullptr ? 0.0f : *a.bias;
    if (blockIdx.x < row_blocks) {
        const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
        if (i < a.m) temper_one(*a.plan, bias, a.row, i, a.m, a.row_vectors);
    } else {
        const long long j = (blockIdx.x - row_blocks) * THREADS + threadIdx.x;
        if (j < a.n) temper_one(*a.plan, bias, a.column, j, a.n, a.column_vectors);
    }
}

}  // namespace contrastile
