// The fold of a forward chunk's partials into the running state, and with the last chunk the log-sum-exp in nats.
//
// All in double: a pass over n / tile partials a row costs nothing beside the n products that made them, and the
// log-sum-exp that comes out is as exact as the partials were.
#include "fold.cuh"

namespace contrastile {

template <bool SAFE>
__device__ __forceinline__ void fold_side(const FoldSide& side, long long block, Plan* plan, FoldBuffer& buffer) {
    const long long i = block * FOLD + threadIdx.x % 32;
    const bool there = i < side.length;
    double total = SAFE ? fold_log(side.sums, side.references, side.part_stride, side.tiles, i, there, buffer)
                        : fold_sum(side.sums, side.part_stride, side.tiles, i, there, buffer);
    if (threadIdx.x >= 32 || !there) return;
    if (!side.first) total = SAFE ? merge(side.state[i], total) : side.state[i] + total;
    side.state[i] = total;
    if (!side.last) return;
    double log = total;
    if (!SAFE) {
        log = log2(total) + plan->reference;
        // a sum so small that what underflowed could matter; NaN is not trusted
        const bool trusted = total >= static_cast<double>(plan->threshold) * side.terms;
        // or-ing a bit gives the same word in any order
        if (!trusted) atomicOr(&plan->status, 1);
    }
    side.lse[i] = log * LN2 + plan->bias;
}

// Works on the path that stands: SAFE where plan->status is 1. A fast fold that is doubted halfway leaves numbers
// behind that the safe one overwrites, from its first chunk on.
template <bool SAFE>
__global__ void __launch_bounds__(256) fold(const __grid_constant__ FoldArguments a) {
    __shared__ FoldBuffer buffer;
    __shared__ int status;
    // read once a block: another block may raise it meanwhile, and all threads must take one way
    if (threadIdx.x == 0) status = *const_cast<volatile int*>(&a.plan->status);
    __syncthreads();
    if ((status != 0) != SAFE) return;
    const long long row_blocks = ceil_div(a.rows.length, FOLD);
    if (blockIdx.x < row_blocks) {
        fold_side<SAFE>(a.rows, blockIdx.x, a.plan, buffer);
    } else {
        fold_side<SAFE>(a.columns, blockIdx.x - row_blocks, a.plan, buffer);
    }
}

}  // namespace contrastile
