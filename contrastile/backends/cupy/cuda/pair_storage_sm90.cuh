// The pair vectors of a tile, fetched into shared memory while the products run, for the epilogues on sm_90a.
#pragma once

#include "pairs.cuh"
#include "pipeline_sm90.cuh"

namespace contrastile {

// Fetches LENGTH elements of a block's vector from `first` on; elements past `count`, the end of the chunk, are zero.
template <int LENGTH, class T>
__device__ __forceinline__ void fetch_vector(T (&to)[LENGTH], const T* vector, long long first, int count, int thread) {
#pragma unroll
    for (int i = 0; i < (LENGTH + WARPGROUP - 1) / WARPGROUP; ++i) {
        const int at = thread + i * WARPGROUP;
        if (LENGTH % WARPGROUP != 0 && at >= LENGTH) continue;
        const bool inside = at < count;
        fetch<sizeof(T)>(shared_address(&to[at]), vector + (inside ? first + at : 0), inside);
    }
}

// The row of the tile that strip s and q of a lane hold.
__device__ __forceinline__ int row_in_tile(int warp, int lane, int s, int q) {
    return 64 * s + 16 * warp + lane / 4 + 8 * q;
}

// Writes one number per row to parts, (tile columns, stride). The four lanes of a row hold the same four numbers: each
// lane writes one.
__device__ __forceinline__ void write_rows(const float (&row)[STRIPS][2], float* parts, long long stride,
                                           const Place& tile, int height, int warp, int lane) {
    const int s = lane >> 1 & 1, q = lane & 1, at = tile.row + row_in_tile(warp, lane, s, q);
    const float low = q ? row[0][1] : row[0][0], high = q ? row[1][1] : row[1][0];
    if (at < height) parts[tile.column / BN * stride + at] = s ? high : low;
}

// An id folded to 32 bits. Equal ids stay equal.
__device__ __forceinline__ unsigned folded(long long id) {
    return static_cast<unsigned>(id) ^ static_cast<unsigned>(static_cast<unsigned long long>(id) >> 32);
}

// The least and the largest folded id over all lanes of a warp.
template <int COUNT>
__device__ __forceinline__ uint2 range_of_ids(const unsigned (&ids)[COUNT]) {
    unsigned low = ids[0], high = ids[0];
#pragma unroll
    for (int i = 1; i < COUNT; ++i) {
        low = min(low, ids[i]);
        high = max(high, ids[i]);
    }
    return make_uint2(__reduce_min_sync(WHOLE_WARP, low), __reduce_max_sync(WHOLE_WARP, high));
}

template <int MASK>
struct alignas(16) PairStorage {
    static constexpr bool IDS = MASK >= DROP, EXCLUDED = MASK >= EXCLUSIONS, INDEXED = MASK != TARGET;
    long long column_ids[IDS ? BN : 2];  // the first member, because aligned pairs are read from it
    long long row_ids[IDS ? BM : 2], excluded[EXCLUDED ? BM : 2], positives[INDEXED ? BM : 2];
    float column_limits[LIMITED<MASK> ? BN : 4], row_limits[LIMITED<MASK> ? BM : 4];  // aligned as column_ids

    __device__ __forceinline__ void prefetch(const PairVectors& pairs, const Chunk& chunk, const Place& tile,
                                             int thread, bool load_pairs = true) {
        const long long row = chunk.row + tile.row;
        const int rows = chunk.height - tile.row, columns = chunk.width - tile.column;
        if constexpr (LIMITED<MASK>) {
            fetch_vector(row_limits, pairs.row_limits, row, rows, thread);
            fetch_vector(column_limits, pairs.column_limits, chunk.column + tile.column, columns, thread);
        }
        if (!load_pairs) return;
        if constexpr (IDS) {
            fetch_vector<BM>(row_ids, pairs.row_ids, row, rows, thread);
            fetch_vector<BN>(column_ids, pairs.column_ids, chunk.column + tile.column, columns, thread);
        }
        if constexpr (EXCLUDED)
            if (pairs.excluded != nullptr) fetch_vector<BM>(excluded, pairs.excluded, row, rows, thread);
        if constexpr (INDEXED)
            if (pairs.positives != nullptr) fetch_vector<BM>(positives, pairs.positives, row, rows, thread);
    }

    // Column inside the tile of the positive (x) and of the exclusion (y) of a row of the tile, -1 for none.
    __device__ __forceinline__ int2 named_columns(const PairVectors& pairs, const Chunk& chunk, const Place& tile,
                                          int row) const {
        const long long first = chunk.column + tile.column;
        const int width = min(BN, chunk.width - tile.column);
        int2 found = make_int2(-1, -1);
        if constexpr (INDEXED)
            if (pairs.positives != nullptr) found.x = inside_tile(positives[row], first, width);
        if constexpr (EXCLUDED)
            if (pairs.excluded != nullptr) found.y = inside_tile(excluded[row], first, width);
        if (EXCLUDED && found.x == found.y) found.x = -1;  // an excluded pair is not positive
        return found;
    }

    // Whether a row of the tile has an exclusion here, or the ranges of the rows' and the columns' ids overlap. With sorted
    // ids few tiles do. The result is the same in every warp.
    __device__ __forceinline__ bool near(const PairVectors& pairs, const Chunk& chunk, const Place& tile,
                                         int lane) const {
        bool found = false;
        unsigned of_columns[BN / 32], of_rows[BM / 32];
#pragma unroll
        for (int i = 0; i < BN / 32; ++i) of_columns[i] = folded(column_ids[lane + 32 * i]);
#pragma unroll
        for (int i = 0; i < BM / 32; ++i) {
            of_rows[i] = folded(row_ids[lane + 32 * i]);
            found = found || named_columns(pairs, chunk, tile, lane + 32 * i).y >= 0;
        }
        return __any_sync(WHOLE_WARP, found) || !apart(of_columns, of_rows);
    }

    // Whether some row of the warp has an exclusion or (INDEXED) a positive in the tile, or shares an id with a column. For
    // most warps the answer is no, and they skip all masks. It may be a false alarm: ids are compared folded to 32 bits.
    __device__ __forceinline__ bool touched(const PairVectors& pairs, const Chunk& chunk, const Place& tile, int warp,
                                            int lane) const {
        const int top = row_in_tile(warp, 0, lane / 16, 0) + lane % 16;  // each lane examines one row
        const int2 columns = named_columns(pairs, chunk, tile, top);
        bool found = columns.y >= 0 || columns.x >= 0;
        if constexpr (IDS) {
            unsigned mine[BN / 32];
#pragma unroll
            for (int i = 0; i < BN / 32; ++i) mine[i] = folded(column_ids[lane + 32 * i]);
            const unsigned own[1] = {folded(row_ids[top])};
            if (!apart(mine, own))
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int row = 0; row < 16; row += 2) {
                    const longlong2 two =
                        *reinterpret_cast<const longlong2*>(row_ids + row_in_tile(warp, 0, s, 0) + row);
#pragma unroll
                    for (int i = 0; i < BN / 32; ++i)
                        found = found || folded(two.x) == mine[i] || folded(two.y) == mine[i];
                }
        }
        return __any_sync(WHOLE_WARP, found);
    }

    // These columns and the row's id, for a thread whose first column is `first`.
    __device__ __forceinline__ PairRow row(int2 columns, int row, int first) const {
        PairRow pair{columns.x - first, columns.y - first, 0};
        if constexpr (IDS) pair.id = row_ids[row];
        return pair;
    }

    // The limits of a thread's rows and columns.
    template <bool NAN_BEYOND = false>
    __device__ __forceinline__ auto limits(float alpha, int warp, int lane) const {
        if constexpr (LIMITED<MASK>) {
            Limits<STRIPS, NAN_BEYOND> limits;
            limits.alpha = alpha;
            limits.columns = column_limits + 2 * (lane & 3);
            for_each_row<STRIPS>([&](int s, int q) { limits.rows[s][q] = row_limits[row_in_tile(warp, lane, s, q)]; });
            return limits;
        } else {
            return NoLimits{};
        }
    }

    __device__ __forceinline__ const long long* ids(int first) const { return column_ids + (IDS ? first : 0); }

  private:
    // Whether the ranges of two sets of folded ids, over all lanes, are disjoint.
    template <int A, int B>
    static __device__ __forceinline__ bool apart(const unsigned (&a)[A], const unsigned (&b)[B]) {
        const uint2 first = range_of_ids(a), second = range_of_ids(b);
        return first.x > second.y || second.x > first.y;
    }
};

}  // namespace contrastile
