// The shared part of the sm_90a kernels of narrow features. Features of at most 128 fit into shared memory whole: rows stay
// there while all columns pass, and registers hold a row's sums. The kernels compute the rows' side alone.
//
// The chunk has all columns of the block. It is cut into tiles of 128 x 128, numbered along the tile rows. Each block takes
// an equal number of consecutive tiles: whole tile rows, and parts of its first and last.
//
// In a block one thread, the producer, copies the rows of each tile row and feeds a ring of stages, each with the 128
// columns of a tile. Three other warps bring the columns' vectors. Each of two consumers takes 64 rows.
//
// Hazards:
// * Columns past the block's arrive as zeros and must be masked: 2^(0 - r) is not 0, and may be infinite.
// * A vector warp must not be two passes of the ring ahead of the consumers, because parity distinguishes only two phases.
//   Number the stages through all passes. Before a warp waits for stage c it has filled stage c - VECTOR_WARPS, and before
//   that it saw stage c - VECTOR_WARPS - STAGES emptied. Stages are emptied in order, so stage c - 2 STAGES is empty too
//   if VECTOR_WARPS <= STAGES.
#pragma once

#include "pair_storage_sm90.cuh"

namespace contrastile {
namespace narrow_rows {

constexpr int SIDE = NARROW_SIDE;
constexpr int HALF = 64, CONSUMER_ROWS = 64, PARTS = SIDE / 16, STAGES = 4, VECTOR_WARPS = 3;
constexpr int HALF_BYTES = SIDE * HALF * 2, TILE_BYTES = 2 * HALF_BYTES;  // 128 rows or columns of 64 features, of 128
constexpr int OF_PRODUCERS = 40, OF_CONSUMERS = 232;                      // registers of a thread

// Ids of the columns of a stage.
template <int MASK>
struct alignas(16) ColumnIds {
    static constexpr bool IDS = MASK >= DROP;
    long long ids[IDS ? SIDE : 2];
    unsigned low, high;  // least and largest folded id

    // One warp loads them.
    __device__ __forceinline__ void bring(const PairVectors& pairs, const Chunk& chunk, int tile, int lane) {
        if constexpr (IDS) {
            unsigned mine[SIDE / 32];
#pragma unroll
            for (int i = 0; i < SIDE / 32; ++i) {
                const int here = lane + 32 * i, column = tile * SIDE + here;
                const long long id = column < chunk.width ? pairs.column_ids[column] : 0;
                ids[here] = id;
                mine[i] = folded(id);
            }
            const uint2 range = range_of_ids(mine);
            if (lane == 0) {
                low = range.x;
                high = range.y;
            }
        }
    }
};

// Pair indices of one consumer's rows: columns of the block, -1 for none.
struct RowPairs {
    int positive[CONSUMER_ROWS], excluded[CONSUMER_ROWS];
    alignas(16) long long id[CONSUMER_ROWS];
};

// Shared memory of a block. Columns, Rows: the vectors of a stage's columns and of a consumer's rows.
template <class Columns, class Rows>
struct Shared {
    static constexpr int COLUMNS_AT = 2 * TILE_BYTES, VECTORS_AT = COLUMNS_AT + STAGES * TILE_BYTES;
    static constexpr int ROWS_AT = VECTORS_AT + STAGES * sizeof(Columns);
    static constexpr int FULL_AT = ROWS_AT + 2 * sizeof(Rows), EMPTY_AT = FULL_AT + 8 * STAGES;
    static constexpr int ROWS_FULL_AT = EMPTY_AT + 8 * STAGES, ROWS_EMPTY_AT = ROWS_FULL_AT + 16;
    static_assert(ROWS_EMPTY_AT + 16 + SWIZZLE_ATOM <= ALL_SHARED);
};

// Which block computes which tiles of the chunk.
struct Shares {
    long long rows, columns, blocks;  // tile rows, tile columns, blocks of the grid

    __device__ __forceinline__ Shares(const Chunk& chunk, int blocks_)
        : rows((chunk.height + SIDE - 1) / SIDE), columns((chunk.width + SIDE - 1) / SIDE), blocks(blocks_) {}

    __device__ __forceinline__ long long begin(long long block) const { return block * (rows * columns) / blocks; }
    __device__ __forceinline__ long long block_of(long long tile) const {
        return ((tile + 1) * blocks - 1) / (rows * columns);
    }
};

// A block's part of one tile row: tile columns [first, last).
struct Segment {
    int number, row, first, last;
};

template <class Do>
__device__ __forceinline__ void for_each_segment(const Shares& shares, Do act) {
    const long long end = shares.begin(blockIdx.x + 1);
    int number = 0;
    for (long long tile = shares.begin(blockIdx.x); tile < end; ++number) {
        const int row = static_cast<int>(tile / shares.columns), first = static_cast<int>(tile - row * shares.columns);
        const int last = static_cast<int>(min(shares.columns, first + end - tile));
        act(Segment{number, row, first, last});
        tile += last - first;
    }
}

template <class L>
__device__ __forceinline__ void produce(unsigned base, const TensorMap& rows, const TensorMap& columns,
                                        const Chunk& chunk, const Shares& shares) {
    Cursor<STAGES> at;
    at.parity = 1;  // the phase before the first counts as complete: the ring starts empty
    for_each_segment(shares, [&](const Segment& s) {
        const int buffer = s.number & 1;
        const unsigned rows_full = base + L::ROWS_FULL_AT + 8 * buffer;
        barrier_wait(base + L::ROWS_EMPTY_AT + 8 * buffer, ~s.number >> 1 & 1);
        barrier_expect(rows_full, TILE_BYTES);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            copy_in(base + buffer * TILE_BYTES + half * HALF_BYTES, rows, half * HALF,
                    static_cast<int>(chunk.row) + s.row * SIDE, rows_full);
        for (int column = s.first; column < s.last; ++column) {
            const unsigned full = base + L::FULL_AT + 8 * at.stage;
            const unsigned to = base + L::COLUMNS_AT + at.stage * TILE_BYTES;
            barrier_wait(base + L::EMPTY_AT + 8 * at.stage, at.parity);
            barrier_expect(full, TILE_BYTES);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                copy_in(to + half * HALF_BYTES, columns, half * HALF, column * SIDE, full);
            at.step();
        }
    });
}

// Each warp calls bring(vectors of a stage, tile column) for every VECTOR_WARPS-th stage. Several warps hide the latency.
template <class L, class Columns, class Bring>
__device__ __forceinline__ void produce_vectors(unsigned base, Columns* stages, const Shares& shares, int warp,
                                                Bring bring) {
    Cursor<STAGES> at;
    at.parity = 1;
    int turn = 0;
    for_each_segment(shares, [&](const Segment& s) {
        for (int tile = s.first; tile < s.last; ++tile, at.step()) {
            const bool mine = turn == warp;
            turn = turn + 1 == VECTOR_WARPS ? 0 : turn + 1;
            if (!mine) continue;
            barrier_wait(base + L::EMPTY_AT + 8 * at.stage, at.parity);
            bring(stages[at.stage], tile);
            barrier_arrive(base + L::FULL_AT + 8 * at.stage);
        }
    });
}

// The shared part of both kernels' consumers. A consumer takes 64 rows of each tile.
template <class T, int MASK, class ColumnsOfStage, class RowsOfConsumer>
struct Consumer {
    static constexpr bool IDS = MASK >= DROP;
    using Columns = ColumnsOfStage;
    using Rows = RowsOfConsumer;
    using L = Shared<Columns, Rows>;

    unsigned base;  // shared memory
    int consumer, warp, lane;
    const Shares& shares;
    const Columns* stages;
    Rows& rows;
    // of the current tile row
    int named;           // of one of the warp's rows: the column of its positive (lanes under 16) or exclusion
    unsigned low, high;  // least and largest folded id of the warp's rows

    __device__ __forceinline__ Consumer(unsigned base_, int consumer_, int warp_, int lane_, const Shares& shares_,
                                        const Columns* stages_, Rows& rows_)
        : base(base_), consumer(consumer_), warp(warp_), lane(lane_), shares(shares_), stages(stages_), rows(rows_) {}

    // The thread's row q of this consumer's.
    __device__ __forceinline__ int row_of(int q) const { return 16 * warp + lane / 4 + 8 * q; }

    // The number inside the chunk of one of this consumer's rows.
    __device__ __forceinline__ int in_chunk(const Segment& s, int row) const {
        return s.row * SIDE + consumer * CONSUMER_ROWS + row;
    }

    // more(row, its number in the block, whether it is in the chunk) fetches the kernel's other vectors.
    template <class More>
    __device__ __forceinline__ void fetch_rows(const Segment& s, const PairVectors& pairs, const Chunk& chunk, More more) {
        consumer_sync(consumer);  // all have finished the previous tile row
        const int mine = consumer_thread();
        if (mine < CONSUMER_ROWS) {
            const bool inside = in_chunk(s, mine) < chunk.height;
            const long long i = chunk.row + in_chunk(s, mine);
            int positive = -1, excluded = -1;
            if (inside && MASK != TARGET && pairs.positives != nullptr)
                positive = inside_tile(pairs.positives[i], 0, chunk.width);
            if (inside && MASK != PLAIN && pairs.excluded != nullptr)
                excluded = inside_tile(pairs.excluded[i], 0, chunk.width);
            rows.positive[mine] = positive == excluded ? -1 : positive;  // an excluded pair is not positive
            rows.excluded[mine] = excluded;
            if (IDS) rows.id[mine] = inside ? pairs.row_ids[i] : 0;
            more(mine, i, inside);
        }
        consumer_sync(consumer);
        const int one = 16 * warp + lane % 16;
        named = lane < 16 ? rows.positive[one] : rows.excluded[one];
        if (IDS) {
            const unsigned id[1] = {folded(rows.id[one])};
            const uint2 range = range_of_ids(id);
            low = range.x;
            high = range.y;
        }
    }

    // Whether some pair of this warp's rows in the tile is masked or positive. It may be a false alarm: ids are compared
    // folded to 32 bits. With sorted ids, such as labels, the ranges alone settle most tiles.
    __device__ __forceinline__ bool touched(const ColumnIds<MASK>& columns, int tile, int width) const {
        bool found = static_cast<unsigned>(named - tile * SIDE) < SIDE;
        if constexpr (IDS)
            if (columns.low <= high && columns.high >= low) {
                unsigned mine[SIDE / 32];
#pragma unroll
                for (int i = 0; i < SIDE / 32; ++i) mine[i] = folded(columns.ids[lane + 32 * i]);
#pragma unroll
                for (int row = 0; row < 16; ++row) {
                    const unsigned id = folded(rows.id[16 * warp + row]);
#pragma unroll
                    for (int i = 0; i < SIDE / 32; ++i) found = found || id == mine[i];
                }
            }
        return __any_sync(WHOLE_WARP, found) || (tile + 1) * SIDE > width;
    }

    // The pair indices of the thread's row q, counted from its first column of the tile. Columns of other tiles never equal
    // 8 g + c.
    __device__ __forceinline__ PairRow pair_row(int q, int tile) const {
        const int row = row_of(q), start = tile * SIDE + 2 * (lane & 3);
        return {rows.positive[row] < 0 ? -1 : rows.positive[row] - start,
                rows.excluded[row] < 0 ? -1 : rows.excluded[row] - start, IDS ? rows.id[row] : 0};
    }

    // The ids of columns 8 g and 8 g + 1 from the thread's first on.
    static __device__ __forceinline__ longlong2 ids_of(const ColumnIds<MASK>& columns, int lane, int group) {
        return pair_of_ids<MASK>(columns.ids + (IDS ? 2 * (lane & 3) : 0), group);
    }

    __device__ __forceinline__ void begin_logits(unsigned rows_at, int stage, float (&x)[NARROW_VALUES]) const {
        const unsigned columns = operand(base + L::COLUMNS_AT + stage * TILE_BYTES), mine = operand(rows_at);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const unsigned on = part / 4 * (HALF_BYTES >> 4) + 2 * (part % 4);
            product_narrow<T>(x, descriptor(mine + on), descriptor(columns + on), part > 0);
        }
        products_commit();
    }

    // The shared address of this consumer's rows.
    __device__ __forceinline__ unsigned rows_at(const Segment& s) const {
        return base + (s.number & 1) * TILE_BYTES + consumer * CONSUMER_ROWS * 128;
    }
    __device__ __forceinline__ void wait_for_rows(const Segment& s) const {
        barrier_wait(base + L::ROWS_FULL_AT + 8 * (s.number & 1), s.number >> 1 & 1);
    }
    __device__ __forceinline__ void wait_for(const Cursor<STAGES>& at) const {
        barrier_wait(base + L::FULL_AT + 8 * at.stage, at.parity);
    }

    // Both consumers' warps arrive.
    __device__ __forceinline__ void release(int stage) const {
        if (lane == 0) barrier_arrive(base + L::EMPTY_AT + 8 * stage);
    }
    __device__ __forceinline__ void release_rows(const Segment& s) const {
        if (lane == 0) barrier_arrive(base + L::ROWS_EMPTY_AT + 8 * (s.number & 1));
    }
};

// The whole kernel. Worker derives from Consumer, is constructed from one and the arguments, and has part_of_row(segment,
// cursor). bring: see produce_vectors, called as bring(vectors, tile, lane).
template <class Worker, class Arguments, class Bring>
__device__ __forceinline__ void run(const TensorMap& rows, const TensorMap& columns, const Chunk& chunk,
                                    const Arguments& arguments, Bring bring) {
    using Columns = typename Worker::Columns;
    using Rows = typename Worker::Rows;
    using L = typename Worker::L;
    const Shares shares(chunk, arguments.blocks);
    extern __shared__ unsigned char dynamic[];
    unsigned char* memory = dynamic + (-shared_address(dynamic) & (SWIZZLE_ATOM - 1));
    const unsigned base = shared_address(memory);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    auto* vectors = reinterpret_cast<Columns*>(memory + L::VECTORS_AT);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(base + L::FULL_AT + 8 * s, 1 + 32);  // the producer, then the bytes; a warp's vectors
            barrier_init(base + L::EMPTY_AT + 8 * s, 2 * CONSUMER_WARPS);
        }
        for (int buffer = 0; buffer < 2; ++buffer) {
            barrier_init(base + L::ROWS_FULL_AT + 8 * buffer, 1);
            barrier_init(base + L::ROWS_EMPTY_AT + 8 * buffer, 2 * CONSUMER_WARPS);
        }
        publish_barriers();
    }
    __syncthreads();
    if (warp < CONSUMER_WARPS) {
        shrink_registers<OF_PRODUCERS>();
        if (threadIdx.x == 0) produce<L>(base, rows, columns, chunk, shares);
        if (warp > 0)
            produce_vectors<L>(base, vectors, shares, warp - 1,
                               [&](Columns& to, int tile) { bring(to, tile, lane); });
    } else {
        grow_registers<OF_CONSUMERS>();
        const int consumer = warp / CONSUMER_WARPS - 1;
        Rows& own = reinterpret_cast<Rows*>(memory + L::ROWS_AT)[consumer];
        Worker worker({base, consumer, warp % CONSUMER_WARPS, lane, shares, vectors, own}, arguments);
        Cursor<STAGES> at;
        for_each_segment(shares, [&](const Segment& s) { worker.part_of_row(s, at); });
    }
}

}  // namespace narrow_rows
}  // namespace contrastile
