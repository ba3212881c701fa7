// The folds: a chunk's partials join the running state, and the last chunk gives the statistics.
//
// A block folds FOLD rows or columns: 8 warps share the tiles, 32 lanes are neighbouring rows. All sums are in double: n /
// tile partials per row cost nothing beside the n products that made them, and the result is as exact as the partials.
#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

// One double per warp and lane. Sums are taken in the order of the tiles within a warp, then in the order of the warps.
struct FoldBuffer {
    double at[8][FOLD];

    // The sum over the warps, for warp 0.
    __device__ __forceinline__ double sum(double x, int warp, int lane) {
        at[warp][lane] = x;
        __syncthreads();
        if (warp == 0) {
            x = 0.0;
#pragma unroll
            for (int w = 0; w < 8; ++w) x += at[w][lane];
        }
        __syncthreads();
        return x;
    }
};

// Sum over tiles of parts (tiles, stride) at i, in double; for lanes of warp 0. `there`: whether i is in range.
__device__ __forceinline__ double fold_sum(const float* parts, long long stride, long long tiles, long long i,
                                           bool there, FoldBuffer& buffer) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double sum = 0.0;
    if (there) {
#pragma unroll 4
        for (long long t = warp; t < tiles; t += 8) sum += parts[t * stride + i];
    }
    return buffer.sum(sum, warp, lane);
}

// log2 of the sum over tiles of sums 2^reference, both (tiles, stride), at i; for lanes of warp 0. The largest reference
// is subtracted before anything is rounded to float.
__device__ __forceinline__ double fold_log(const float* sums, const float* references, long long stride, long long tiles,
                                           long long i, bool there, FoldBuffer& buffer) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float top = -infinity();
    if (there) {
#pragma unroll 4
        for (long long t = warp; t < tiles; t += 8)
            if (sums[t * stride + i] != 0.0f) top = fmaxf(top, references[t * stride + i]);  // true for NaN
    }
    buffer.at[warp][lane] = top;
    __syncthreads();
    for (int w = 0; w < 8; ++w) top = fmaxf(top, static_cast<float>(buffer.at[w][lane]));
    __syncthreads();
    const float shift = finite_or_zero(top);
    double sum = 0.0;
    if (there) {
#pragma unroll 4
        for (long long t = warp; t < tiles; t += 8)
            if (sums[t * stride + i] != 0.0f) sum += rescaled(sums[t * stride + i], references[t * stride + i] - shift);
    }
    return shift + log2(buffer.sum(sum, warp, lane));
}

// log2 of a running state, which is a sum against the plan's reference, or with SAFE already a logarithm.
template <bool SAFE>
__device__ __forceinline__ double log_of(double total, const Plan* plan) {
    return SAFE ? total : log2(total) + plan->reference;
}

template <bool SAFE, class Side>
__device__ __forceinline__ double fold_terms(const Side& side, long long i, bool there, FoldBuffer& buffer) {
    return SAFE ? fold_log(side.sums, side.references, side.part_stride, side.tiles, i, there, buffer)
                : fold_sum(side.sums, side.part_stride, side.tiles, i, there, buffer);
}

template <bool SAFE>
__device__ __forceinline__ void fold_side(const FoldSide& side, long long block, Plan* plan, FoldBuffer& buffer) {
    const long long i = block * FOLD + threadIdx.x % 32;
    const bool there = i < side.length;
    double total = fold_terms<SAFE>(side, i, there, buffer);
    if (threadIdx.x >= 32 || !there) return;
    if (!side.first) total = SAFE ? merge(side.state[i], total) : side.state[i] + total;
    side.state[i] = total;
    if (!side.last) return;
    const double log = log_of<SAFE>(total, plan);
    if (!SAFE) {
        // a sum below the threshold may have lost terms to underflow; NaN fails the comparison
        const bool trusted =
            total >= static_cast<double>(plan->threshold) * side.terms || (side.empty && total == 0.0);
        // an atomic OR gives the same word in any order
        if (!trusted) atomicOr(&plan->status, 1);
    }
    side.lse[i] = log * LN2 + plan->bias;
}

// Positives that ids name. The log-sum-exp of exactly one positive is its logit: the dot times alpha, in double. The tile
// kernels of the backward pass form the same logit, to the last bit.
template <bool SAFE>
__device__ __forceinline__ void fold_side(const PositiveSide& side, long long block, Plan* plan, FoldBuffer& buffer) {
    const long long i = block * FOLD + threadIdx.x % 32;
    const bool there = i < side.length;
    double dots = fold_sum(side.dots, side.part_stride, side.tiles, i, there, buffer);
    dots += fold_sum(side.dots_low, side.part_stride, side.tiles, i, there, buffer);
    double count = fold_sum(side.counts, side.part_stride, side.tiles, i, there, buffer);
    double total = fold_terms<SAFE>(side, i, there, buffer);
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
        const bool trusted = total >= plan->threshold * count;
        if (!trusted) atomicOr(&plan->status, 1);
    }
    side.lse[i] = log_of<SAFE>(total, plan) * LN2 + plan->bias;
}

// Both sides, if SAFE matches plan->status. If a fast fold raises the status halfway, the safe one starts again from its
// first chunk and overwrites everything.
template <bool SAFE, class Arguments>
__device__ __forceinline__ void fold_sides(const Arguments& a) {
    __shared__ FoldBuffer buffer;
    __shared__ int status;
    // one thread reads the status, because another block may raise it and all threads must take the same branch
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

template <bool SAFE>
__global__ void __launch_bounds__(256) fold(const __grid_constant__ FoldArguments a) {
    fold_sides<SAFE>(a);
}

template <bool SAFE>
__global__ void __launch_bounds__(256) fold_positives(const __grid_constant__ FoldPositivesArguments a) {
    fold_sides<SAFE>(a);
}

// The loss of each row of a sigmoid chunk, and the sum of its row of G.
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
