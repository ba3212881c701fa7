// The role of the streamed backward that forms G: gradient_sm90's pipeline and arithmetic for plain symmetric pairs, a
// walk over bands of rows and columns from left to right, and a ring as the destination.
#pragma once

#include "epilogue_gradient.cuh"
#include "streamed_products.cuh"

namespace contrastile {

struct StreamedArguments {
    const Plan* plan;
    GradientSide row, column;  // folded and taken are read
    float* along;              // (m, depth) float32, dQ
    float* across;             // (n, depth) float32, dK
    unsigned* formed;          // of each tile column of each band
    unsigned* used_along;      // likewise
    unsigned* used_across;     // of each 256 columns of each band
    int bands, pairs, tile_columns, depth, ring;
    int form_clusters, along_clusters, across_clusters;
};

static_assert(sizeof(StreamedArguments) == 160);

struct alignas(64) StreamedMaps {
    TensorMap rows, columns;  // features for X: boxes of BM and of BN / 2 rows
    TensorMap q, k, g;        // boxes of 64 by 64
    TensorMap slabs;          // of G, boxes of 16 by 64
};

constexpr int STAGES = 4;
// G leaves by slabs of 16 rows by 64 columns, each warp's in turn through two buffers, one a strip.
constexpr int SLAB_GROUPS = 8, SLABS = BN / 64, SLAB_BYTES = 16 * 128, SLAB_SPACE = 2 * CONSUMER_WARPS * 2 * SLAB_BYTES;

// A cluster's tile of G.
struct Item {
    int row, column;  // of X: the block's first row, the tile's first column
    int ring_row, ring_column, sequence;
};

// of one consumer that forms tiles
struct alignas(16) FormKept {
    float row_first[BM], row_target[BM], column_first[BN], column_target[BN];
    Item item, next;
};

constexpr int FORM_BYTES = STAGES * (BM + BN) * BK * 2 + SLAB_SPACE + 2 * sizeof(FormKept);
constexpr int PRODUCT_BYTES = STAGES * WIDE_STAGE;
constexpr int BARRIERS_AT = (FORM_BYTES > PRODUCT_BYTES ? FORM_BYTES : PRODUCT_BYTES);
extern "C" __device__ const int streamed_backward_shared = BARRIERS_AT + 2 * STAGES * 8 + SWIZZLE_ATOM;

struct Items {
    const StreamedArguments& a;
    int first, count;
    unsigned rank;

    __device__ __forceinline__ Items(const StreamedArguments& arguments, int cluster, unsigned rank_)
        : a(arguments), first(cluster), rank(rank_) {
        const int items = a.bands * a.tile_columns * a.pairs;
        count = first < items ? (items - first + a.form_clusters - 1) / a.form_clusters : 0;
    }
    __device__ __forceinline__ Item at(int index) const {
        const int item = first + index * a.form_clusters, sequence = item / a.pairs, pair = item - sequence * a.pairs;
        const int band = sequence / a.tile_columns, inside = (2 * pair + rank) * BM;
        return {band * a.pairs * 2 * BM + inside, (sequence - band * a.tile_columns) * BN, inside,
                sequence % a.ring * BN, sequence};
    }
};

__device__ __forceinline__ void form_produce(const Ring<STAGES>& ring, const StreamedMaps& maps,
                                             const StreamedArguments& a, const Items& items) {
    Cursor<STAGES> at;
    at.parity = 1;
    const int parts = a.depth / WIDE_COLUMNS;
    const unsigned half = items.rank * (BN / 2);
    for (int index = 0; index < items.count; ++index) {
        const Item item = items.at(index);
        const int old = item.sequence - a.ring;
        if (old >= 0) {
            const int first = old * BN / 256, last = (old * BN + BN - 1) / 256;
            counter_wait(a.used_along + old, 2 * a.pairs * parts);
            counter_wait(a.used_across + first, 4 * CONSUMER_WARPS * parts);
            if (last > first) counter_wait(a.used_across + last, 4 * CONSUMER_WARPS * parts);
        }
        for (int k = 0; k < a.depth / BK; ++k) {
            barrier_wait(ring.empty + 8 * at.stage, at.parity);
            const unsigned full = ring.full + 8 * at.stage;
            barrier_expect(full, (BM + BN) * BK * 2);
            copy_in(ring.rows(at.stage), maps.rows, k * BK, item.row, full);
            copy_in_both(ring.columns(at.stage) + half * BK * 2, maps.columns, k * BK, item.column + half, full);
            at.step();
        }
    }
}

struct FormEpilogue {
    struct Fetched {
        float row_first, row_target, column_first[2], column_target[2];
    };

    const StreamedArguments& a;
    const TensorMap* slab_map;
    FormKept& kept;
    unsigned slabs;
    int consumer, warp;
    float alpha, reference;

    __device__ __forceinline__ Fetched fetch(const Item& item) const {
        Fetched f{};
        const int thread = consumer_thread();
        f.row_first = a.row.folded[item.row + thread];
        f.row_target = a.row.taken[item.row + thread];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = thread + i * WARPGROUP;
            if (at >= BN) continue;
            f.column_first[i] = a.column.folded[item.column + at];
            f.column_target[i] = a.column.taken[item.column + at];
        }
        return f;
    }

    __device__ __forceinline__ void keep(const Fetched& f) {
        const int thread = consumer_thread();
        kept.row_first[thread] = f.row_first;
        kept.row_target[thread] = f.row_target;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = thread + i * WARPGROUP;
            if (at >= BN) continue;
            kept.column_first[at] = f.column_first[i];
            kept.column_target[at] = f.column_target[i];
        }
    }

    __device__ __forceinline__ void finish(const float (&acc)[STRIPS][PRODUCT_VALUES]) {
        consumer_sync(consumer);
        const int distance = kept.item.row - kept.item.column;
        if (distance > -BM && distance < BN)
            write<true>(acc);
        else
            write<false>(acc);
        if (consumer_thread() % 32 == 0) {
            copies_done();
            order_copies();
            counter_add(a.formed + kept.item.sequence);
        }
        __syncwarp();
    }

  private:
    template <bool POSITIVES>
    __device__ __forceinline__ void write(const float (&acc)[STRIPS][PRODUCT_VALUES]) {
        const int lane = consumer_thread() % 32, first = 2 * (lane & 3);
        const unsigned mine = slabs + lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4);
        float row_first[STRIPS][2], taken[STRIPS][2];
        int positive[STRIPS][2];
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const int row = 64 * s + 16 * warp + lane / 4 + 8 * q;
                row_first[s][q] = kept.row_first[row];
                if (!POSITIVES) continue;
                const int named = kept.item.row + row - kept.item.column;
                positive[s][q] = named - first;
                taken[s][q] = kept.row_target[row];
                if (named >= 0 && named < BN) taken[s][q] += kept.column_target[named];
            }
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            float2 column_first[SLAB_GROUPS];
#pragma unroll
            for (int g = 0; g < SLAB_GROUPS; ++g)
                column_first[g] =
                    *reinterpret_cast<const float2*>(kept.column_first + 8 * (slab * SLAB_GROUPS + g) + first);
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
                if (lane == 0) copies_read<1>();
                __syncwarp();
#pragma unroll
                for (int two = 0; two < SLAB_GROUPS / 2; ++two) {
                    unsigned packed[4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int g = slab * SLAB_GROUPS + 2 * two + h;
                        float value[4];
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int q = e >> 1, c = e & 1;
                            const float2 column = column_first[2 * two + h];
                            value[e] = attraction<SHARED>(acc[s][4 * g + e], alpha, reference, row_first[s][q], 0.0f,
                                                          c ? column.y : column.x, 0.0f);
                            if (POSITIVES && positive[s][q] == 8 * g + c) value[e] -= taken[s][q];
                        }
                        packed[2 * h] = narrow_pair<bfloat16>(value[0], value[1]);
                        packed[2 * h + 1] = narrow_pair<bfloat16>(value[2], value[3]);
                    }
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                                     (mine ^ two << 5) + s * SLAB_BYTES),
                                 "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                                 : "memory");
                }
                publish_to_copies();
                __syncwarp();
                if (lane == 0)
                    copy_out(*slab_map, kept.item.ring_column + slab * 64, kept.item.ring_row + 64 * s + 16 * warp,
                             slabs + s * SLAB_BYTES);
            }
        }
    }
};

// The products of a tile of X; gives back the stage that it has yet to release.
__device__ __forceinline__ int multiply_tile(const Ring<STAGES>& ring, Cursor<STAGES>& at, int steps, int lane,
                                             float (&acc)[STRIPS][PRODUCT_VALUES]) {
    int last = 0;
    for (int k = 0; k < steps; ++k) {
        barrier_wait(ring.full + 8 * at.stage, at.parity);
        const unsigned rows = operand(ring.rows(at.stage)), columns = operand(ring.columns(at.stage));
        products_begin();
#pragma unroll
        for (int part = 0; part < BK / 16; ++part)
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
                product<bfloat16>(acc[s], descriptor(rows + 64 * 8 * s + 2 * part), descriptor(columns + 2 * part),
                                  part > 0 || k > 0);
        products_commit();
        products_done<1>();
        if (k > 0 && lane < 2) barrier_arrive(ring.empty + 8 * last, lane);
        last = at.stage;
        at.step();
    }
    return last;
}

__device__ __forceinline__ void form_consume(const Ring<STAGES>& ring, const StreamedArguments& a, const Items& items,
                                             int consumer, int lane, FormEpilogue& epilogue) {
    Cursor<STAGES> at;
    const int steps = a.depth / BK;
    if (consumer == 1) at.skip(steps);
    Item item = items.at(consumer);
    for (int index = consumer; index < items.count; index += 2) {
        const auto fetched = epilogue.fetch(item);
        const Item next = items.at(min(index + 2, items.count - 1));
        if (index > 0) named_sync(TURN + consumer, 2 * WARPGROUP);
        epilogue.keep(fetched);
        epilogue.kept.item = item;
        epilogue.kept.next = next;
        float acc[STRIPS][PRODUCT_VALUES];
        const int last = multiply_tile(ring, at, steps, lane, acc);
        if (index + 1 < items.count) named_arrive(TURN + 1 - consumer, 2 * WARPGROUP);
        at.skip(steps);
        products_done<0>();
        if (lane < 2) barrier_arrive(ring.empty + 8 * last, lane);
        epilogue.finish(acc);
        item = epilogue.kept.next;
    }
}

}  // namespace contrastile
