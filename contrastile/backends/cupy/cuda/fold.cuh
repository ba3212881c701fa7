// How a block adds the partials of FOLD rows or columns: 8 warps share the tiles, 32 lanes are neighbouring rows.
#pragma once

#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

// One double a warp and lane. Every sum is taken in the order of the tiles within a warp, then in that of the warps.
struct FoldBuffer {
    double at[8][FOLD];
};

// Sum over tiles of parts (tiles, stride) at i, in double; for lanes of warp 0. `there`: whether i is a row at all.
__device__ __forceinline__ double fold_sum(const float* parts, long long stride, long long tiles, long long i,
                                           bool there, FoldBuffer& buffer) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double sum = 0.0;
    if (there) {
#pragma unroll 4
        for (long long t = warp; t < tiles; t += 8) sum += parts[t * stride + i];
    }
    buffer.at[warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
        sum = 0.0;
#pragma unroll
        for (int w = 0; w < 8; ++w) sum += buffer.at[w][lane];
    }
    __syncthreads();
    return sum;
}

// log2 of the sum over tiles of sums 2^reference, both (tiles, stride), at i; for lanes of warp 0. The largest reference
// is taken off before anything is rounded to float.
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
    buffer.at[warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
        sum = 0.0;
#pragma unroll
        for (int w = 0; w < 8; ++w) sum += buffer.at[w][lane];
    }
    __syncthreads();
    return shift + log2(sum);
}

}  // namespace contrastile
