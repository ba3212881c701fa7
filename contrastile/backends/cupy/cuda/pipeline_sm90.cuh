// The pipeline of the sm_90a tile kernels, except weighted_sm90 and the kernels of narrow features. An Epilogue processes
// each finished tile.
//
// A block has three warpgroups. One thread of the first, the producer, feeds a ring of STAGES stages in shared memory,
// each one step of 64 features: 128 rows and 192 columns. The other two, the consumers, own whole tiles of 128 x 192
// and alternate: while one runs its epilogue, the tensor cores work for the other. A guided kernel has two passes over
// each tile, first the guide's products and then the features'. Both consumers do the first before either does the second.
//
// Blocks come in clusters of two: the same columns, neighbouring rows. Each block copies half of the columns to both,
// so that columns are read from L2 once per cluster. A stage is therefore free only when both blocks have read it.
//
// Hazards:
// * The compiler must know that a whole warp has the same role (the shuffle below), or it moves every descriptor to
//   uniform registers again before each product.
// * The turns are needed for correctness: parity distinguishes only two phases of a barrier, so a consumer that is a
//   whole pass of the ring ahead would take a later phase for its own.
// * With one warp per scheduler an epilogue pays every latency in full. Its vectors are fetched into shared memory while
//   products run, without registers, for the accumulators take them all. The place of the next tile waits there too.
// * A barrier separates a write to shared memory from reads by other threads, even if all threads write the same value.
// * No block may exit while the other may still copy into it or arrive at its barriers: hence the last cluster_sync.
#pragma once

#include "hopper.cuh"
#include "wgmma.cuh"

namespace contrastile {

constexpr int BM = 128, BN = PRODUCT_COLUMNS, BK = 64;
constexpr int STRIPS = BM / 64, GROUPS = BN / 8;  // of a warp
constexpr int WARPGROUP = 128, PIPELINE_THREADS = 3 * WARPGROUP, CONSUMER_WARPS = 4;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;  // together 64512 of a block's 65536
constexpr int SWIZZLE_ATOM = 1024;

// Named barriers; 0 is __syncthreads.
constexpr int TURN = 1, CONSUMER = 3;  // each of two, by consumer

__device__ __forceinline__ void consumer_sync(int consumer) { named_sync(CONSUMER + consumer, WARPGROUP); }

__device__ __forceinline__ bool consumer_any(int consumer, bool mine) {
    return named_any(CONSUMER + consumer, WARPGROUP, mine);
}

// This thread's number in its consumer. It is read again each time: values derived from it would spill beside the products.
__device__ __forceinline__ int consumer_thread() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread % WARPGROUP;
}

// The walk of a persistent grid over the tiles of a chunk is static, so that every role finds the same tiles by itself.
struct Place {
    int row, column;  // first row and column of a tile inside the chunk
};

// Clusters of two blocks take pairs of tile rows. Bands of `band` pairs are walked down first, then across, so that
// clusters at work at the same time share columns and rows in the L2 cache.
struct Walk {
    unsigned row_pairs, band, band_tiles, clusters, first, rank;
    int count;

    __device__ __forceinline__ Walk(const Chunk& chunk, unsigned band_, unsigned rank_)
        : row_pairs((chunk.height + 2 * BM - 1) / (2 * BM)),
          band(band_),
          clusters(gridDim.x / 2),
          first(blockIdx.x / 2),
          rank(rank_) {
        const unsigned column_tiles = (chunk.width + BN - 1) / BN;
        band_tiles = band * column_tiles;
        const unsigned tiles = row_pairs * column_tiles;
        count = first < tiles ? (tiles - first + clusters - 1) / clusters : 0;
    }

    // The block's tile number `index`. It takes two integer divisions: call it where products hide them.
    __device__ __forceinline__ Place at(int index) const {
        const unsigned tile = first + index * clusters, number = tile / band_tiles;
        const unsigned above = number * band, inside = tile - number * band_tiles;
        const unsigned high = above < row_pairs ? min(band, row_pairs - above) : 1;  // past the end: any place
        const unsigned across = inside / high, pair = above + inside - across * high;
        return {static_cast<int>((2 * pair + rank) * BM), static_cast<int>(across * BN)};
    }
};

// Shared memory of a block: the ring, the epilogue's storage, the barriers.
template <int STAGES, int STORAGE_BYTES>
struct Layout {
    static constexpr int ROWS = BM * BK * 2, COLUMNS = BN * BK * 2;
    static constexpr int COLUMNS_AT = STAGES * ROWS, STORAGE_AT = COLUMNS_AT + STAGES * COLUMNS;
    static constexpr int BARRIERS_AT = STORAGE_AT + STORAGE_BYTES;
    static constexpr int PLACES_AT = BARRIERS_AT + 2 * STAGES * 8;  // the next tile of each consumer
    // the ring is aligned at run time
    static_assert(PLACES_AT + 2 * sizeof(Place) + SWIZZLE_ATOM <= ALL_SHARED);
};

// A position in the ring, advanced by whole tiles and by steps.
template <int STAGES>
struct Cursor {
    int stage = 0;
    unsigned parity = 0;

    __device__ __forceinline__ void step() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
    __device__ __forceinline__ void skip(int steps) {
        stage += steps;
        parity ^= stage / STAGES & 1;
        stage %= STAGES;
    }
};

template <int STAGES>
struct Ring {
    unsigned base, full, empty;

    __device__ __forceinline__ unsigned rows(int stage) const { return base + stage * BM * BK * 2; }
    __device__ __forceinline__ unsigned columns(int stage) const {
        return base + STAGES * BM * BK * 2 + stage * BN * BK * 2;
    }
};

// The operands of one pass over a tile.
struct Source {
    const TensorMap *rows, *columns;
    int steps;
};

template <int STAGES, int PASSES>
__device__ __forceinline__ void produce(const Ring<STAGES>& ring, const Source (&sources)[PASSES], const Chunk& chunk,
                                        const Walk& walk) {
    Cursor<STAGES> at;
    at.parity = 1;  // the phase before the first counts as complete: the ring starts empty
    const int row0 = static_cast<int>(chunk.row);
    const int column0 = static_cast<int>(chunk.column) + walk.rank * (BN / 2);
    const unsigned half = walk.rank * (BN / 2) * BK * 2;
    const auto copy = [&](const Source& source, int index) {
        const Place tile = walk.at(index);
        for (int k = 0; k < source.steps; ++k) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            const unsigned full = ring.full + 8 * at.stage;
            // copies bring whole boxes: elements outside the matrix arrive as zeros
            barrier_expect(full, (BM + BN) * BK * 2);
            copy_in(ring.rows(at.stage), *source.rows, k * BK, row0 + tile.row, full);
            copy_in_both(ring.columns(at.stage) + half, *source.columns, k * BK, column0 + tile.column, full);
            at.step();
        }
    };
    // one tile of each consumer at a time: see consume
    for (int first = 0; first < walk.count; first += 2)
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass)
            for (int index = first; index < min(first + 2, walk.count); ++index) copy(sources[pass], index);
}

// Issues the products of one tile. It calls `meanwhile` once, after those of the first step have started. Returns the
// stage that the caller has yet to release.
template <class T, int STAGES, class Meanwhile>
__device__ __forceinline__ int multiply(const Ring<STAGES>& ring, Cursor<STAGES>& at, int steps, int lane,
                                        float (&acc)[STRIPS][PRODUCT_VALUES], Meanwhile meanwhile) {
    int last = 0;
    for (int k = 0; k < steps; ++k) {
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        const unsigned rows = operand(ring.rows(at.stage)), columns = operand(ring.columns(at.stage));
        products_fence();
#pragma unroll
        for (int part = 0; part < BK / 16; ++part) {
            const unsigned long long b = descriptor(columns + 2 * part);
            product<T>(acc[0], descriptor(rows + 2 * part), b, part > 0 || k > 0);
            product<T>(acc[1], descriptor(rows + 64 * 8 + 2 * part), b, part > 0 || k > 0);
        }
        products_commit();
        if (k == 0) meanwhile();
        products_wait<1>();  // the previous step is done: both blocks may refill its stage
        if (k > 0 && lane < 2) barrier_arrive(ring.empty + 8 * last, lane);
        last = at.stage;
        at.step();
    }
    return last;
}

template <class T, int STAGES, int PASSES, class Epilogue>
__device__ __forceinline__ void consume(const Ring<STAGES>& ring, int consumer, int lane,
                                        const Source (&sources)[PASSES], const Walk& walk, Place& upcoming,
                                        Epilogue& epilogue) {
    Cursor<STAGES> at;
    if (consumer == 1) at.skip(sources[0].steps);
    Place tile = walk.at(consumer);
    for (int index = consumer; index < walk.count; index += 2) {
        const Place next = walk.at(index + 2);
        // if the other consumer has no tile beside the last one, all passes of that tile are one turn
        const bool together = consumer == 1 || index + 1 < walk.count;
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            if (pass == 0 ? index > 0 : together) named_sync(TURN + consumer, 2 * WARPGROUP);
            float acc[STRIPS][PRODUCT_VALUES];  // declared here, so that it is dead between two tiles
            const int last = multiply<T>(ring, at, sources[pass].steps, lane, acc, [&] {
                if (pass > 0) return;
                // the turn has passed, so all warps of this consumer have left the previous epilogue
                epilogue.prefetch(tile);
                upcoming = next;  // the same from every thread
            });
            const bool more = consumer == 1 && pass + 1 < PASSES;
            if (more || index + 1 < walk.count) named_arrive(TURN + 1 - consumer, 2 * WARPGROUP);
            // skip the other consumer's steps
            if (PASSES == 1 || together) at.skip(sources[consumer == 0 ? pass : (pass + 1) % PASSES].steps);
            products_wait<0>();
            if (lane < 2) barrier_arrive(ring.empty + 8 * last, lane);
            if (pass == 0) {
                wait_fetches();
                consumer_sync(consumer);
            }
            if constexpr (PASSES > 1)
                if (pass == 0) {
                    epilogue.compare_guide(acc);
                    continue;
                }
            epilogue.process(acc, tile);
        }
        tile = upcoming;
    }
    epilogue.end();
}

__device__ __forceinline__ Source source(const TensorMap& rows, const TensorMap& columns, int depth) {
    return {&rows, &columns, (depth + BK - 1) / BK};
}

// The whole kernel. Each consumer constructs Epilogue(arguments, map of G, its shared memory, consumer, warp of the
// consumer). An Epilogue has STORAGE_BYTES of shared memory, STAGES, prefetch(tile), for two passes
// compare_guide(accumulators), process(accumulators, tile), and end(), which is called after the last tile.
template <class T, class Epilogue, int PASSES, class Arguments>
__device__ __forceinline__ void run_pipeline(const Source (&sources)[PASSES], const TensorMap& g,
                                             const Arguments& arguments) {
    constexpr int STAGES = Epilogue::STAGES;
    using L = Layout<STAGES, Epilogue::STORAGE_BYTES>;
    extern __shared__ unsigned char dynamic[];
    unsigned char* memory = dynamic + (-shared_address(dynamic) & (SWIZZLE_ATOM - 1));
    const unsigned base = shared_address(memory), barriers = base + L::BARRIERS_AT;
    const Ring<STAGES> ring{base, barriers, barriers + 8 * STAGES};
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(ring.full + 8 * s, 1);                    // the producer, then the bytes
            barrier_init(ring.empty + 8 * s, 2 * CONSUMER_WARPS);  // one consumer of each block
        }
        publish_barriers();
    }
    cluster_sync();
    const Walk walk(arguments.chunk, arguments.features.band, cluster_rank());
    if (warp < CONSUMER_WARPS) {
        shrink_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce(ring, sources, arguments.chunk, walk);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        const int consumer = warp / CONSUMER_WARPS - 1;
        Epilogue epilogue(arguments, g, memory + L::STORAGE_AT, consumer, warp % CONSUMER_WARPS);
        Place& upcoming = reinterpret_cast<Place*>(memory + L::PLACES_AT)[consumer];
        consume<T>(ring, consumer, lane, sources, walk, upcoming, epilogue);
    }
    cluster_sync();
}

}  // namespace contrastile
