// Statistics of the rows of narrow features over all columns, on the fast path, for sm_90a.
//
// narrow_forward_sm90<T, MASK>: grid of `blocks` blocks, at most one for each tile, of PIPELINE_THREADS threads,
// ALL_SHARED bytes of dynamic shared memory. It returns at once if plan->status is 1. A thread adds 32 numbers per row and
// tile in float32, and tiles in double, so that a partial is rounded once.
#include "narrow_sm90.cuh"

namespace contrastile {
namespace narrow_rows {

template <class T, int MASK>
struct ForwardConsumer : Consumer<T, MASK, ColumnIds<MASK>, RowPairs> {
    using Base = Consumer<T, MASK, ColumnIds<MASK>, RowPairs>;
    using Base::lane, Base::shares, Base::stages, Base::row_of, Base::in_chunk;

    const NarrowForwardArguments& a;
    const float alpha, shift;

    // Sums over the thread's share of one row; with TARGET also over positives.
    struct Sums {
        double negatives = 0.0, positives = 0.0, dots = 0.0;
        int count = 0;
    };

    __device__ __forceinline__ ForwardConsumer(const Base& base, const NarrowForwardArguments& a_)
        : Base(base), a(a_), alpha(nonzero_scale(a_.forward.plan->alpha)), shift(-a_.forward.plan->reference) {}

    __device__ __forceinline__ void part_of_row(const Segment& s, Cursor<STAGES>& now) {
        const Chunk& chunk = a.forward.chunk;
        this->fetch_rows(s, a.forward.pairs, chunk, [](int, long long, bool) {});
        Sums sums[2];
        this->wait_for_rows(s);
        for (int tile = s.first; tile < s.last; ++tile) {
            float x[NARROW_VALUES];  // declared here, so that it is dead between two tiles
            this->wait_for(now);
            products_fence();
            this->begin_logits(this->rows_at(s), now.stage, x);
            const ColumnIds<MASK>& columns = stages[now.stage];
            const bool masked = this->touched(columns, tile, chunk.width);
            products_wait<0>();
            if (masked)
                add_masked(x, columns, tile, sums);
            else
                add(x, sums);
            this->release(now.stage);
            now.step();
        }
        this->release_rows(s);
        put(sums, s);
    }

    __device__ __forceinline__ void add(const float (&x)[NARROW_VALUES], Sums (&sums)[2]) const {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            float part[4] = {};  // four chains, because each addition waits for the one before
#pragma unroll
            for (int i = 0; i < NARROW_VALUES / 2; ++i)
                part[i % 4] += exp2_fast(fmaf(x[4 * (i / 2) + 2 * q + i % 2], alpha, shift));
            sums[q].negatives += (part[0] + part[1]) + (part[2] + part[3]);
        }
    }

    __device__ __forceinline__ void add_masked(const float (&x)[NARROW_VALUES], const ColumnIds<MASK>& columns, int tile,
                                               Sums (&sums)[2]) const {
        const int left = a.forward.chunk.width - tile * SIDE - 2 * (lane & 3);  // columns from the thread's first on
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const PairRow pair = this->pair_row(q, tile);
            float negatives = 0.0f, positives = 0.0f;
#pragma unroll
            for (int group = 0; group < NARROW_COLUMNS / 8; ++group) {
                const longlong2 id = Base::ids_of(columns, lane, group);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int column = 8 * group + c;
                    const float dot = x[4 * group + 2 * q + c];
                    const PairStatus status = pair_status<MASK>(pair, column, c ? id.y : id.x);
                    if (column >= left || !status.admitted) continue;
                    if (!status.positive) {
                        negatives += exp2_fast(fmaf(dot, alpha, shift));
                    } else if (MASK == TARGET) {  // the precheck computes logits of positives by index
                        positives += exact_power(dot, alpha, shift);
                        sums[q].dots += dot;
                        ++sums[q].count;
                    }
                }
            }
            sums[q].negatives += negatives;
            if (MASK == TARGET) sums[q].positives += positives;
        }
    }

    __device__ __forceinline__ void put(const Sums (&sums)[2], const Segment& s) const {
        const Partials& out = a.forward.rows;
        const long long first = shares.block_of(s.row * shares.columns);
        const int part = static_cast<int>(blockIdx.x - first);
        const bool ends = s.last == shares.columns;  // unused partials of this row become 0
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const int row = in_chunk(s, row_of(q));
            const double negatives = row_total(sums[q].negatives);
            const double positives = MASK == TARGET ? row_total(sums[q].positives) : 0.0;
            const double dots = MASK == TARGET ? row_total(sums[q].dots) : 0.0;
            const int count = MASK == TARGET ? row_total(sums[q].count) : 0;
            if (row >= a.forward.chunk.height || lane % 4 != 0) continue;
            for (int p = part; p < (ends ? a.parts : part + 1); ++p) {
                const long long at = p * out.stride + row;
                const bool mine = p == part;
                out.sums[at] = mine ? static_cast<float>(negatives) : 0.0f;
                if (MASK != TARGET) continue;
                out.positive_sums[at] = mine ? static_cast<float>(positives) : 0.0f;
                const float high = static_cast<float>(dots);
                out.dots[at] = mine ? high : 0.0f;
                out.dots_low[at] = mine ? static_cast<float>(dots - high) : 0.0f;
                out.counts[at] = mine ? static_cast<float>(count) : 0.0f;
            }
        }
    }
};

}  // namespace narrow_rows

template <class T, int MASK>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    narrow_forward_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                        const __grid_constant__ NarrowForwardArguments a) {
    using namespace narrow_rows;
    const ForwardArguments& f = a.forward;
    if (f.plan->status != 0) return;  // forward_sm90's work
    run<ForwardConsumer<T, MASK>>(rows, columns, f.chunk, a, [&](ColumnIds<MASK>& to, int tile, int lane) {
        to.bring(f.pairs, f.chunk, tile, lane);
    });
}

}  // namespace contrastile
