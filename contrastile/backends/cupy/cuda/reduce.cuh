// Reductions in one fixed order: the same inputs give the same bits.
#pragma once

#include "numbers.cuh"

namespace contrastile {

__device__ __forceinline__ long long ceil_div(long long a, long long b) { return (a + b - 1) / b; }

// The sum over the 32 lanes, in every lane.
template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(WHOLE_WARP, x, offset);
    return x;
}

// The maximum of each of N numbers over all threads of a block, in every thread. Call it once per kernel: nothing guards
// its buffer against a second call. fmaxf ignores NaN, so callers replace NaN by infinity first.
template <int N>
__device__ __forceinline__ void block_largest(float (&x)[N]) {
    __shared__ float buffer[N][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = fmaxf(x[n], __shfl_xor_sync(WHOLE_WARP, x[n], offset));
#pragma unroll
    for (int n = 0; n < N; ++n)
        if (lane == 0) buffer[n][warp] = x[n];
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) x[n] = lane < warps ? buffer[n][lane] : -infinity();
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
#pragma unroll
        for (int n = 0; n < N; ++n) x[n] = fmaxf(x[n], __shfl_xor_sync(WHOLE_WARP, x[n], offset));
}

}  // namespace contrastile
