// Row and column statistics of one chunk of X in one pass over its tiles, for sm_80 and later.
//
// forward_sm80<P, SAFE, MASK, STAGES>: P one of products_sm80.cuh; any grid, best min(tiles, 2 SMs) blocks of BLOCK
// threads, SHARED_BYTES<STAGES> bytes of dynamic shared memory. Each tile writes one partial per row and one per column.
// A fold adds them in the order of the tiles, so the result does not depend on the order of execution.
#include "epilogue_forward.cuh"
#include "tile_sm80.cuh"

namespace contrastile {

struct ForwardStorage {
    PairStorage pairs;
    float sums[4][WARP_SIDE], others[4][WARP_SIDE], lows[4][WARP_SIDE];  // of each warp's columns, one to three numbers
    float rows[3][2][SIDE];  // likewise of the tile's rows, of left and right warps
};

static_assert(sizeof(ForwardStorage) <= STORAGE_BYTES);

// Whether a row of the warp has its positive among the warp's columns.
__device__ __forceinline__ bool holds_positives(const ForwardStorage& storage, const Thread& thread) {
    bool found = false;
#pragma unroll
    for (int row = thread.lane; row < WARP_SIDE; row += 32) {
        // negative numbers become large ones
        const unsigned column = storage.pairs.named[thread.row_line + row].x - thread.column_line;
        found = found || column < WARP_SIDE;
    }
    return __any_sync(WHOLE_WARP, found);
}

template <int MASK>
__device__ __forceinline__ void admit_tile(Accumulators& dots, const ForwardStorage& storage, const ForwardArguments& a,
                                           Tile at, const Thread& thread, float none) {
    const int columns = a.chunk.width - at.column - thread.column();
    const long long* ids = storage.pairs.column_ids + thread.column();
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
        const PairRow rows[2] = {pair_row<MASK>(storage.pairs, thread, s, 0), pair_row<MASK>(storage.pairs, thread, s, 1)};
        const bool inside0 = at.row + thread.row(s, 0) < a.chunk.height;
        const bool inside1 = at.row + thread.row(s, 1) < a.chunk.height;
        admit<MASK, GROUPS, true>(dots[s], rows, ids, inside0, inside1, columns, none);
    }
}

__device__ __forceinline__ void hide_positives(Accumulators& dots, const ForwardStorage& storage, const Thread& thread,
                                               float none) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q)
            hide_positive<GROUPS>(dots[s], q, storage.pairs.named[thread.row(s, q)].x - thread.column(), none);
}

// The four lanes of a row hold the same number: the first of them writes it.
__device__ __forceinline__ void store_rows(float (&to)[SIDE], const float (&row)[STRIPS][2], const Thread& thread) {
    if (thread.lane % 4 != 0) return;
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) to[thread.row(s, q)] = row[s][q];
}

// Writes a number of row or column threadIdx.x of the tile to its place among the partials.
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

// Writes row sums, joined over left and right warps, and column sums, joined over upper and lower warps.
__device__ __forceinline__ void write_sums(const ForwardStorage& storage, const ForwardArguments& a, Tile at, int which,
                                           float* rows, float* columns) {
    const int line = threadIdx.x, side = line / WARP_SIDE, column = line % WARP_SIDE;
    const auto& parts = which == 0 ? storage.sums : storage.others;
    write_row(rows, a, at, storage.rows[which][0][line] + storage.rows[which][1][line]);
    if (a.columns.sums != nullptr) write_column(columns, a, at, parts[side][column] + parts[2 + side][column]);
}

// The same for sums in two parts.
__device__ __forceinline__ void write_dots(const ForwardStorage& storage, const ForwardArguments& a, Tile at) {
    const int line = threadIdx.x, side = line / WARP_SIDE, column = line % WARP_SIDE;
    TwoPart row = {storage.rows[0][0][line], storage.rows[2][0][line]};
    row += TwoPart{storage.rows[0][1][line], storage.rows[2][1][line]};
    write_row(a.rows.dots, a, at, row.high);
    write_row(a.rows.dots_low, a, at, row.rest());
    if (a.columns.sums == nullptr) return;
    TwoPart sum = {storage.sums[side][column], storage.lows[side][column]};
    sum += TwoPart{storage.sums[2 + side][column], storage.lows[2 + side][column]};
    write_column(a.columns.dots, a, at, sum.high);
    write_column(a.columns.dots_low, a, at, sum.rest());
}

// The same for sums with references of their own.
__device__ __forceinline__ void write_guarded(const ForwardStorage& storage, const ForwardArguments& a, Tile at,
                                              float* rows, float* row_references, float* columns,
                                              float* column_references) {
    const int line = threadIdx.x, side = line / WARP_SIDE, column = line % WARP_SIDE;
    const Guarded row = join_guarded<2>(&storage.rows[0][0][line], &storage.rows[1][0][line], SIDE);
    write_row(rows, a, at, row.sum);
    write_row(row_references, a, at, row.reference);
    if (a.columns.sums == nullptr) return;
    const Guarded joined = join_guarded<2>(&storage.sums[side][column], &storage.others[side][column], 2 * WARP_SIDE);
    write_column(columns, a, at, joined.sum);
    write_column(column_references, a, at, joined.reference);
}

// TARGET: sums of the dots of positive pairs and their counts, then of their exponentials.
template <int SAFE, int MASK>
__device__ __forceinline__ void add_positives(const Accumulators& dots, ForwardStorage& storage, const ForwardArguments& a,
                                              Tile at, const Thread& thread, float alpha, float shift) {
    PairRow rows[STRIPS][2];
    bool inside[STRIPS][2];
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            rows[s][q] = pair_row<MASK>(storage.pairs, thread, s, q);
            inside[s][q] = at.row + thread.row(s, q) < a.chunk.height;
        }
    float row[STRIPS][2], low[STRIPS][2], count[STRIPS][2];
    const long long* ids = storage.pairs.column_ids + thread.column();
    const int columns = a.chunk.width - at.column - thread.column();
    positive_sums<MASK, STRIPS, GROUPS>(dots, rows, inside, ids, columns, thread.lane, row, low, count,
                                        storage.sums[thread.warp], storage.lows[thread.warp],
                                        storage.others[thread.warp]);
    store_rows(storage.rows[0][thread.warp % 2], row, thread);
    store_rows(storage.rows[1][thread.warp % 2], count, thread);
    store_rows(storage.rows[2][thread.warp % 2], low, thread);
    __syncthreads();
    write_dots(storage, a, at);
    write_sums(storage, a, at, 1, a.rows.counts, a.columns.counts);
    __syncthreads();  // the next step reuses this memory, here and below
    positive_powers<SAFE, MASK, STRIPS, GROUPS>(dots, rows, inside, ids, columns, alpha, shift, thread.lane, row, count,
                                                storage.sums[thread.warp], storage.others[thread.warp]);
    store_rows(storage.rows[0][thread.warp % 2], row, thread);
    if (SAFE) store_rows(storage.rows[1][thread.warp % 2], count, thread);
    __syncthreads();
    if (SAFE)
        write_guarded(storage, a, at, a.rows.positive_sums, a.rows.positive_references, a.columns.positive_sums,
                      a.columns.positive_references);
    else
        write_sums(storage, a, at, 0, a.rows.positive_sums, a.columns.positive_sums);
    __syncthreads();
}

// What add_positives would write for a tile without positives.
template <int SAFE>
__device__ __forceinline__ void leave_no_positives(const ForwardArguments& a, Tile at) {
    write_row(a.rows.dots, a, at, 0.0f);
    write_row(a.rows.dots_low, a, at, 0.0f);
    write_row(a.rows.counts, a, at, 0.0f);
    write_row(a.rows.positive_sums, a, at, 0.0f);
    if (SAFE) write_row(a.rows.positive_references, a, at, 0.0f);
    if (a.columns.sums == nullptr) return;
    write_column(a.columns.dots, a, at, 0.0f);
    write_column(a.columns.dots_low, a, at, 0.0f);
    write_column(a.columns.counts, a, at, 0.0f);
    write_column(a.columns.positive_sums, a, at, 0.0f);
    if (SAFE) write_column(a.columns.positive_references, a, at, 0.0f);
}

// Whether the tile's named columns are in shared memory.
template <int MASK>
__device__ __forceinline__ bool loads_pairs(const ForwardArguments& a, Tile at) {
    return MASK >= EXCLUSIONS || a.plan->off_diagonal != 0 || on_diagonal(a.chunk, at.row, at.column, SIDE, SIDE);
}

template <class P, int SAFE, int MASK, int STAGES>
__global__ void __launch_bounds__(BLOCK, 2) forward_sm80(const __grid_constant__ ForwardArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    if ((a.plan->status != 0) != (SAFE != 0)) return;  // the other instance's work
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(memory));
    ForwardStorage& storage = *reinterpret_cast<ForwardStorage*>(memory + STAGES * 2 * STEP_SIDE);
    const Thread thread;
    const Order order(a.chunk, a.features.band);
    const float alpha = nonzero_scale(a.plan->alpha), shift = -a.plan->reference;
    Stream<STAGES> stream(a.features, a.chunk, sizeof(typename P::Type), shared);
    for (int tile = blockIdx.x; tile < order.tiles(); tile += gridDim.x) {
        const Tile at = order.at(tile);
        // without masks, only if a row may have its positive here; the stream's barriers separate writers from readers
        if (LIMITED<MASK> || loads_pairs<MASK>(a, at)) store_pairs<MASK>(storage.pairs, a.pairs, a.chunk, at);
        Accumulators dots;
        tile_of_dots<P>(stream, thread, dots);
        const bool masked = MASK >= EXCLUSIONS && touched<MASK>(storage.pairs);
        if (MASK == TARGET && masked) add_positives<SAFE, MASK>(dots, storage, a, at, thread, alpha, shift);
        if (MASK == TARGET && !masked) leave_no_positives<SAFE>(a, at);
        if (masked || at.row + SIDE > a.chunk.height || at.column + SIDE > a.chunk.width)
            admit_tile<MASK>(dots, storage, a, at, thread, masked_dot_for<SAFE, MASK>(alpha));
        if (MASK != TARGET && loads_pairs<MASK>(a, at) && holds_positives(storage, thread))
            hide_positives(dots, storage, thread, masked_dot_for<SAFE, MASK>(alpha));
        const auto limits = limits_of<MASK, FLOORED<SAFE, MASK>>(storage.pairs, thread, a.plan->alpha);
        float row[STRIPS][2], reference[STRIPS][2];
        if (SAFE)
            guarded_sums<STRIPS, GROUPS>(dots, alpha, thread.lane, row, reference, storage.sums[thread.warp],
                                         storage.others[thread.warp], limits);
        else
            shared_sums<STRIPS, GROUPS, FLOORED<SAFE, MASK>>(dots, alpha, shift, thread.lane, row,
                                                             storage.sums[thread.warp], limits);
        store_rows(storage.rows[0][thread.warp % 2], row, thread);
        if (SAFE) store_rows(storage.rows[1][thread.warp % 2], reference, thread);
        // the next writer has passed the stream's barriers, and so have all readers
        __syncthreads();
        if (SAFE)
            write_guarded(storage, a, at, a.rows.sums, a.rows.references, a.columns.sums, a.columns.references);
        else
            write_sums(storage, a, at, 0, a.rows.sums, a.columns.sums);
    }
}

}  // namespace contrastile
