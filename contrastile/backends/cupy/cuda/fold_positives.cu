// The fold of the positives that ids name: sums and log-sum-exps of their logits.
//
// Of exactly one, its logit is the log-sum-exp: the dot times alpha, in double, which the tile kernels of the backward pass
// find again to the last bit of their own.
#include "fold.cuh"

namespace contrastile {

template <bool SAFE>
__device__ __forceinline__ void fold_positive_side(const PositiveSide& side, long long block, Plan* plan,
                                                   FoldBuffer& buffer) {
    const long long i = block * FOLD + threadIdx.x % 32;
    const bool there = i < side.length;
    double dots = fold_sum(side.dots, side.part_stride, side.tiles, i, there, buffer);
    double count = fold_sum(side.counts, side.part_stride, side.tiles, i, there, buffer);
    double total = SAFE ? fold_log(side.sums, side.references, side.part_stride, side.tiles, i, there, buffer)
                        : fold_sum(side.sums, side.part_stride, side.tiles, i, there, buffer);
    if (threadIdx.x >= 32 || !there) return;
    double* state = side.state + i;
    if (!side.first) {
        dots += state[0];
        count += state[side.state_stride];
        const double before = state[2 * side.state_stride];
        total = SAFE ? merge(before, total) : before + total;
    }
    state[0] = dots;
    state[side.state_stride] = count;
    state[2 * side.state_stride] = total;
    if (!side.last) return;
    const double sum = dots * (plan->alpha * LN2) + count * plan->bias;
    side.sum[i] = sum;
    side.lse[i] = count == 0.0 ? -infinity() : sum;
    if (count < 2.0) return;
    if (!SAFE) {
        // as in fold
        const bool trusted = total >= plan->threshold * count;
        if (!trusted) atomicOr(&plan->status, 1);
    }
    side.lse[i] = (SAFE ? total : log2(total) + plan->reference) * LN2 + plan->bias;
}

template <bool SAFE>
__global__ void __launch_bounds__(256) fold_positives(const __grid_constant__ FoldPositivesArguments a) {
    __shared__ FoldBuffer buffer;
    __shared__ int status;
    // read once a block, as in fold
    if (threadIdx.x == 0) status = *const_cast<volatile int*>(&a.plan->status);
    __syncthreads();
    if ((status != 0) != SAFE) return;
    const long long row_blocks = ceil_div(a.rows.length, FOLD);
    if (blockIdx.x < row_blocks) {
        fold_positive_side<SAFE>(a.rows, blockIdx.x, a.plan, buffer);
    } else {
        fold_positive_side<SAFE>(a.columns, blockIdx.x - row_blocks, a.plan, buffer);
    }
}

}  // namespace contrastile
