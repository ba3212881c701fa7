// The fold of a sigmoid chunk's partials: the loss of each row and the sum of its row of G.
#include "fold.cuh"

namespace contrastile {

extern "C" __global__ void __launch_bounds__(256) fold_sigmoid(const __grid_constant__ FoldSigmoidArguments a) {
    __shared__ FoldBuffer buffer;
    const long long i = static_cast<long long>(blockIdx.x) * FOLD + threadIdx.x % 32;
    const bool there = i < a.length;
    double loss = fold_sum(a.loss_parts, a.part_stride, a.tiles, i, there, buffer);
    double slope = fold_sum(a.slope_parts, a.part_stride, a.tiles, i, there, buffer);
    if (threadIdx.x >= 32 || !there) return;
    if (!a.first) {
        loss += a.state[i];
        slope += a.state[a.state_stride + i];
    }
    a.state[i] = loss;
    a.state[a.state_stride + i] = slope;
    if (!a.last) return;
    const double w = a.row_weight[i];
    a.loss[i] = static_cast<float>(loss);
    a.slope[i] = w == 0.0 ? 0.0f : static_cast<float>(w * slope);
}

}  // namespace contrastile
