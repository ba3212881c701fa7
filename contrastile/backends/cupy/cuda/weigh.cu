// The survey of the backward pass: what the weights and log-sum-exps allow.
#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

struct Peaks {
    float low = infinity();    // least log-sum-exp among those with a weight, in powers of two, without the bias
    float high = -infinity();  // largest, weight or not
    float least = infinity();  // least |weight| that is not 0
    float most = 0.0f;         // largest |weight| (1 + |target|), which bounds |G|

    __device__ __forceinline__ void meet(const WeightSide& side, long long i, float bias) {
        const float w = fabsf(side.weight[i]), t = fabsf(side.target[i]);
        const float log = static_cast<float>((static_cast<double>(side.lse[i]) - bias) * LOG2E);
        // what admits nothing has no pair that could overflow; NaN compares false and counts as infinite
        high = fmaxf(high, log < infinity() ? log : infinity());
        if (w != 0.0f) {
            low = fminf(low, log > -infinity() ? log : -infinity());
            least = fminf(least, w);
        }
        const float bound = w * (1.0f + t);
        most = fmaxf(most, bound < infinity() ? bound : infinity());
    }
};

// Peaks of LANES rows or columns to peaks (blocks, 4).
extern "C" __global__ void __launch_bounds__(256) weigh(const __grid_constant__ WeighArguments a) {
    __shared__ float buffer[32];
    const long long row_blocks = ceil_div(a.m, LANES);
    const bool of_rows = blockIdx.x < row_blocks;
    const WeightSide& side = of_rows ? a.row : a.column;
    const long long length = of_rows ? a.m : a.n;
    const long long first = (of_rows ? blockIdx.x : blockIdx.x - row_blocks) * LANES;
    const float bias = a.bias == nullptr ? 0.0f : *a.bias;
    Peaks peaks;
    for (long long i = first + threadIdx.x; i < length && i < first + LANES; i += 256) peaks.meet(side, i, bias);
    const float low = block_choice<Least>(peaks.low, buffer), high = block_choice<Largest>(peaks.high, buffer);
    const float least = block_choice<Least>(peaks.least, buffer), most = block_choice<Largest>(peaks.most, buffer);
    if (threadIdx.x == 0) {
        float* out = a.peaks + 4ll * blockIdx.x;
        out[0] = low;
        out[1] = high;
        out[2] = least;
        out[3] = most;
    }
}

}  // namespace contrastile
