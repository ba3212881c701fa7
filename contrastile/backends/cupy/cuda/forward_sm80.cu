// Row and column statistics of one chunk of X in one pass over its tiles, for sm_80 and later.
//
// forward_sm80<P, SAFE, MASK, STAGES>: P one of products_sm80.cuh; any grid, best min(tiles, 2 SMs) blocks of BLOCK
// threads, SHARED_BYTES<STAGES> bytes of dynamic shared memory. Each tile writes one partial a row and one a column;
// a fold adds them in the order of the tiles, so the result does not depend on which tile was first.
#include "epilogue_forward.cuh"
#include "tile_sm80.cuh"

namespace contrastile {

struct KeptForward {
    KeptPairs pairs;
    float sums[4][WARP_SIDE], others[4][WARP_SIDE];  // of each warp's columns
    float rows[2][2][SIDE];                          // of the tile's rows, left and right warps, one or two numbers
};

static_assert(sizeof(KeptForward) <= KEPT_BYTES);

template <int MASK>
__device__ __forceinline__ void admit_tile(Accumulators& dots, const KeptForward& kept, const ForwardArguments& a,
                                           Tile at, const Thread& thread, float alpha) {
    const int columns = a.chunk.width - at.column - thread.column();
    const long long* ids = kept.pairs.column_ids + thread.column();
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
        const PairRow rows[2] = {pair_row<MASK>(kept.pairs, thread, s, 0), pair_row<MASK>(kept.pairs, thread, s, 1)};
        const bool inside0 = at.row + thread.row(s, 0) < a.chunk.height;
        const bool inside1 = at.row + thread.row(s, 1) < a.chunk.height;
        admit<MASK, GROUPS>(dots[s], rows, ids, inside0, inside1, columns, nothing(alpha));
    }
}

// The four lanes of a row hold the same number: the first of them writes it.
__device__ __forceinline__ void keep_rows(float (&to)[SIDE], const float (&row)[STRIPS][2], const Thread& thread) {
    if (thread.lane % 4 != 0) return;
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) to[thread.row(s, q)] = row[s][q];
}

// A number of row or column threadIdx.x of the tile, to its place among the partials.
__device__ __forceinline__ void write(float* parts, long long stride, int tile, int first, int length, float value) {
    const int at = first + threadIdx.x;
    if (at < length) parts[tile * stride + at] = value;
}

__device__ __forceinline__ void write_row(float* parts, const ForwardArguments& a, Tile at, float value) {
    write(parts, a.rows.stride, at.column / SIDE, at.row, a.chunk.height, value);
}

__device__ __forceinline__ void write_column(float* parts, const ForwardArguments& a, Tile at, float value) {
    write(parts, a.columns.stride, at.row / SIDE, at.column, a.chunk.width, value);
}

// TARGET: sums of the dots of positive pairs, and their counts.
template <int MASK>
__device__ __forceinline__ void add_positives(const Accumulators& dots, KeptForward& kept, const ForwardArguments& a,
                                              Tile at, const Thread& thread) {
    PairRow rows[STRIPS][2];
    bool inside[STRIPS][2];
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            rows[s][q] = pair_row<MASK>(kept.pairs, thread, s, q);
            inside[s][q] = at.row + thread.row(s, q) < a.chunk.height;
        }
    float row[STRIPS][2], count[STRIPS][2];
    positive_sums<MASK, STRIPS, GROUPS>(dots, rows, inside, kept.pairs.column_ids + thread.column(),
                                        a.chunk.width - at.column - thread.column(), thread.lane, row, count,
                                        kept.sums[thread.warp], kept.others[thread.warp]);
    keep_rows(kept.rows[0][thread.warp % 2], row, thread);
    keep_rows(kept.rows[1][thread.warp % 2], count, thread);
    __syncthreads();
    const int line = threadIdx.x, side = line / WARP_SIDE, column = line % WARP_SIDE;
    write_row(a.rows.positives, a, at, kept.rows[0][0][line] + kept.rows[0][1][line]);
    write_row(a.rows.counts, a, at, kept.rows[1][0][line] + kept.rows[1][1][line]);
    if (a.columns.sums != nullptr) {
        write_column(a.columns.positives, a, at, kept.sums[side][column] + kept.sums[2 + side][column]);
        write_column(a.columns.counts, a, at, kept.others[side][column] + kept.others[2 + side][column]);
    }
    // the same memory serves the statistics next
    __syncthreads();
}

template <int SAFE>
__device__ __forceinline__ float join_rows(float left, float right) {
    if (!SAFE) return left + right;
    const float top = finite_or_zero(fmaxf(left, right));
    return top + log2f(exp2f(left - top) + exp2f(right - top));
}

template <class P, int SAFE, int MASK, int STAGES>
__global__ void __launch_bounds__(BLOCK, 2) forward_sm80(const __grid_constant__ ForwardArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    if ((a.plan->status != 0) != (SAFE != 0)) return;  // the other instance's work
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(memory));
    KeptForward& kept = *reinterpret_cast<KeptForward*>(memory + STAGES * 2 * STEP_SIDE);
    const Thread thread;
    const Order order(a.chunk, a.features.band);
    const float alpha = usable_scale(a.plan->alpha), shift = -a.plan->reference;
    Stream<STAGES> stream(a.features, a.chunk, sizeof(typename P::Type), shared);
    for (int tile = blockIdx.x; tile < order.tiles(); tile += gridDim.x) {
        const Tile at = order.at(tile);
        if (MASK != PLAIN) keep_pairs<MASK>(kept.pairs, a.pairs, a.chunk, at);
        Accumulators dots;
        tile_of_dots<P>(stream, thread, dots);
        if (MASK == TARGET) add_positives<MASK>(dots, kept, a, at, thread);
        if (MASK != PLAIN || at.row + SIDE > a.chunk.height || at.column + SIDE > a.chunk.width)
            admit_tile<MASK>(dots, kept, a, at, thread, alpha);
        float row[STRIPS][2];
        if (SAFE)
            guarded_sums<STRIPS, GROUPS>(dots, alpha, thread.lane, row, kept.sums[thread.warp],
                                         kept.others[thread.warp]);
        else
            shared_sums<STRIPS, GROUPS>(dots, alpha, shift, thread.lane, row, kept.sums[thread.warp]);
        keep_rows(kept.rows[0][thread.warp % 2], row, thread);
        // whoever writes here next has passed the stream's barriers, and so has everybody who reads here now
        __syncthreads();
        const int line = threadIdx.x, side = line / WARP_SIDE, column = line % WARP_SIDE;
        write_row(a.rows.sums, a, at, join_rows<SAFE>(kept.rows[0][0][line], kept.rows[0][1][line]));
        if (a.columns.sums == nullptr) continue;
        const float sum = SAFE ? join_guarded<2>(&kept.sums[side][column], &kept.others[side][column], 2 * WARP_SIDE)
                               : kept.sums[side][column] + kept.sums[2 + side][column];
        write_column(a.columns.sums, a, at, sum);
    }
}

}  // namespace contrastile
