// FACTOR G of one chunk, rounded once to the features' dtype, for sm_90a.
//
// gradient_sm90<T, MASK>: grid and threads as forward_sm90, gradient_sm90_shared bytes of dynamic shared memory.
// The exponent (epilogue_gradient.cuh) is chosen on the device from the plan. Positives, by index or by ids, leave G in
// float32: a warp that has a positive by index runs the same code with one comparison an element.
#include "epilogue_gradient.cuh"
#include "slabs.cuh"

namespace contrastile {

constexpr int GRADIENT_STAGES = 4;

template <class T, int MASK>
struct GradientEpilogue {
    // of one consumer: what the epilogue needs of the rows and columns of its tile
    struct alignas(16) Kept {
        long long row_ids[BM], column_ids[BN];
        float row_first[BM], row_weight[BM], row_target[BM];
        float column_first[BN], column_weight[BN], column_target[BN];
        int2 named[BM];
        int exponent;
    };
    static constexpr int SLAB_SPACE = 2 * CONSUMER_WARPS * SLAB_BUFFERS * SLAB_BYTES;
    static constexpr int KEPT = SLAB_SPACE + 2 * sizeof(Kept);

    struct Fetched {
        Side row, column[2];
        int2 named;
        long long row_id, column_id[2];
    };

    const GradientArguments& arguments;
    Kept& kept;
    const TensorMap* g;
    unsigned slabs;  // this warp's
    int consumer, warp;
    float alpha, reference;

    __device__ __forceinline__ GradientEpilogue(const GradientArguments& a, const TensorMap* g_, unsigned char* memory,
                                                int consumer_, int warp_)
        : arguments(a),
          kept(reinterpret_cast<Kept*>(memory + SLAB_SPACE)[consumer_]),
          g(g_),
          slabs(shared_address(memory) + (consumer_ * CONSUMER_WARPS + warp_) * SLAB_BUFFERS * SLAB_BYTES),
          consumer(consumer_),
          warp(warp_),
          alpha(a.plan->alpha),
          reference(a.plan->reference) {
        kept.exponent = exponent_of(a);  // the same from every thread, which reads what itself wrote
    }

    __device__ __forceinline__ Fetched fetch(const Place& tile) const {
        Fetched f{};
        const Chunk& chunk = arguments.chunk;
        const PairVectors& pairs = arguments.pairs;
        const int thread = consumer_thread(), row = tile.row + thread, exponent = kept.exponent;
        f.named = make_int2(-1, -1);
        if (row < chunk.height) {
            f.row = side_of(arguments.row, chunk.row + row, exponent);
            f.named = named_columns(pairs, chunk.row + row, chunk.column + tile.column, BN);
            if (MASK >= DROP) f.row_id = pairs.row_ids[chunk.row + row];
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = thread + i * WARPGROUP, column = tile.column + at;
            if (at < BN && column < chunk.width) {
                f.column[i] = side_of(arguments.column, chunk.column + column, exponent);
                if (MASK >= DROP) f.column_id[i] = pairs.column_ids[chunk.column + column];
            }
        }
        return f;
    }

    __device__ __forceinline__ void keep(const Fetched& f) {
        const int thread = consumer_thread();
        kept.row_first[thread] = f.row.first;
        kept.row_weight[thread] = f.row.weight;
        kept.row_target[thread] = f.row.target;
        kept.named[thread] = f.named;
        if (MASK >= DROP) kept.row_ids[thread] = f.row_id;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = thread + i * WARPGROUP;
            if (at >= BN) continue;
            kept.column_first[at] = f.column[i].first;
            kept.column_weight[at] = f.column[i].weight;
            kept.column_target[at] = f.column[i].target;
            if (MASK >= DROP) kept.column_ids[at] = f.column_id[i];
        }
    }

    __device__ __forceinline__ void finish(const float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) {
        consumer_sync(consumer);
        const int exponent = kept.exponent;
        if (exponent == SHARED)
            choose_positives<SHARED>(acc, tile);
        else if (exponent == ROWS)
            choose_positives<ROWS>(acc, tile);
        else
            choose_positives<BOTH>(acc, tile);
    }

    __device__ __forceinline__ void end() const { SlabWriter(g, slabs, consumer_thread() % 32).finish(); }

  private:
    // A thread's rows of the tile.
    template <int EXPONENT, bool POSITIVES>
    struct Rows {
        float first[STRIPS][2], weight[STRIPS][2], taken[STRIPS][2];
        PairRow pair[STRIPS][2];
    };

    __device__ __forceinline__ int row_of(int lane, int s, int q) const {
        return 64 * s + 16 * warp + lane / 4 + 8 * q;
    }

    template <int EXPONENT>
    __device__ __forceinline__ void choose_positives(const float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) {
        if (MASK == PLAIN) {
            const int lane = consumer_thread() % 32;
            bool any = false;
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int q = 0; q < 2; ++q) any = any || kept.named[row_of(lane, s, q)].x >= 0;
            if (!__any_sync(WHOLE_WARP, any)) return write<EXPONENT, false>(acc, tile);
        }
        write<EXPONENT, true>(acc, tile);
    }

    template <int EXPONENT, bool POSITIVES>
    __device__ __forceinline__ void write(const float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) {
        const int lane = consumer_thread() % 32, first = 2 * (lane & 3);
        const SlabWriter writer(g, slabs, lane);
        Rows<EXPONENT, POSITIVES> rows;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const int row = row_of(lane, s, q);
                rows.first[s][q] = kept.row_first[row];
                rows.weight[s][q] = EXPONENT == SHARED ? 0.0f : kept.row_weight[row];
                if (!POSITIVES) continue;
                const int2 named = kept.named[row];
                rows.pair[s][q] = {named.x - first, named.y - first, MASK >= DROP ? kept.row_ids[row] : 0};
                rows.taken[s][q] = kept.row_target[row];
                // by index a row has one positive: all that it takes away is known here
                if (MASK != TARGET && named.x >= 0) rows.taken[s][q] += kept.column_target[named.x];
            }
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            // ahead of the stores, which loads do not pass; two exponentials leave no registers for that, and hide it
            float2 column_first[SLAB_GROUPS];
#pragma unroll
            for (int g = 0; g < SLAB_GROUPS; ++g)
                if (EXPONENT != BOTH) column_first[g] = pair_at(kept.column_first, slab * SLAB_GROUPS + g, first);
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
                writer.open();
#pragma unroll
                for (int two = 0; two < SLAB_GROUPS / 2; ++two) {
                    unsigned packed[4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int g = slab * SLAB_GROUPS + 2 * two + h;
                        if (EXPONENT == BOTH) column_first[2 * two + h] = pair_at(kept.column_first, g, first);
                        pack_group<EXPONENT, POSITIVES>(acc[s], rows, s, g, first, column_first[2 * two + h],
                                                        packed[2 * h], packed[2 * h + 1]);
                    }
                    writer.put(s, two, packed);
                }
                writer.send(s, tile.row + 64 * s + 16 * warp, tile.column + slab * SLAB_COLUMNS);
            }
        }
    }

    static __device__ __forceinline__ float2 pair_at(const float* list, int g, int first) {
        return *reinterpret_cast<const float2*>(list + 8 * g + first);
    }

    // G of the four values of group g, rows q = 0 to `top` and q = 1 to `low`.
    template <int EXPONENT, bool POSITIVES>
    __device__ __forceinline__ void pack_group(const float (&dot)[PRODUCT_VALUES],
                                               const Rows<EXPONENT, POSITIVES>& rows, int s, int g, int first,
                                               float2 column_first, unsigned& top, unsigned& low) const {
        const float2 weight = EXPONENT == BOTH ? pair_at(kept.column_weight, g, first) : make_float2(0.0f, 0.0f);
        const float2 taken = MASK == TARGET ? pair_at(kept.column_target, g, first) : make_float2(0.0f, 0.0f);
        const longlong2 id = pair_of_ids<MASK>(kept.column_ids + first, g);
        float value[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int q = e >> 1, c = e & 1;
            value[e] = attraction<EXPONENT>(dot[4 * g + e], alpha, reference, rows.first[s][q], rows.weight[s][q],
                                            c ? column_first.y : column_first.x, c ? weight.y : weight.x);
            if (!POSITIVES) continue;
            const Standing pair = standing<MASK>(rows.pair[s][q], 8 * g + c, c ? id.y : id.x);
            if (MASK != PLAIN && !pair.admitted) value[e] = 0.0f;
            if (pair.positive) value[e] -= rows.taken[s][q] + (c ? taken.y : taken.x);
        }
        top = narrow_pair<T>(value[0], value[1]);
        low = narrow_pair<T>(value[2], value[3]);
    }
};

extern "C" __device__ const int gradient_sm90_shared =
    Layout<GRADIENT_STAGES, GradientEpilogue<bfloat16, TARGET>::KEPT>::BYTES;

template <class T, int MASK>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    gradient_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                  const __grid_constant__ TensorMap g, const __grid_constant__ GradientArguments arguments) {
    run_pipeline<T, GRADIENT_STAGES, GradientEpilogue<T, MASK>>(rows, columns, &g, arguments);
}

}  // namespace contrastile
