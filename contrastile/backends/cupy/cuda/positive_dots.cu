// The logits of the positives that indices name, by the products of the sm_80 tile kernels.
//
// Tensor cores truncate as they add, so every dot of a tile is a little too small. The loss depends on the differences of
// the other logits from the positive's, so all must have the same error. Therefore a positive's dot uses the tile kernels'
// instructions in their order, not a more exact product; wgmma adds in that order too.
#include "features.cuh"
#include "products_sm80.cuh"

namespace contrastile {

// The logit of a pair from its dot product.
//
// It is dot * (alpha ln 2) + bias with the rounded alpha of the tile kernels, not dot * scale + bias, so that both have
// the same error. In double the logit itself is not rounded.
__device__ __forceinline__ double logit_of(float dot, const PositiveDotsArguments& a) {
    const double alpha = in_powers_of_two(*a.scale);
    return dot * (alpha * LN2) + (a.bias == nullptr ? 0.0 : *a.bias);
}

// One word of a line, starting at feature `first`; features past the end are 0.
template <class T>
__device__ __forceinline__ unsigned word(const T* line, long long first, long long depth) {
    if constexpr (sizeof(T) == 4) {
        return first < depth ? __float_as_uint(line[first]) : 0u;
    } else {
        const unsigned low = first < depth ? line[first].bits : 0u, high = first + 1 < depth ? line[first + 1].bits : 0u;
        return low | high << 16;
    }
}

// Adds row x times column y of one slice of 32 bytes. Each lane holds the words that ldmatrix would give it.
template <class P>
__device__ __forceinline__ void add_slice(float (&to)[4], const unsigned (&x)[2], const unsigned (&y)[2]) {
    const unsigned rows[4] = {P::word(x[0]), 0u, P::word(x[1]), 0u};
    P::add(to, rows, P::word(y[0]), P::word(y[1]));
}

// The dots of a warp's 8 pairs: lanes 4 p to 4 p + 3 read the lines of pair p. Of the 16 x 8 products of an instruction
// only the diagonal of the upper half is used: lane 4 p + p / 2 holds the dot of pair p.
template <class P>
__device__ __forceinline__ float dot_of(const typename P::Type* x, const typename P::Type* y, long long depth, int lane) {
    using T = typename P::Type;
    constexpr int SLICE = 32 / sizeof(T), AHEAD = 4;  // slices that are loaded together
    const int place = lane % 4 * (4 / sizeof(T));
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    unsigned row[AHEAD][2], column[AHEAD][2];
    long long k = 0;
#pragma unroll 1
    for (; k + AHEAD * SLICE <= depth; k += AHEAD * SLICE) {
#pragma unroll
        for (int half = 0; half < 2 * AHEAD; ++half) {
            const long long first = k + place + half * (SLICE / 2);
            row[half / 2][half % 2] = *reinterpret_cast<const unsigned*>(x + first);
            column[half / 2][half % 2] = *reinterpret_cast<const unsigned*>(y + first);
        }
#pragma unroll
        for (int slice = 0; slice < AHEAD; ++slice) add_slice<P>(sums, row[slice], column[slice]);
    }
#pragma unroll 1
    for (; k < depth; k += SLICE) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const long long first = k + place + half * (SLICE / 2);
            row[0][half] = word(x, first, depth);
            column[0][half] = word(y, first, depth);
        }
        add_slice<P>(sums, row[0], column[0]);
    }
    return lane / 4 % 2 ? sums[1] : sums[0];
}

// Without tensor cores each lane computes the whole chain of its pair.
template <>
__device__ __forceinline__ float dot_of<Ieee>(const float* x, const float* y, long long depth, int) {
    float sum = 0.0f;
#pragma unroll 8
    for (long long k = 0; k < depth; ++k) sum = fmaf(x[k], y[k], sum);
    return sum;
}

// Logits by row and by column. The columns' are right if every positive is on the diagonal. Otherwise the precheck sets
// plan->off_diagonal, and sum_positives overwrites them.
template <class P>
__global__ void __launch_bounds__(256) positive_dots(const __grid_constant__ PositiveDotsArguments a) {
    static_assert(PAIRS == 256 / 4, "four lanes have one pair");
    const int lane = threadIdx.x % 32;
    const long long i = static_cast<long long>(blockIdx.x) * PAIRS + threadIdx.x / 4;
    const long long j = i < a.m ? positive_column(a.positives[i], index_or_none(a.excluded, i), a.n) : -1;
    double logit = 0.0;
    // every lane of a warp takes part in the products of all eight pairs
    if (__any_sync(WHOLE_WARP, j >= 0)) {
        using T = typename P::Type;
        const T* row = static_cast<const T*>(a.rows.data) + (j < 0 ? 0 : i * a.rows.row_stride);
        const T* column = static_cast<const T*>(a.columns.data) + (j < 0 ? 0 : j * a.columns.row_stride);
        const float dot = dot_of<P>(row, column, a.depth, lane);
        if (j >= 0) logit = logit_of(dot, a);
    }
    if (lane % 4 != lane / 8) return;
    if (i < a.m) {
        a.row_lse[i] = j < 0 ? -infinity() : logit;
        a.row_sum[i] = logit;
    }
    if (i < a.n && a.column_lse != nullptr) {
        a.column_lse[i] = j == i ? logit : -infinity();
        a.column_sum[i] = j == i ? logit : 0.0;
    }
}

}  // namespace contrastile
