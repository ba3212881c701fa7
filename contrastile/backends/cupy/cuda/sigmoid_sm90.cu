// The additive loss of one chunk for sm_90a: row sums of the loss and of its slope, and gradient_scale * G, in one pass.
//
// sigmoid_sm90<T, MASK>: grid, threads and shared memory as forward_sm90.
// G_ij = -w_i z_ij sigmoid(-z_ij x_ij) over admitted pairs. A warp without positive or hidden pairs and without rows of
// weight 0 skips the comparisons.
#include "epilogue_forward.cuh"
#include "epilogue_sigmoid.cuh"
#include "pair_storage_sm90.cuh"
#include "slabs.cuh"

namespace contrastile {

template <class T, int MASK>
struct SigmoidEpilogue {
    // of one consumer: its tile's pairs and weights
    struct Storage {
        PairStorage<MASK> pairs;
        float row_weight[BM], gradient_scale;
    };
    using Writer = SlabWriter<STRIPS>;
    static constexpr int STORAGE_BYTES = Writer::SPACE + 2 * sizeof(Storage), STAGES = 4;

    const SigmoidArguments& arguments;
    Storage& storage;
    const TensorMap& g;
    unsigned slabs;  // this warp's
    int consumer, warp;
    float scale, bias;  // times log2 e

    __device__ __forceinline__ SigmoidEpilogue(const SigmoidArguments& a, const TensorMap& g_, unsigned char* memory,
                                               int consumer_, int warp_)
        : arguments(a),
          storage(reinterpret_cast<Storage*>(memory + Writer::SPACE)[consumer_]),
          g(g_),
          slabs(shared_address(memory) + (consumer_ * CONSUMER_WARPS + warp_) * Writer::WARP_SPACE),
          consumer(consumer_),
          warp(warp_),
          scale(nonzero_scale(a.plan->alpha)),
          bias(static_cast<float>(a.plan->bias * LOG2E)) {
        if (consumer_thread() == 0) storage.gradient_scale = a.plan->gradient_scale;
        consumer_sync(consumer);
    }

    __device__ __forceinline__ void prefetch(const Place& tile) {
        const Chunk& chunk = arguments.chunk;
        const int thread = consumer_thread();
        storage.pairs.prefetch(arguments.pairs, chunk, tile, thread);
        fetch_vector(storage.row_weight, arguments.row_weight, chunk.row + tile.row, chunk.height - tile.row, thread);
    }

    __device__ __forceinline__ void process(float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) const {
        const int lane = consumer_thread() % 32, first = 2 * (lane & 3);
        const int columns = arguments.chunk.width - tile.column - first;
        const bool touched =
            storage.pairs.touched(arguments.pairs, arguments.chunk, tile, warp, lane) || silences();
        PairRow rows[STRIPS][2];
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const int row = row_in_tile(warp, lane, s, q);
                const int2 named = storage.pairs.named_columns(arguments.pairs, arguments.chunk, tile, row);
                rows[s][q] = storage.pairs.row(named, row, first);
            }
        const long long* ids = storage.pairs.ids(first);
        // Columns past the last are masked. Below, ids decide what is positive (TARGET), and -inf would be +inf for a
        // positive: so `column < columns` is checked there too.
        if ((MASK != PLAIN && touched) || columns + first < BN)
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
                admit<MASK, GROUPS>(acc[s], rows[s], ids, true, true, columns, masked_dot(scale));
        if (touched)
            write_touched(acc, rows, ids, columns, tile);
        else
            write(acc, tile);
    }

    __device__ __forceinline__ void end() const { Writer(g, slabs, consumer_thread() % 32).drain(); }

  private:
    // Whether one of the warp's rows has a weight of 0.
    __device__ __forceinline__ bool silences() const {
        bool found = false;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) found = found || weight_of(s, q) == 0.0f;
        return __any_sync(WHOLE_WARP, found);
    }

    // For nearly all warps: no pair is positive, no row has weight 0, and pairs that do not count are -inf already.
    __device__ __forceinline__ void write(const float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) const {
        const Writer writer(g, slabs, consumer_thread() % 32);
        const bool wanted = arguments.g != nullptr;
        AdditiveSums sums[STRIPS][2];
        float weight[STRIPS][2];
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) weight[s][q] = weight_of(s, q);
#pragma unroll
        for (int slab = 0; slab < STRIPS * SLABS; ++slab) {
            const int s = slab % STRIPS, part = slab / STRIPS;
            if (wanted) writer.open();
#pragma unroll
            for (int two = 0; two < SLAB_GROUPS / 2; ++two) {
                unsigned packed[4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int first = 4 * (part * SLAB_GROUPS + 2 * two + h);
                    float value[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        value[e] = weight[s][e >> 1] *
                                   sums[s][e >> 1].add(fmaf(acc[s][first + e], scale, bias), false, e & 1);
                    packed[2 * h] = narrow_pair<T>(value[0], value[1]);
                    packed[2 * h + 1] = narrow_pair<T>(value[2], value[3]);
                }
                if (wanted) writer.put(slab, two, packed);
            }
            if (wanted)
                writer.send(slab, tile.row + 64 * s + 16 * warp, tile.column + part * SLAB_COLUMNS);
        }
        write_rows(sums, tile);
    }

    // Hazard: unrolled over all of a thread's values this loop exceeds the instruction cache, and the multiprocessor waits
    // for instructions. So each iteration works on the first PART groups of columns and moves the others down.
    __device__ __forceinline__ void write_touched(float (&acc)[STRIPS][PRODUCT_VALUES], PairRow (&rows)[STRIPS][2],
                                                  const long long* ids, int columns, const Place& tile) const {
        constexpr int PART = 2, PARTS = SLAB_GROUPS / PART;  // of a slab
        const Writer writer(g, slabs, consumer_thread() % 32);
        const bool wanted = arguments.g != nullptr;
        AdditiveSums sums[STRIPS][2];
#pragma unroll 1
        for (int part = 0; part < SLABS * PARTS; ++part) {
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) {
                const float weight[2] = {weight_of(s, 0), weight_of(s, 1)};
                if (wanted && part % PARTS == 0) {
                    // the slabs of both strips are open together
                    if (s == 0)
                        writer.open();
                    else
                        writer.template open<1>();
                }
                unsigned packed[4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const longlong2 id = pair_of_ids<MASK>(ids, h);
                    float value[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int q = e >> 1, c = e & 1, column = 8 * h + c;
                        const bool positive = pair_status<MASK>(rows[s][q], column, c ? id.y : id.x).positive &&
                                              (MASK != TARGET || column < columns);
                        const float slope = sums[s][q].add(fmaf(acc[s][4 * h + e], scale, bias), positive, c);
                        // a select, not a product with 0: a weight of 0 silences its row even if the logit is NaN
                        value[e] = weight[q] == 0.0f ? 0.0f : weight[q] * slope;
                    }
                    packed[2 * h] = narrow_pair<T>(value[0], value[1]);
                    packed[2 * h + 1] = narrow_pair<T>(value[2], value[3]);
                }
                if (wanted) writer.put(s, part % PARTS, packed);
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
        write_rows(sums, tile);
    }

    __device__ __forceinline__ float weight_of(int s, int q) const {
        return storage.row_weight[row_in_tile(warp, consumer_thread() % 32, s, q)] * storage.gradient_scale;
    }

    __device__ __forceinline__ void write_rows(const AdditiveSums (&sums)[STRIPS][2], const Place& tile) const {
        float loss[STRIPS][2], slope[STRIPS][2];
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                loss[s][q] = sums[s][q].loss();
                slope[s][q] = sums[s][q].slope;
            }
        write_parts(loss, arguments.loss_parts, tile);
        write_parts(slope, arguments.slope_parts, tile);
    }

    __device__ __forceinline__ void write_parts(float (&row)[STRIPS][2], float* parts, const Place& tile) const {
        const int lane = consumer_thread() % 32;
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
#pragma unroll
            for (int q = 0; q < 2; ++q) row[s][q] = row_total(row[s][q]);
        contrastile::write_rows(row, parts, arguments.part_stride, tile, arguments.chunk.height, warp, lane);
    }
};

template <class T, int MASK>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    sigmoid_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                 const __grid_constant__ TensorMap g, const __grid_constant__ SigmoidArguments arguments) {
    run_pipeline<T, SigmoidEpilogue<T, MASK>>({source(rows, columns, arguments.features.depth)}, g, arguments);
}

}  // namespace contrastile
