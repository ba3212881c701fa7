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

struct Largest {
    static __device__ __forceinline__ float join(float a, float b) { return fmaxf(a, b); }
    static __device__ __forceinline__ float identity() { return -infinity(); }
};

struct Least {
    static __device__ __forceinline__ float join(float a, float b) { return fminf(a, b); }
    static __device__ __forceinline__ float identity() { return infinity(); }
};

// Of all threads of a block, in every thread. A NaN would be passed over: callers turn it into an infinity before.
// buffer: 32 floats of shared memory, free for the next call when this returns.
template <class Choice>
__device__ __forceinline__ float block_choice(float x, float* buffer) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = Choice::join(x, __shfl_xor_sync(WHOLE_WARP, x, offset));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    if (lane == 0) buffer[warp] = x;
    __syncthreads();
    float best = Choice::identity();
    for (int i = 0; i < warps; ++i) best = Choice::join(best, buffer[i]);
    __syncthreads();
    return best;
}

// The choice over every stride-th float of a list, read by a whole block.
template <class Choice>
__device__ __forceinline__ float choice_of(const float* list, long long count, int stride, float* buffer) {
    float best = Choice::identity();
    for (long long i = threadIdx.x; i < count; i += blockDim.x) best = Choice::join(best, list[i * stride]);
    return block_choice<Choice>(best, buffer);
}

}  // namespace contrastile
