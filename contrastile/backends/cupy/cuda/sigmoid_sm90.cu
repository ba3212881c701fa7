// The additive loss of one chunk for sm_90a: row sums of the loss and of its slope, and FACTOR G, in one pass.
//
// sigmoid_sm90<T, MASK>: grid and threads as forward_sm90, sigmoid_sm90_shared bytes of dynamic shared memory.
// G_ij = -w_i z_ij sigmoid(-z_ij x_ij) over admitted pairs. A warp none of whose rows has a positive by index in its
// tile skips the comparisons.
#include "epilogue_forward.cuh"
#include "epilogue_sigmoid.cuh"
#include "slabs.cuh"

namespace contrastile {

constexpr int SIGMOID_STAGES = 4;

template <class T, int MASK>
struct SigmoidEpilogue {
    // of one consumer: what the epilogue needs of the rows and columns of its tile
    struct alignas(16) Kept {
        long long row_ids[BM], column_ids[BN];
        float row_weight[BM];
        int2 named[BM];
    };
    static constexpr int SLAB_SPACE = 2 * CONSUMER_WARPS * SLAB_BUFFERS * SLAB_BYTES;
    static constexpr int KEPT = SLAB_SPACE + 2 * sizeof(Kept);

    struct Fetched {
        float weight;
        int2 named;
        long long row_id, column_id[2];
    };

    const SigmoidArguments& arguments;
    Kept& kept;
    const TensorMap* g;
    unsigned slabs;  // this warp's
    int consumer, warp;
    float scale, bias;

    __device__ __forceinline__ SigmoidEpilogue(const SigmoidArguments& a, const TensorMap* g_, unsigned char* memory,
                                               int consumer_, int warp_)
        : arguments(a),
          kept(reinterpret_cast<Kept*>(memory + SLAB_SPACE)[consumer_]),
          g(g_),
          slabs(shared_address(memory) + (consumer_ * CONSUMER_WARPS + warp_) * SLAB_BUFFERS * SLAB_BYTES),
          consumer(consumer_),
          warp(warp_),
          scale(usable_scale(static_cast<float>(a.plan->alpha * LN2))),
          bias(a.plan->bias) {}

    __device__ __forceinline__ Fetched fetch(const Place& tile) const {
        Fetched f{};
        const Chunk& chunk = arguments.chunk;
        const PairVectors& pairs = arguments.pairs;
        const int thread = consumer_thread(), row = tile.row + thread;
        f.named = make_int2(-1, -1);
        if (row < chunk.height) {
            if (arguments.g != nullptr) f.weight = arguments.row_weight[chunk.row + row] * arguments.plan->factor;
            // a positive past the chunk's last column belongs to another chunk
            const int width = min(BN, chunk.width - tile.column);
            f.named = named_columns(pairs, chunk.row + row, chunk.column + tile.column, width);
            if (MASK >= DROP) f.row_id = pairs.row_ids[chunk.row + row];
        }
        if (MASK >= DROP)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int at = thread + i * WARPGROUP, column = tile.column + at;
                if (at < BN && column < chunk.width) f.column_id[i] = pairs.column_ids[chunk.column + column];
            }
        return f;
    }

    __device__ __forceinline__ void keep(const Fetched& f) {
        const int thread = consumer_thread();
        kept.row_weight[thread] = f.weight;
        kept.named[thread] = f.named;
        if (MASK < DROP) return;
        kept.row_ids[thread] = f.row_id;
        kept.column_ids[thread] = f.column_id[0];
        if (thread + WARPGROUP < BN) kept.column_ids[thread + WARPGROUP] = f.column_id[1];
    }

    __device__ __forceinline__ void finish(float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) const {
        consumer_sync(consumer);
        const int lane = consumer_thread() % 32, first = 2 * (lane & 3);
        const int columns = arguments.chunk.width - tile.column - first;
        PairRow rows[STRIPS][2];
        bool any = MASK != PLAIN;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const int row = row_of(lane, s, q);
                const int2 named = kept.named[row];
                any = any || named.x >= 0;
                rows[s][q] = {named.x - first, named.y - first, MASK >= DROP ? kept.row_ids[row] : 0};
            }
        const long long* ids = kept.column_ids + first;
        // positives by ids (TARGET) are told apart by their ids below; those past the last column have become -inf,
        // which is +inf for a positive: so the last tile of a chunk keeps its ids from them
        if (MASK != PLAIN || columns + first < BN)
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
                admit<MASK, GROUPS>(acc[s], rows[s], ids, true, true, columns, nothing(scale));
        if (__any_sync(WHOLE_WARP, any))
            write<true>(acc, rows, ids, columns, lane, tile);
        else
            write<false>(acc, rows, ids, columns, lane, tile);
    }

    __device__ __forceinline__ void end() const { SlabWriter(g, slabs, consumer_thread() % 32).finish(); }

  private:
    __device__ __forceinline__ int row_of(int lane, int s, int q) const {
        return 64 * s + 16 * warp + lane / 4 + 8 * q;
    }

    template <bool POSITIVES>
    __device__ __forceinline__ void write(const float (&acc)[STRIPS][PRODUCT_VALUES],
                                          const PairRow (&rows)[STRIPS][2], const long long* ids, int columns, int lane,
                                          const Place& tile) const {
        const SlabWriter writer(g, slabs, lane);
        const bool wanted = arguments.g != nullptr;
        float weight[STRIPS][2], loss[STRIPS][2], slope[STRIPS][2];
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                weight[s][q] = kept.row_weight[row_of(lane, s, q)];
                loss[s][q] = slope[s][q] = 0.0f;
            }
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab)
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
                if (wanted) writer.open();
#pragma unroll
                for (int two = 0; two < SLAB_GROUPS / 2; ++two) {
                    unsigned packed[4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int group = slab * SLAB_GROUPS + 2 * two + h;
                        const longlong2 id = pair_of_ids<MASK>(ids, group);
                        float value[4];
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int q = e >> 1, c = e & 1, column = 8 * group + c;
                            const bool positive =
                                POSITIVES && standing<MASK>(rows[s][q], column, c ? id.y : id.x).positive &&
                                (MASK != TARGET || column < columns);
                            const Softplus pair = softplus_of(fmaf(acc[s][4 * group + e], scale, bias), positive);
                            loss[s][q] += pair.loss;
                            slope[s][q] += pair.slope;
                            // selected, not multiplied by 0: a weight of 0 silences its row also where the logit is NaN
                            value[e] = weight[s][q] == 0.0f ? 0.0f : weight[s][q] * pair.slope;
                        }
                        packed[2 * h] = narrow_pair<T>(value[0], value[1]);
                        packed[2 * h + 1] = narrow_pair<T>(value[2], value[3]);
                    }
                    if (wanted) writer.put(s, two, packed);
                }
                if (wanted) writer.send(s, tile.row + 64 * s + 16 * warp, tile.column + slab * SLAB_COLUMNS);
            }
        write_rows(loss, arguments.loss_parts, lane, tile);
        write_rows(slope, arguments.slope_parts, lane, tile);
    }

    // The four lanes of a row each write one of four rows.
    __device__ __forceinline__ void write_rows(float (&row)[STRIPS][2], float* parts, int lane,
                                               const Place& tile) const {
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) row[s][q] = row_total(row[s][q]);
        const int s = lane >> 1 & 1, q = lane & 1, at = tile.row + row_of(lane, s, q);
        const float low = q ? row[0][1] : row[0][0], high = q ? row[1][1] : row[1][0];
        if (at < arguments.chunk.height) parts[tile.column / BN * arguments.part_stride + at] = s ? high : low;
    }
};

extern "C" __device__ const int sigmoid_sm90_shared =
    Layout<SIGMOID_STAGES, SigmoidEpilogue<bfloat16, TARGET>::KEPT>::BYTES;

template <class T, int MASK>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    sigmoid_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                 const __grid_constant__ TensorMap g, const __grid_constant__ SigmoidArguments arguments) {
    run_pipeline<T, SIGMOID_STAGES, SigmoidEpilogue<T, MASK>>(rows, columns, &g, arguments);
}

}  // namespace contrastile
