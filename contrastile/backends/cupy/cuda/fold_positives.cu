// The fold of the positives that ids name: sums of their logits from partial sums of dots and partial counts.
#include "fold.cuh"

namespace contrastile {

__device__ __forceinline__ void fold_positive_side(const PositiveSide& side, long long block, const Plan& plan,
                                                   FoldBuffer& buffer) {
    const long long i = block * FOLD + threadIdx.x % 32;
    const bool there = i < side.length;
    double dots = fold_sum(side.dots, side.part_stride, side.tiles, i, there, buffer);
    double count = fold_sum(side.counts, side.part_stride, side.tiles, i, there, buffer);
    if (threadIdx.x >= 32 || !there) return;
    if (!side.first) {
        dots += side.state[i];
        count += side.state[side.state_stride + i];
    }
    side.state[i] = dots;
    side.state[side.state_stride + i] = count;
    // the alpha of the tile kernels, as in measure
    if (side.last) side.out[i] = static_cast<float>(dots * (plan.alpha * LN2) + count * plan.bias);
}

template <bool SAFE>
__global__ void __launch_bounds__(256) fold_positives(const __grid_constant__ FoldPositivesArguments a) {
    __shared__ FoldBuffer buffer;
    if ((a.plan->status != 0) != SAFE) return;
    const long long row_blocks = ceil_div(a.rows.length, FOLD);
    if (blockIdx.x < row_blocks) {
        fold_positive_side(a.rows, blockIdx.x, *a.plan, buffer);
    } else {
        fold_positive_side(a.columns, blockIdx.x - row_blocks, *a.plan, buffer);
    }
}

}  // namespace contrastile
