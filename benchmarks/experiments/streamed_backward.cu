// The whole backward pass of plain symmetric pairs in one launch, G kept in L2: dQ = G K and dK = G^T Q.
//
// Clusters of two blocks have one of three roles for the whole launch:
//
//   form    tiles of G, 256 x 192 a cluster (gradient_sm90's pipeline and arithmetic), into a ring of tile columns
//   along   dQ: 256 rows of the band by 256 features a cluster, accumulated in registers over all columns
//   across  dK: 256 columns by 256 features an item, contracted over the band, added to global memory
//
// The rows are walked in bands of 256 `pairs`, the columns of a band from left to right. The ring holds `ring` tile
// columns of a band, about as much as L2 keeps: G is written, read once along and once across, and overwritten in
// place. Counters of each tile column say that it is formed, and of each use that it may be overwritten.
//
// The order of all sums is fixed: along in registers; across one addition a band, and a band's columns are not formed
// before the ring has let go of what was added a band earlier.
//
// Forward progress: all blocks are resident, and the oldest column that is not yet used waits for older ones alone.
// Sizes: rows a multiple of 256 pairs, columns of 768, depth of 256, ring a multiple of 4.
#include "streamed_form.cuh"

namespace contrastile {

// ---- along and across

struct Stages {
    unsigned base, full, empty;
};

// One step: this block's two boxes of G, and its half of the four boxes of features that both blocks read.
__device__ __forceinline__ void copy_step(const Stages& ring, int stage, const TensorMap& g, int x, int y, int dx,
                                          int dy, const TensorMap& features, int feature, int line, unsigned rank) {
    const unsigned to = ring.base + stage * WIDE_STAGE, full = ring.full + 8 * stage;
    barrier_expect(full, WIDE_STAGE);
    copy_in(to, g, x, y, full);
    copy_in(to + BOX_BYTES, g, x + dx, y + dy, full);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int box = 2 * rank + i;
        copy_in_both(to + WIDE_A + box * BOX_BYTES, features, feature + 64 * box, line, full);
    }
}

__device__ __forceinline__ void along_produce(const Stages& ring, const StreamedMaps& maps, const StreamedArguments& a,
                                              int cluster, unsigned rank) {
    Cursor<STAGES> at;
    at.parity = 1;
    const int parts = a.depth / WIDE_COLUMNS, feature = cluster % parts * WIDE_COLUMNS;
    const int row = (2 * (cluster / parts) + rank) * BM;
    for (int sequence = 0; sequence < a.bands * a.tile_columns; ++sequence) {
        const int x = sequence % a.ring * BN, line = sequence % a.tile_columns * BN;
        counter_wait(a.formed + sequence, 2 * CONSUMER_WARPS * a.pairs);
        for (int t = 0; t < BN / BK; ++t) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            // what was copied STAGES steps ago has been read, hence all of two tile columns before
            static_assert(STAGES <= 2 * BN / BK - (BN / BK - 1), "a tile column is called used too early");
            if (t == 0 && sequence >= 2) counter_add(a.used_along + sequence - 2);
            copy_step(ring, at.stage, maps.g, x + t * BK, row, 0, 64, maps.k, feature, line + t * BK, rank);
            at.step();
        }
    }
}

__device__ __forceinline__ void along_consume(const Stages& ring, const StreamedArguments& a, int cluster,
                                              unsigned rank, int consumer, int warp, int lane) {
    Cursor<STAGES> at;
    const int parts = a.depth / WIDE_COLUMNS, feature = cluster % parts * WIDE_COLUMNS;
    const int row = (2 * (cluster / parts) + rank) * BM + 64 * consumer + 16 * warp + lane / 4;
    for (int band = 0; band < a.bands; ++band) {
        float acc[WIDE_VALUES];
        multiply_wide<STAGES, 0>(ring.base, ring.full, ring.empty, at, a.tile_columns * (BN / BK), consumer, lane, acc);
        const long long line = static_cast<long long>(band) * a.pairs * 2 * BM + row;
        put_wide(acc, a.along + line * a.depth + feature + 2 * (lane & 3), a.depth, false);
    }
}

// Item: 256 columns of a band, 256 features; numbered so that the parts of the same columns are neighbours.
__device__ __forceinline__ void across_produce(const Stages& ring, const StreamedMaps& maps, const StreamedArguments& a,
                                               int cluster, unsigned rank) {
    Cursor<STAGES> at;
    at.parity = 1;
    const int parts = a.depth / WIDE_COLUMNS, per_band = a.tile_columns * BN / 256;
    for (int item = cluster; item < a.bands * per_band * parts; item += a.across_clusters) {
        const int columns = item / parts, feature = item % parts * WIDE_COLUMNS, band = columns / per_band;
        const int x = columns * 256 % (a.ring * BN) + rank * BM;
        const int first = columns * 256 / BN, last = (columns * 256 + 255) / BN;
        counter_wait(a.formed + first, 2 * CONSUMER_WARPS * a.pairs);
        counter_wait(a.formed + last, 2 * CONSUMER_WARPS * a.pairs);
        for (int k = 0; k < a.pairs * 2 * BM / BK; ++k) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            const int line = k * BK;
            copy_step(ring, at.stage, maps.g, x, line, 64, 0, maps.q, feature, band * a.pairs * 2 * BM + line, rank);
            at.step();
        }
    }
}

__device__ __forceinline__ void across_consume(const Stages& ring, const StreamedArguments& a, int cluster,
                                               unsigned rank, int consumer, int warp, int lane) {
    Cursor<STAGES> at;
    const int parts = a.depth / WIDE_COLUMNS, per_band = a.tile_columns * BN / 256;
    for (int item = cluster; item < a.bands * per_band * parts; item += a.across_clusters) {
        const int columns = item / parts, feature = item % parts * WIDE_COLUMNS, band = columns / per_band;
        float acc[WIDE_VALUES];
        multiply_wide<STAGES, 1>(ring.base, ring.full, ring.empty, at, a.pairs * 2 * BM / BK, consumer, lane, acc);
        const int column = columns % per_band * 256 + rank * BM + 64 * consumer + 16 * warp + lane / 4;
        float* const out = a.across + static_cast<long long>(column) * a.depth + feature + 2 * (lane & 3);
        put_wide(acc, out, a.depth, band > 0);
        __syncwarp();  // the release of one lane covers what the others added
        if (lane == 0) counter_add(a.used_across + columns);
    }
}

// ---- the kernel: 2 (form + along + across) blocks of PIPELINE_THREADS, all of them resident

__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    streamed_backward(const __grid_constant__ StreamedMaps maps, const __grid_constant__ StreamedArguments a) {
    extern __shared__ unsigned char dynamic[];
    unsigned char* memory = dynamic + (-shared_address(dynamic) & (SWIZZLE_ATOM - 1));
    const unsigned base = shared_address(memory), full = base + BARRIERS_AT, empty = full + 8 * STAGES;
    const Ring<STAGES> ring{base, full, empty};
    const Stages wide{base, full, empty};
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const unsigned rank = cluster_rank();
    const int cluster = blockIdx.x / 2, along = cluster - a.form_clusters, across = along - a.along_clusters;
    const bool forms = along < 0;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, (forms ? 2 : 4) * CONSUMER_WARPS);  // one consumer of each block, or all
        }
        publish_barriers();
    }
    cluster_sync();
    if (warp < CONSUMER_WARPS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) {
            if (forms)
                form_produce(ring, maps, a, Items(a, cluster, rank));
            else if (across < 0)
                along_produce(wide, maps, a, along, rank);
            else
                across_produce(wide, maps, a, across, rank);
        }
    } else {
        take_registers<CONSUMER_REGISTERS>();
        const int consumer = warp / CONSUMER_WARPS - 1, inside = warp % CONSUMER_WARPS;
        if (forms) {
            unsigned char* slabs = memory + STAGES * (BM + BN) * BK * 2;
            FormEpilogue epilogue{a,
                                  &maps.slabs,
                                  reinterpret_cast<FormKept*>(slabs + SLAB_SPACE)[consumer],
                                  shared_address(slabs) + (consumer * CONSUMER_WARPS + inside) * 2 * SLAB_BYTES,
                                  consumer,
                                  inside,
                                  a.plan->alpha,
                                  a.plan->reference};
            form_consume(ring, a, Items(a, cluster, rank), consumer, lane, epilogue);
        } else if (across < 0) {
            along_consume(wide, a, along, rank, consumer, inside, lane);
        } else {
            across_consume(wide, a, across, rank, consumer, inside, lane);
        }
    }
    cluster_sync();
}

}  // namespace contrastile
