// Row and column statistics of one chunk of X in one pass over its tiles, for sm_90a.
//
// forward_sm90<T, SAFE, MASK>: grid of 2 min(SMs / 2, pairs of tile rows times tile columns) blocks of
// PIPELINE_THREADS threads, ALL_SHARED bytes of dynamic shared memory.
// Each tile writes one partial per row and one per column. A fold adds them in the order of the tiles, so the result does
// not depend on the order of execution.
//
// forward_guided_sm90<T, SAFE, MASK>: the same, but limits are compared with a guide's dots.
//
// forward_keeping_sm90<T>: the fast path without masks. It also keeps its exponentials, rounded to T, (height, width),
// through a tensor map; they are 0 for positives.
#include "epilogue_forward.cuh"
#include "pair_storage_sm90.cuh"
#include "slabs.cuh"

namespace contrastile {

template <int SAFE, int MASK>
struct ForwardEpilogue {
    // of one consumer: its tile's pairs, and two or three numbers per column and warp
    struct Storage {
        PairStorage<MASK> pairs;
        float sums[CONSUMER_WARPS][BN], others[CONSUMER_WARPS][BN], lows[MASK == TARGET ? CONSUMER_WARPS : 1][BN];
        int off_diagonal;  // copy of the plan's
    };
    static constexpr int STORAGE_BYTES = 2 * sizeof(Storage), STAGES = 5;

    const ForwardArguments& arguments;
    Storage& storage;
    int consumer, warp;
    float alpha, shift;
    BeyondMask<STRIPS, PRODUCT_VALUES> beyond_mask;

    __device__ __forceinline__ ForwardEpilogue(const ForwardArguments& a, const TensorMap&, unsigned char* memory,
                                               int consumer_, int warp_)
        : arguments(a),
          storage(reinterpret_cast<Storage*>(memory)[consumer_]),
          consumer(consumer_),
          warp(warp_),
          alpha(nonzero_scale(a.plan->alpha)),
          shift(SAFE ? 0.0f : -a.plan->reference) {
        if (MASK >= EXCLUSIONS) return;
        if (consumer_thread() == 0) storage.off_diagonal = a.plan->off_diagonal;
        consumer_sync(consumer);
    }

    __device__ __forceinline__ void prefetch(const Place& tile) {
        storage.pairs.prefetch(arguments.pairs, arguments.chunk, tile, consumer_thread(), loads_pairs(tile));
    }

    __device__ __forceinline__ void compare_guide(const float (&guide)[STRIPS][PRODUCT_VALUES]) {
        beyond_mask.compare(guide, storage.pairs.limits(1.0f, warp, lane()));
    }

    __device__ __forceinline__ void process(float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) {
        leave_negatives(acc, tile);
        if constexpr (GUIDED<MASK>)
            add_up(acc, tile, beyond_mask);
        else
            add_up(acc, tile, storage.pairs.template limits<FLOORED<SAFE, MASK>>(arguments.plan->alpha, warp, lane()));
    }

    __device__ __forceinline__ void end() {}

  protected:
    template <class L>
    __device__ __forceinline__ void add_up(const float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile,
                                           const L& limits) {
        const int lane = this->lane();
        float row[STRIPS][2], reference[STRIPS][2];
        if (SAFE)
            guarded_sums<STRIPS, GROUPS>(acc, alpha, lane, row, reference, storage.sums[warp], storage.others[warp],
                                         limits);
        else
            shared_sums<STRIPS, GROUPS, FLOORED<SAFE, MASK>>(acc, alpha, shift, lane, row, storage.sums[warp], limits);
        write_sums(row, reference, tile);
    }

    // Read again each time: see consumer_thread.
    static __device__ __forceinline__ int lane() { return consumer_thread() % 32; }

    // Masks all pairs of a tile but its negatives. With TARGET it also writes the sums over positives; all warps of the
    // consumer take that branch together.
    __device__ __forceinline__ void leave_negatives(float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) {
        const Chunk& chunk = arguments.chunk;
        const int lane = this->lane();
        const bool edge = tile.row + BM > chunk.height || tile.column + BN > chunk.width;
        bool touched;
        if constexpr (MASK == TARGET) {
            touched = storage.pairs.near(arguments.pairs, chunk, tile, lane);
            if (touched)
                touched = consumer_any(consumer,
                                       storage.pairs.touched(arguments.pairs, chunk, tile, warp, lane));
            if (!touched) leave_no_positives(tile);
        } else {
            touched = loads_pairs(tile) && storage.pairs.touched(arguments.pairs, chunk, tile, warp, lane);
        }
        if (edge || (MASK >= EXCLUSIONS && touched)) admit_tile(acc, tile, touched);
        if (MASK != TARGET && touched) hide_positives(acc, tile, lane);
        if (FLOORED<SAFE, MASK> && GUIDED<MASK> && (edge || touched)) beyond_mask.mark(acc, masked_dot(alpha));
    }

    // One row at a time, so that nothing spills.
    __device__ __forceinline__ void hide_positives(float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile,
                                                   int lane) const {
        for_each_row<STRIPS>([&](int s, int q) {
            const int row = row_in_tile(warp, lane, s, q);
            const int column = storage.pairs.named_columns(arguments.pairs, arguments.chunk, tile, row).x;
            hide_positive<GROUPS>(acc[s], q, column - 2 * (lane & 3), masked_dot_for<SAFE, MASK>(alpha));
        });
    }

    __device__ __forceinline__ void write_sums(const float (&row)[STRIPS][2], const float (&reference)[STRIPS][2],
                                               const Place& tile) {
        write_side(row, reference, tile, arguments.rows.sums, arguments.rows.references, arguments.columns.sums,
                   arguments.columns.references);
    }

    // Whether the tile's pairs are loaded to shared memory: without masks, only if a row may have its positive here.
    __device__ __forceinline__ bool loads_pairs(const Place& tile) const {
        return MASK >= EXCLUSIONS || storage.off_diagonal != 0 ||
               on_diagonal(arguments.chunk, tile.row, tile.column, BM, BN);
    }

    // Writes the row sums, and the column sums that all warps have stored in shared memory; with SAFE also their
    // references.
    __device__ __forceinline__ void write_side(const float (&row)[STRIPS][2], const float (&reference)[STRIPS][2],
                                               const Place& tile, float* rows, float* row_references, float* columns,
                                               float* column_references) {
        write_rows(row, rows, tile);
        if (SAFE) write_rows(reference, row_references, tile);
        consumer_sync(consumer);
        if (arguments.columns.sums == nullptr) return;
        for_each_column(tile, [&](int column, long long at) {
            if (SAFE) {
                const Guarded sum =
                    join_guarded<CONSUMER_WARPS>(&storage.sums[0][column], &storage.others[0][column], BN);
                columns[at] = sum.sum;
                column_references[at] = sum.reference;
            } else {
                columns[at] = joined(storage.sums, column);
            }
        });
    }

    __device__ __forceinline__ void admit_tile(float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile, bool touched) {
        const Chunk& chunk = arguments.chunk;
        const int lane = this->lane();
        PairRow rows[STRIPS][2];
        bool inside[STRIPS][2];
        const int first = 2 * (lane & 3), columns = chunk.width - tile.column - first;
        for_each_row<STRIPS>([&](int s, int q) {
            const int row = row_in_tile(warp, lane, s, q);
            inside[s][q] = tile.row + row < chunk.height;
            rows[s][q] = PairRow{-1, -1, 0};
            if (MASK >= EXCLUSIONS)
                rows[s][q] = storage.pairs.row(storage.pairs.named_columns(arguments.pairs, chunk, tile, row), row, first);
        });
        const long long* ids = storage.pairs.ids(first);
        if (MASK == TARGET && touched) add_positives(acc, rows, inside, ids, columns, tile);
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
            admit<MASK, GROUPS, true>(acc[s], rows[s], ids, inside[s][0], inside[s][1], columns,
                                      masked_dot_for<SAFE, MASK>(alpha));
    }

    __device__ __forceinline__ void add_positives(const float (&acc)[STRIPS][PRODUCT_VALUES],
                                                  const PairRow (&rows)[STRIPS][2], const bool (&inside)[STRIPS][2],
                                                  const long long* ids, int columns, const Place& tile) {
        const int lane = this->lane();
        float dots[STRIPS][2], lows[STRIPS][2], counts[STRIPS][2];
        positive_sums<MASK, STRIPS, GROUPS>(acc, rows, inside, ids, columns, lane, dots, lows, counts,
                                            storage.sums[warp], storage.lows[warp], storage.others[warp]);
        write_rows(dots, arguments.rows.dots, tile);
        write_rows(lows, arguments.rows.dots_low, tile);
        write_rows(counts, arguments.rows.counts, tile);
        consumer_sync(consumer);
        if (arguments.columns.sums != nullptr)
            for_each_column(tile, [&](int column, long long at) {
                TwoPart sum;
#pragma unroll
                for (int w = 0; w < CONSUMER_WARPS; ++w)
                    sum += TwoPart{storage.sums[w][column], storage.lows[w][column]};
                arguments.columns.dots[at] = sum.high;
                arguments.columns.dots_low[at] = sum.rest();
                arguments.columns.counts[at] = joined(storage.others, column);
            });
        consumer_sync(consumer);  // the next step reuses this memory, here and below
        positive_powers<SAFE, MASK, STRIPS, GROUPS>(acc, rows, inside, ids, columns, alpha, shift, lane, dots, counts,
                                                    storage.sums[warp], storage.others[warp]);
        write_side(dots, counts, tile, arguments.rows.positive_sums, arguments.rows.positive_references,
                   arguments.columns.positive_sums, arguments.columns.positive_references);
        consumer_sync(consumer);
    }

    // What add_positives would write for a tile without positives.
    __device__ __forceinline__ void leave_no_positives(const Place& tile) const {
        const float none[STRIPS][2] = {};
        const Partials &rows = arguments.rows, &columns = arguments.columns;
        write_rows(none, rows.dots, tile);
        write_rows(none, rows.dots_low, tile);
        write_rows(none, rows.counts, tile);
        write_rows(none, rows.positive_sums, tile);
        if (SAFE) write_rows(none, rows.positive_references, tile);
        if (columns.sums == nullptr) return;
        for_each_column(tile, [&](int, long long at) {
            columns.dots[at] = columns.dots_low[at] = columns.counts[at] = columns.positive_sums[at] = 0.0f;
            if (SAFE) columns.positive_references[at] = 0.0f;
        });
    }

    static __device__ __forceinline__ float joined(const float (&parts)[CONSUMER_WARPS][BN], int column) {
        return (parts[0][column] + parts[1][column]) + (parts[2][column] + parts[3][column]);
    }

    __device__ __forceinline__ void write_rows(const float (&row)[STRIPS][2], float* parts, const Place& tile) const {
        contrastile::write_rows(row, parts, arguments.rows.stride, tile, arguments.chunk.height, warp, lane());
    }

    // Calls put(column of the tile, its place among the partials) for this thread's columns.
    template <class Put>
    __device__ __forceinline__ void for_each_column(const Place& tile, Put put) const {
        if (tile.row >= arguments.chunk.height) return;  // the second block of the last pair may have no rows
        const long long line = tile.row / BM * arguments.columns.stride + tile.column;
        for (int column = consumer_thread(); column < BN; column += WARPGROUP)
            if (tile.column + column < arguments.chunk.width) put(column, line + column);
    }
};

// T: dtype of the kept exponentials.
template <class T>
struct KeepingEpilogue : ForwardEpilogue<0, PLAIN> {
    using Base = ForwardEpilogue<0, PLAIN>;
    using Writer = SlabWriter<3>;
    static constexpr int STORAGE_BYTES = Writer::SPACE + Base::STORAGE_BYTES, STAGES = 4;

    const TensorMap& exponentials;
    unsigned slabs;  // this warp's

    __device__ __forceinline__ KeepingEpilogue(const ForwardArguments& a, const TensorMap& map, unsigned char* memory,
                                               int consumer_, int warp_)
        : Base(a, map, memory + Writer::SPACE, consumer_, warp_),
          exponentials(map),
          slabs(shared_address(memory) + (consumer_ * CONSUMER_WARPS + warp_) * Writer::WARP_SPACE) {}

    __device__ __forceinline__ void process(float (&acc)[STRIPS][PRODUCT_VALUES], const Place& tile) {
        leave_negatives(acc, tile);
        const int lane = this->lane();
        const Writer writer(exponentials, slabs, lane);
        float row[STRIPS][2];
        constexpr int PAIRS = SLAB_GROUPS / 2;  // of a slab
        shared_sums_kept<T, STRIPS, GROUPS>(
            acc, alpha, shift, lane, row, storage.sums[warp], [&](int s, int pair, const unsigned (&values)[4]) {
                const int part = pair / PAIRS, slab = STRIPS * part + s;
                // the slabs of both strips are open together
                if (pair % PAIRS == 0 && s == 0) writer.open();
                if (pair % PAIRS == 0 && s == 1) writer.template open<1>();
                writer.put(slab, pair % PAIRS, values);
                if (pair % PAIRS == PAIRS - 1)
                    writer.send(slab, tile.row + 64 * s + 16 * warp, tile.column + part * SLAB_COLUMNS);
            });
        write_sums(row, row, tile);
    }

    __device__ __forceinline__ void end() { Writer(exponentials, slabs, this->lane()).drain(); }
};

template <class T, int SAFE, int MASK>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    forward_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                 const __grid_constant__ ForwardArguments arguments) {
    if ((arguments.plan->status != 0) != (SAFE != 0)) return;  // the other instance's work
    run_pipeline<T, ForwardEpilogue<SAFE, MASK>>({source(rows, columns, arguments.features.depth)}, rows, arguments);
}

template <class T, int SAFE, int MASK>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    forward_guided_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                        const __grid_constant__ TensorMap guide_rows, const __grid_constant__ TensorMap guide_columns,
                        const __grid_constant__ ForwardArguments arguments) {
    if ((arguments.plan->status != 0) != (SAFE != 0)) return;  // the other instance's work
    run_pipeline<T, ForwardEpilogue<SAFE, MASK>>({source(guide_rows, guide_columns, arguments.features.guide_depth),
                                                  source(rows, columns, arguments.features.depth)},
                                                 rows, arguments);
}

template <class T>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    forward_keeping_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                         const __grid_constant__ TensorMap exponentials,
                         const __grid_constant__ ForwardArguments arguments) {
    if (arguments.plan->status != 0) return;  // forward_sm90's work
    run_pipeline<T, KeepingEpilogue<T>>({source(rows, columns, arguments.features.depth)}, exponentials, arguments);
}

}  // namespace contrastile
