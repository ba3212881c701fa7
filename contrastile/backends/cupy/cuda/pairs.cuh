// Which pairs count, for a strip: the accumulators of one warp for 16 rows by 8 GROUPS columns.
//
// Layout of a strip, that of wgmma and of mma.sync m16n8: for each group g of 8 columns a thread holds four values,
// value[4 g + 2 q + c] = (row lane / 4 + 8 q, column 8 g + 2 (lane % 4) + c), with q and c in {0, 1}.
// Columns are counted from 2 (lane % 4), the thread's first. The columns of its values are then the constants 8 g + c, and
// comparing column numbers takes one instruction.
//
// A pair is positive by index or (TARGET) by equal ids. It is admitted unless it is excluded or (DROP) its ids are
// equal and it is not positive. An excluded pair is neither.
#pragma once

#include "arguments.cuh"
#include "numbers.cuh"

namespace contrastile {

enum Mask {
    PLAIN = 0,        // every pair is admitted
    LIMITS = 1,       // a side leaves out negatives whose logit is beyond its limit
    GUIDE = 2,        // as LIMITS, but a guide's dots are compared (sm_90a)
    EXCLUSIONS = 3,   // some are excluded by index
    DROP = 4,         // equal ids hide a pair that is not positive; exclusions by index if given
    DROP_LIMITS = 5,  // DROP and LIMITS
    DROP_GUIDE = 6,   // DROP and GUIDE (sm_90a)
    TARGET = 7        // equal ids make a pair positive; exclusions by index if given
};

template <int MASK>
constexpr bool GUIDED = MASK == GUIDE || MASK == DROP_GUIDE;
template <int MASK>
constexpr bool LIMITED = MASK == LIMITS || MASK == DROP_LIMITS || GUIDED<MASK>;

// Calls act(s, q) for each of a thread's rows.
template <int STRIPS, class Act>
__device__ __forceinline__ void for_each_row(Act act) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) act(s, q);
}

// The sum over the four lanes of a row, in each of them.
template <class T>
__device__ __forceinline__ T row_total(T x) {
    x += shuffle_xor(x, 1);
    x += shuffle_xor(x, 2);
    return x;
}

// The sum over the lanes of a column, in each of them.
template <class T>
__device__ __forceinline__ T column_total(T x) {
#pragma unroll
    for (int bit = 16; bit > 2; bit /= 2) x += shuffle_xor(x, bit);
    return x;
}

// The pair indices of one of a thread's rows. A column other than 8 g + c is not the thread's.
struct PairRow {
    int positive;
    int excluded;
    long long id;
};

struct PairStatus {
    bool positive, admitted;
};

// The number of a block's column inside a tile; -1 outside. Unsigned differences wrap, so any 64-bit index is safe.
__device__ __forceinline__ int inside_tile(long long index, long long first, int width) {
    const unsigned long long distance = static_cast<unsigned long long>(index) - static_cast<unsigned long long>(first);
    return distance < static_cast<unsigned long long>(width) ? static_cast<int>(distance) : -1;
}

// Columns inside a tile (from block column `first`, `width` of them) of a row's positive (x) and exclusion (y), or -1.
__device__ __forceinline__ int2 named_columns(const PairVectors& pairs, long long row, long long first, int width) {
    int2 named = make_int2(-1, -1);
    if (pairs.positives != nullptr) named.x = inside_tile(pairs.positives[row], first, width);
    if (pairs.excluded != nullptr) named.y = inside_tile(pairs.excluded[row], first, width);
    if (named.x == named.y) named.x = -1;  // an excluded pair is not positive
    return named;
}

// The status of the pair of a row and column 8 g + c.
template <int MASK>
__device__ __forceinline__ PairStatus pair_status(const PairRow& row, int column, long long column_id) {
    const bool visible = MASK < EXCLUSIONS || row.excluded != column;
    if (MASK == TARGET) return {visible && row.id == column_id, visible};
    const bool positive = row.positive == column;
    if (MASK >= DROP) return {positive, positive || (visible && row.id != column_id)};
    return {positive, visible};
}

// The ids of columns 8 g and 8 g + 1. `ids` points at the id of the thread's first column and is 16-byte aligned.
template <int MASK>
__device__ __forceinline__ longlong2 pair_of_ids(const long long* ids, int g) {
    if (MASK < DROP) return make_longlong2(0, 0);
    return *reinterpret_cast<const longlong2*>(ids + 8 * g);
}

// Whether a tile contains a pair (i, i).
__device__ __forceinline__ bool on_diagonal(const Chunk& chunk, int row, int column, int height, int width) {
    const long long ahead = chunk.row + row - (chunk.column + column);
    return ahead < width && ahead > -height;
}

// The scale, or 2^-126 for 0: masked_dot times 0 would be NaN. The exponential of 2^-126 dot is 1, as that of 0.
__device__ __forceinline__ float nonzero_scale(float scale) { return scale == 0.0f ? 0x1p-126f : scale; }

// The dot of a pair that does not count: its logit is -inf. A logit of 0 would be the maximum if all others are negative.
__device__ __forceinline__ float masked_dot(float scale) { return scale < 0.0f ? infinity() : -infinity(); }

// Whether every term that counts is kept above 0, so that a sum of 0 means that no term counts. That is so on the fast
// path with limits, which may leave out all negatives of a row. A dot that does not count is then NaN, or marked in the
// BeyondMask of a guide.
template <int SAFE, int MASK>
constexpr bool FLOORED = !SAFE && LIMITED<MASK>;

// The dot of a pair that does not count, on this path and with this mask.
template <int SAFE, int MASK>
__device__ __forceinline__ float masked_dot_for(float scale) {
    return FLOORED<SAFE, MASK> && !GUIDED<MASK> ? nanf("") : masked_dot(scale);
}

// Whether value `at` of strip s, with this dot, is beyond the limit of its row or of its column. Here it never is.
struct NoLimits {
    __device__ __forceinline__ bool beyond_row(float, int, int) const { return false; }
    __device__ __forceinline__ bool beyond_column(float, int, int) const { return false; }
};

// Rows and columns with limits. `columns` points at the limit of the thread's first column. `alpha` is the plan's in both
// passes, so that they compare the same bits; for a guide's dots it is 1. With NAN_BEYOND, NaN is beyond every limit.
template <int STRIPS, bool NAN_BEYOND = false>
struct Limits {
    float alpha;
    float rows[STRIPS][2];
    const float* columns;

    __device__ __forceinline__ bool beyond_row(float dot, int s, int at) const {
        return beyond(dot * alpha, rows[s][at >> 1 & 1]);
    }
    __device__ __forceinline__ bool beyond_column(float dot, int, int at) const {
        return beyond(dot * alpha, columns[8 * (at / 4) + at % 2]);
    }
    static __device__ __forceinline__ bool beyond(float x, float limit) { return NAN_BEYOND ? !(x <= limit) : x > limit; }
};

// The result of comparing a guide's dots: one bit for each value of a thread and each side.
template <int STRIPS, int VALUES>
struct BeyondMask {
    static_assert(VALUES % 32 == 0, "a strip has whole words");
    unsigned rows[STRIPS][VALUES / 32], columns[STRIPS][VALUES / 32];

    __device__ __forceinline__ bool beyond_row(float, int s, int at) const { return rows[s][at / 32] >> at % 32 & 1; }
    __device__ __forceinline__ bool beyond_column(float, int s, int at) const {
        return columns[s][at / 32] >> at % 32 & 1;
    }

    // Marks every pair whose dot is `none`.
    __device__ __forceinline__ void mark(const float (&dot)[STRIPS][VALUES], float none) {
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int at = 0; at < VALUES; ++at) {
                const unsigned bit = dot[s][at] == none ? 1u << at % 32 : 0;
                rows[s][at / 32] |= bit;
                columns[s][at / 32] |= bit;
            }
    }

    __device__ __forceinline__ void compare(const float (&dot)[STRIPS][VALUES], const Limits<STRIPS>& limits) {
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int at = 0; at < VALUES; ++at) {
                if (at % 32 == 0) rows[s][at / 32] = columns[s][at / 32] = 0;
                if (limits.beyond_row(dot[s][at], s, at)) rows[s][at / 32] |= 1u << at % 32;
                if (limits.beyond_column(dot[s][at], s, at)) columns[s][at / 32] |= 1u << at % 32;
            }
    }
};

// Overwrites with `none` the dots of pairs that do not count: pairs that are not admitted, rows that are not inside, and
// columns (from the thread's first) at or past `columns`. With NEGATIVES it also hides all pairs of equal ids;
// hide_positive hides positives by index.
// Hazard: an arithmetic change of the dots (a multiplication by the scale, say) would copy all accumulators.
template <int MASK, int GROUPS, bool NEGATIVES = false>
__device__ __forceinline__ void admit(float (&dot)[4 * GROUPS], const PairRow (&rows)[2], const long long* ids,
                                      bool inside0, bool inside1, int columns, float none) {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const longlong2 id = pair_of_ids<MASK>(ids, g);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int column = 8 * g + (e & 1);
            bool counts = (e < 2 ? inside0 : inside1) && column < columns;
            const long long column_id = e & 1 ? id.y : id.x;
            if (NEGATIVES)
                counts = counts && (MASK < EXCLUSIONS || rows[e >> 1].excluded != column) &&
                         (MASK < DROP || rows[e >> 1].id != column_id);
            else if (MASK >= EXCLUSIONS)
                counts = counts && pair_status<MASK>(rows[e >> 1], column, column_id).admitted;
            if (!counts) dot[4 * g + e] = none;
        }
    }
}

// Overwrites with `none` the dot of row q and `column`, counted from the thread's first, if the thread holds it.
template <int GROUPS>
__device__ __forceinline__ void hide_positive(float (&dot)[4 * GROUPS], int q, int column, float none) {
#pragma unroll
    for (int i = 0; i < 2 * GROUPS; ++i)
        if (column == 8 * (i / 2) + i % 2) dot[4 * (i / 2) + 2 * q + i % 2] = none;
}

}  // namespace contrastile
