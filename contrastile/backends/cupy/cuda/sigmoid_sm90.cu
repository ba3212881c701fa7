// The additive loss of one chunk for sm_90a: row sums of the loss and of its slope, and FACTOR G, in one pass.
//
// sigmoid_sm90<T, MASK>: grid and threads as forward_sm90, sigmoid_sm90_shared bytes of dynamic shared memory.
// G_ij = -w_i z_ij sigmoid(-z_ij x_ij) over admitted pairs. A warp none of whose pairs is positive or hidden skips
// the comparisons.
#include "epilogue_forward.cuh"
#include "epilogue_sigmoid.cuh"
#include "kept_sm90.cuh"
#include "slabs.cuh"

namespace contrastile {

template <class T, int MASK>
struct SigmoidEpilogue {
    // of one consumer: its tile's pairs and weights
    struct Kept {
        KeptPairs<MASK> pairs;
        float row_weight[BM], factor;
    };
    using Writer = SlabWriter<STRIPS>;
    static constexpr int KEPT = Writer::SPACE + 2 * sizeof(Kept), STAGES = 4;

    const SigmoidArguments& arguments;
    Kept& kept;
    const TensorMap& g;
    unsigned slabs;  // this warp's
    int consumer, warp;
    float scale, bias;

    __device__ __forceinline__ SigmoidEpilogue(const SigmoidArguments& a, const TensorMap& g_, unsigned char* memory,
                                               int consumer_, int warp_)
        : arguments(a),
          kept(reinterpret_cast<Kept*>(memory + Writer::SPACE)[consumer_]),
          g(g_),
          slabs(shared_address(memory) + (consumer_ * CONSUMER_WARPS + warp_) * Writer::WARP_SPACE),
          consumer(consumer_),
          warp(warp_),
          scale(usable_scale(static_cast<float>(a.plan->alpha * LN2))),
          bias(a.plan->bias) {
        if (consumer_thread() == 0) kept.factor = a.plan->factor;
        consumer_sync(consumer);
    }

    __device__ __forceinline__ void prefetch(const Place& tile) {
        const Chunk& chunk = arguments.chunk;
        const int thread = consumer_thread();
        kept.pairs.prefetch(arguments.pairs, chunk, tile, thread);
        fetch_vector(kept.row_weight, arguments.row_weight, chunk.row + tile.row, chunk.height - tile.row, thread);
    }

    __device__ __forceinline__ void finish(float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) const {
        const int lane = consumer_thread() % 32, first = 2 * (lane & 3);
        const int columns = arguments.chunk.width - tile.column - first;
        const bool touched = kept.pairs.touched(arguments.pairs, arguments.chunk, tile, warp, lane, true);
        PairRow rows[STRIPS][2];
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const int row = row_in_tile(warp, lane, s, q);
                rows[s][q] = kept.pairs.row(kept.pairs.named(arguments.pairs, arguments.chunk, tile, row), row, first);
            }
        const long long* ids = kept.pairs.ids(first);
        // positives by ids (TARGET) are told apart by their ids below; those past the last column have become -inf,
        // which is +inf for a positive: so the last tile of a chunk keeps its ids from them
        if ((MASK != PLAIN && touched) || columns + first < BN)
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
                admit<MASK, GROUPS>(acc[s], rows[s], ids, true, true, columns, nothing(scale));
        if (touched)
            write<true>(acc, rows, ids, columns, tile);
        else
            write<false>(acc, rows, ids, columns, tile);
    }

    __device__ __forceinline__ void end() const { Writer(g, slabs, consumer_thread() % 32).finish(); }

  private:
    // Hazard: unrolled over all of a thread's values this is larger than the instruction cache, and the multiprocessor
    // waits for instructions. So it works on the first PART groups of columns and moves the others down.
    template <bool POSITIVES>
    __device__ __forceinline__ void write(float (&acc)[STRIPS][PRODUCT_VALUES], PairRow (&rows)[STRIPS][2],
                                          const long long* ids, int columns, const Place& tile) const {
        constexpr int PART = POSITIVES ? 2 : 4, PARTS = SLAB_GROUPS / PART;  // of a slab
        const Writer writer(g, slabs, consumer_thread() % 32);
        const bool wanted = arguments.g != nullptr;
        float loss[STRIPS][2] = {}, slope[STRIPS][2] = {};
#pragma unroll 1
        for (int part = 0; part < SLABS * PARTS; ++part) {
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
                float weight[2];
#pragma unroll
                for (int q = 0; q < 2; ++q)
                    weight[q] = wanted ? weight_of(s, q) : 0.0f;
                if (wanted && part % PARTS == 0) {
                    // the slabs of both strips are open at a time
                    if (s == 0)
                        writer.open();
                    else
                        writer.template open<1>();
                }
#pragma unroll
                for (int two = 0; two < PART / 2; ++two) {
                    unsigned packed[4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int group = 2 * two + h;
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
                            value[e] = weight[q] == 0.0f ? 0.0f : weight[q] * pair.slope;
                        }
                        packed[2 * h] = narrow_pair<T>(value[0], value[1]);
                        packed[2 * h + 1] = narrow_pair<T>(value[2], value[3]);
                    }
                    if (wanted) writer.put(s, part % PARTS * (PART / 2) + two, packed);
                }
                if (wanted && part % PARTS == PARTS - 1)
                    writer.send(s, tile.row + 64 * s + 16 * warp, tile.column + part / PARTS * SLAB_COLUMNS);
            }
            columns -= 8 * PART;
            ids += MASK >= DROP ? 8 * PART : 0;
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    rows[s][q].positive -= 8 * PART;
                    rows[s][q].excluded -= 8 * PART;
                }
#pragma unroll
                for (int i = 0; i + 4 * PART < PRODUCT_VALUES; ++i) acc[s][i] = acc[s][i + 4 * PART];
            }
        }
        write_rows(loss, arguments.loss_parts, tile);
        write_rows(slope, arguments.slope_parts, tile);
    }

    __device__ __forceinline__ float weight_of(int s, int q) const {
        return kept.row_weight[row_in_tile(warp, consumer_thread() % 32, s, q)] * kept.factor;
    }

    // The four lanes of a row each write one of four rows.
    __device__ __forceinline__ void write_rows(float (&row)[STRIPS][2], float* parts,
                                               const Place& tile) const {
        const int lane = consumer_thread() % 32;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) row[s][q] = row_total(row[s][q]);
        const int s = lane >> 1 & 1, q = lane & 1, at = tile.row + row_in_tile(warp, lane, s, q);
        const float low = q ? row[0][1] : row[0][0], high = q ? row[1][1] : row[1][0];
        if (at < arguments.chunk.height) parts[tile.column / BN * arguments.part_stride + at] = s ? high : low;
    }
};

extern "C" __device__ const int sigmoid_sm90_shared =
    Layout<SigmoidEpilogue<bfloat16, DROP>::STAGES, SigmoidEpilogue<bfloat16, DROP>::KEPT>::BYTES;

template <class T, int MASK>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    sigmoid_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                 const __grid_constant__ TensorMap g, const __grid_constant__ SigmoidArguments arguments) {
    run_pipeline<T, SigmoidEpilogue<T, MASK>>(rows, columns, g, arguments);
}

}  // namespace contrastile
