// What the epilogues of the sm_80 kernels share: a thread's place in a tile, its pairs, and the store of G.
#pragma once

#include "products_sm80.cuh"

namespace contrastile {

// Dynamic shared memory: the stages of the stream, then STORAGE_BYTES for the epilogue.
constexpr int STORAGE_BYTES = 10240;

template <int STAGES>
constexpr int SHARED_BYTES = STAGES * 2 * STEP_SIDE + STORAGE_BYTES;

// The pair vectors of a tile; written before its products, read after them.
struct alignas(16) PairStorage {
    long long row_ids[SIDE], column_ids[SIDE];
    float row_limits[SIDE], column_limits[SIDE];
    int2 named[SIDE];
};

// Stores row threadIdx.x and column threadIdx.x of the tile. A named column past the chunk becomes -1: it belongs to
// another chunk.
template <int MASK>
__device__ __forceinline__ void store_pairs(PairStorage& storage, const PairVectors& pairs, const Chunk& chunk, Tile at) {
    const int line = threadIdx.x;
    const long long row = chunk.row + at.row + line, column = chunk.column + at.column + line;
    int2 named = make_int2(-1, -1);
    if (at.row + line < chunk.height) {
        named = named_columns(pairs, row, chunk.column + at.column, min(SIDE, chunk.width - at.column));
        if (MASK >= DROP) storage.row_ids[line] = pairs.row_ids[row];
        if (LIMITED<MASK>) storage.row_limits[line] = pairs.row_limits[row];
    }
    storage.named[line] = named;
    if (LIMITED<MASK> && at.column + line < chunk.width) storage.column_limits[line] = pairs.column_limits[column];
    if (MASK >= DROP) storage.column_ids[line] = at.column + line < chunk.width ? pairs.column_ids[column] : 0;
}

// Whether a row of the tile has an exclusion here, or shares an id with a column; mostly not. All threads must call it.
// Rows or columns outside the chunk may cause a false alarm.
template <int MASK>
__device__ __forceinline__ bool touched(const PairStorage& storage) {
    bool found = storage.named[threadIdx.x].y >= 0;
    if (MASK >= DROP) {
        const long long mine = storage.row_ids[threadIdx.x];
#pragma unroll 16
        for (int column = 0; column < SIDE; column += 2) {
            const longlong2 two = *reinterpret_cast<const longlong2*>(storage.column_ids + column);
            found = found || two.x == mine || two.y == mine;
        }
    }
    return __syncthreads_or(found);
}

// The pair indices of a thread's row, counted from the thread's first column: negative numbers match no column.
template <int MASK>
__device__ __forceinline__ PairRow pair_row(const PairStorage& storage, const Thread& thread, int s, int q) {
    const int row = thread.row(s, q);
    const int2 named = storage.named[row];
    return {named.x - thread.column(), named.y - thread.column(), MASK >= DROP ? storage.row_ids[row] : 0};
}

// The limits of a thread's rows and columns.
template <int MASK, bool NAN_BEYOND = false>
__device__ __forceinline__ auto limits_of(const PairStorage& storage, const Thread& thread, float alpha) {
    if constexpr (LIMITED<MASK>) {
        Limits<STRIPS, NAN_BEYOND> limits;
        limits.alpha = alpha;
        limits.columns = storage.column_limits + thread.column();
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) limits.rows[s][q] = storage.row_limits[thread.row(s, q)];
        return limits;
    } else {
        return NoLimits{};
    }
}

// Transposes 4 words over 4 lanes: lane c receives word c of each lane, and stores that of lane j as word j.
__device__ __forceinline__ void transpose_four(unsigned (&word)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k & bit) continue;
            const bool upper = lane & bit;
            const unsigned sent = upper ? word[k] : word[k | bit];
            const unsigned received = __shfl_xor_sync(WHOLE_WARP, sent, bit);
            word[k] = upper ? received : word[k];
            word[k | bit] = upper ? word[k | bit] : received;
        }
}

// Stores the part of strip s of G that lies inside the chunk. g: (height, width) of T.
// With two-byte types four lanes exchange words until each has 8 neighbouring columns, and writes them as 16 bytes.
template <class T>
__device__ __forceinline__ void store_strip(const float (&value)[4 * GROUPS], int s, T* g, long long stride,
                                            const Chunk& chunk, Tile at, const Thread& thread) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        const int row = at.row + thread.row(s, q);
        T* line = g + row * stride;
        const bool inside = row < chunk.height;
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int half = 0; half < GROUPS; half += 4) {
                unsigned word[4];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    word[k] = narrow_pair<T>(value[4 * (half + k) + 2 * q], value[4 * (half + k) + 2 * q + 1]);
                transpose_four(word, thread.lane);
                const int column = at.column + thread.column_line + 8 * (half + thread.lane % 4);
                if (inside && column + 8 <= chunk.width) {
                    *reinterpret_cast<uint4*>(line + column) = make_uint4(word[0], word[1], word[2], word[3]);
                } else if (inside) {
#pragma unroll
                    for (int k = 0; k < 8; ++k)
                        if (column + k < chunk.width)
                            line[column + k] = T{static_cast<unsigned short>(word[k / 2] >> 16 * (k % 2))};
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < GROUPS; ++k) {
                const int column = at.column + thread.column() + 8 * k;
                if (inside && column + 2 <= chunk.width) {
                    *reinterpret_cast<float2*>(line + column) = make_float2(value[4 * k + 2 * q], value[4 * k + 2 * q + 1]);
                } else if (inside && column < chunk.width) {
                    line[column] = value[4 * k + 2 * q];
                }
            }
        }
    }
}

}  // namespace contrastile
