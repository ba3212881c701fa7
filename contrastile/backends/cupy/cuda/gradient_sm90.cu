// gradient_scale * G of one chunk, rounded once to the features' dtype, for sm_90a.
//
// gradient_sm90<T, MASK>: grid, threads and shared memory as forward_sm90. gradient_guided_sm90<T, MASK>: the same, but
// limits are compared with a guide's dots.
// The plan chooses the exponent (epilogue_gradient.cuh) on the device. G of a positive is float32 until it is rounded. A
// warp that has a positive by index runs the same code with one comparison per element.
#include "epilogue_gradient.cuh"
#include "pair_storage_sm90.cuh"
#include "slabs.cuh"

namespace contrastile {

template <class T, int MASK>
struct GradientEpilogue {
    // of one side of a consumer's tile; aligned, because two elements are read at once
    template <int LENGTH>
    struct alignas(16) SideStorage {
        float first[LENGTH], weight[LENGTH], taken[MASK == TARGET ? LENGTH : 1];

        __device__ __forceinline__ void prefetch(const GradientSide& side, int exponent, long long begin, int count,
                                                 int thread) {
            fetch_vector(first, exponent == SHARED ? side.folded : side.log, begin, count, thread);
            fetch_vector(weight, side.weight, begin, count, thread);
            if constexpr (MASK == TARGET) fetch_vector(taken, side.taken, begin, count, thread);
        }
    };
    struct Storage {
        PairStorage<MASK> pairs;
        SideStorage<BM> row;
        SideStorage<BN> column;
        float entry[MASK == TARGET ? 1 : BM];  // G of the rows' positives by index
        int exponent, certain;
    };
    using Writer = SlabWriter<3>;
    static constexpr int STORAGE_BYTES = Writer::SPACE + 2 * sizeof(Storage), STAGES = 4;

    const GradientArguments& arguments;
    const TensorMap& g;
    unsigned slabs;  // this warp's
    Storage& storage;
    int consumer, warp;
    float alpha, reference;
    BeyondMask<STRIPS, PRODUCT_VALUES> beyond_mask;

    __device__ __forceinline__ GradientEpilogue(const GradientArguments& a, const TensorMap& g_, unsigned char* memory_,
                                                int consumer_, int warp_)
        : arguments(a),
          g(g_),
          slabs(shared_address(memory_) + (consumer_ * CONSUMER_WARPS + warp_) * Writer::WARP_SPACE),
          storage(reinterpret_cast<Storage*>(memory_ + Writer::SPACE)[consumer_]),
          consumer(consumer_),
          warp(warp_),
          alpha(a.plan->alpha),
          reference(a.plan->reference) {
        if (consumer_thread() == 0) {
            storage.exponent = exponent_of(a);
            storage.certain = a.plan->certain;
        }
        consumer_sync(consumer);
    }

    __device__ __forceinline__ void prefetch(const Place& tile) {
        const Chunk& chunk = arguments.chunk;
        const int thread = consumer_thread(), exponent = storage.exponent;
        storage.pairs.prefetch(arguments.pairs, chunk, tile, thread);
        storage.row.prefetch(arguments.row, exponent, chunk.row + tile.row, chunk.height - tile.row, thread);
        if constexpr (MASK != TARGET)
            if (arguments.entries != nullptr)
                fetch_vector(storage.entry, arguments.entries, chunk.row + tile.row, chunk.height - tile.row, thread);
        if (exponent != ROWS)
            storage.column.prefetch(arguments.column, exponent, chunk.column + tile.column, chunk.width - tile.column,
                                 thread);
    }

    __device__ __forceinline__ void compare_guide(const float (&guide)[STRIPS][PRODUCT_VALUES]) {
        beyond_mask.compare(guide, storage.pairs.limits(1.0f, warp, consumer_thread() % 32));
    }

    __device__ __forceinline__ void process(const float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) const {
        const int exponent = storage.exponent;
        if (MASK == TARGET && storage.certain)
            return exponent == ROWS ? choose_positives<ROWS, MASK == TARGET>(acc, tile)
                                    : choose_positives<BOTH, MASK == TARGET>(acc, tile);
        if (exponent == SHARED)
            choose_positives<SHARED>(acc, tile);
        else if (exponent == ROWS)
            choose_positives<ROWS>(acc, tile);
        else
            choose_positives<BOTH>(acc, tile);
    }

    __device__ __forceinline__ void end() const { Writer(g, slabs, consumer_thread() % 32).drain(); }

  private:
    // A thread's two rows of a strip.
    struct Rows {
        float first[2], weight[2];
        float positive[2];  // G of its positive by index; with TARGET the target that G of a positive subtracts
        PairRow pair[2];
    };

    __device__ __forceinline__ int2 named_columns(const Place& tile, int row) const {
        return storage.pairs.named_columns(arguments.pairs, arguments.chunk, tile, row);
    }

    // CERTAIN: plan->certain; EXPONENT is not SHARED then.
    template <int EXPONENT, bool CERTAIN = false>
    __device__ __forceinline__ void choose_positives(const float (&acc)[STRIPS][PRODUCT_VALUES],
                                                     const Place& tile) const {
        const int lane = consumer_thread() % 32;
        if (storage.pairs.touched(arguments.pairs, arguments.chunk, tile, warp, lane))
            write<EXPONENT, true, CERTAIN>(acc, tile);
        else
            write<EXPONENT, false>(acc, tile);
    }

    template <int EXPONENT, bool POSITIVES>
    __device__ __forceinline__ Rows rows_of(int s, const Place& tile) const {
        const int lane = consumer_thread() % 32, first = 2 * (lane & 3);
        Rows rows;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const int row = row_in_tile(warp, lane, s, q);
            rows.first[q] = storage.row.first[row];
            rows.weight[q] = EXPONENT == SHARED ? 0.0f : storage.row.weight[row];
            if (!POSITIVES) continue;
            const int2 columns = named_columns(tile, row);
            rows.pair[q] = storage.pairs.row(columns, row, first);
            rows.positive[q] = MASK == TARGET ? storage.row.taken[row] : storage.entry[row];
        }
        return rows;
    }

    template <int EXPONENT, bool POSITIVES, bool CERTAIN = false>
    __device__ __forceinline__ void write(const float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) const {
        const int lane = consumer_thread() % 32, first = 2 * (lane & 3);
        const Writer writer(g, slabs, lane);
        // rows are loaded once if registers suffice, else again for each slab
        const auto limits = [&] {
            if constexpr (GUIDED<MASK>)
                return beyond_mask;
            else
                return storage.pairs.limits(alpha, warp, lane);
        }();
        Rows held[STRIPS];
        if (!POSITIVES)
#pragma unroll
            for (int s = 0; s < STRIPS; ++s) held[s] = rows_of<EXPONENT, POSITIVES>(s, tile);
#pragma unroll
        for (int slab = 0; slab < STRIPS * SLABS; ++slab) {
            const int s = slab % STRIPS, part = slab / STRIPS;
            writer.open();
            const Rows rows = POSITIVES ? rows_of<EXPONENT, POSITIVES>(s, tile) : held[s];
#pragma unroll
            for (int two = 0; two < SLAB_GROUPS / 2; ++two) {
                unsigned packed[4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    pack_group<EXPONENT, POSITIVES, CERTAIN>(acc[s], rows, limits, s, part * SLAB_GROUPS + 2 * two + h,
                                                             first, tile, packed[2 * h], packed[2 * h + 1]);
                    // else the compiler loads the vectors of both groups early, and spills
                    if (POSITIVES) asm volatile("" ::: "memory");
                }
                writer.put(slab, two, packed);
            }
            send(writer, slab, tile);
        }
    }

    __device__ __forceinline__ void send(const Writer& writer, int slab, const Place& tile) const {
        writer.send(slab, tile.row + 64 * (slab % STRIPS) + 16 * warp, tile.column + slab / STRIPS * SLAB_COLUMNS);
    }

    // G of a positive by ids. A pair outside the chunk may look positive: nothing may be read for it.
    __device__ __forceinline__ float certain_positive(float dot, int s, int q, int column, const Place& tile) const {
        const Chunk& chunk = arguments.chunk;
        const int row = tile.row + row_in_tile(warp, consumer_thread() % 32, s, q);
        column += tile.column;
        if (row >= chunk.height || column >= chunk.width) return 0.0f;
        return certain_gradient(dot, alpha, arguments.row, chunk.row + row) +
               certain_gradient(dot, alpha, arguments.column, chunk.column + column);
    }

    static __device__ __forceinline__ float2 pair_at(const float* list, int g, int first) {
        return *reinterpret_cast<const float2*>(list + 8 * g + first);
    }

    // G of the four values of group g of strip s: `top` for row q = 0, `low` for q = 1.
    template <int EXPONENT, bool POSITIVES, bool CERTAIN, class L>
    __device__ __forceinline__ void pack_group(const float (&dot)[PRODUCT_VALUES], const Rows& rows, const L& limits,
                                               int s, int g, int first, const Place& tile, unsigned& top,
                                               unsigned& low) const {
        const float2 none = make_float2(0.0f, 0.0f);
        const float2 column_first = EXPONENT == ROWS ? none : pair_at(storage.column.first, g, first);
        const float2 weight = EXPONENT == BOTH ? pair_at(storage.column.weight, g, first) : none;
        const longlong2 id = pair_of_ids<MASK>(storage.pairs.ids(first), g);
        float value[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int q = e >> 1, c = e & 1, column = 8 * g + c;
            value[e] = admitted_gradient<EXPONENT, LIMITED<MASK>>(
                dot[4 * g + e], alpha, reference, rows.first[q], rows.weight[q], c ? column_first.y : column_first.x,
                c ? weight.y : weight.x, limits.beyond_row(dot[4 * g + e], s, 4 * g + e),
                limits.beyond_column(dot[4 * g + e], s, 4 * g + e));
            if (!POSITIVES) continue;
            const PairStatus status = pair_status<MASK>(rows.pair[q], column, c ? id.y : id.x);
            if (MASK >= EXCLUSIONS && !status.admitted) value[e] = 0.0f;
            if (!status.positive) continue;
            if constexpr (CERTAIN)
                value[e] = certain_positive(dot[4 * g + e], s, q, first + column, tile);
            else if constexpr (MASK == TARGET)
                value[e] -= EXPONENT == ROWS ? rows.positive[q] : rows.positive[q] + storage.column.taken[first + column];
            else
                value[e] = rows.positive[q];
        }
        top = narrow_pair<T>(value[0], value[1]);
        low = narrow_pair<T>(value[2], value[3]);
    }
};

template <class T, int MASK>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    gradient_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                  const __grid_constant__ TensorMap g, const __grid_constant__ GradientArguments arguments) {
    if (arguments.in_place_of_kept && arguments.plan->kept) return;
    run_pipeline<T, GradientEpilogue<T, MASK>>({source(rows, columns, arguments.features.depth)}, g, arguments);
}

template <class T, int MASK>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    gradient_guided_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                         const __grid_constant__ TensorMap guide_rows, const __grid_constant__ TensorMap guide_columns,
                         const __grid_constant__ TensorMap g, const __grid_constant__ GradientArguments arguments) {
    run_pipeline<T, GradientEpilogue<T, MASK>>({source(guide_rows, guide_columns, arguments.features.guide_depth),
                                                source(rows, columns, arguments.features.depth)},
                                               g, arguments);
}

}  // namespace contrastile
