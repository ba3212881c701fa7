// The rows' gradient of narrow features, without G in memory, for sm_90a: a tile of G is formed in registers, from where
// the tensor cores read it.
//
// narrow_gradient_sm90<T, MASK>: adds G columns to out (or writes it). Grid of `blocks` blocks, at most one for each tile,
// of PIPELINE_THREADS threads, ALL_SHARED bytes of dynamic shared memory. narrow_join: JOINS blocks for
// each tile row, 256 threads; then out is complete.
//
// The columns in shared memory are multiplied twice: with the rows, for the logits, and with G. While the tensor cores work
// on G columns of one tile, a consumer forms G of the next. If several blocks share a tile row, their sums go to `parts`,
// and narrow_join adds them in the order of the blocks.
//
// Hazard: the tensor cores read G from registers. G of the next tile is formed in other registers, and is moved only when
// they are done.
#include "epilogue_gradient.cuh"
#include "narrow_sm90.cuh"

namespace contrastile {
namespace narrow_rows {

constexpr int JOINS = NARROW_JOINS, JOINED_LINES = SIDE / JOINS;

template <int MASK>
struct GradientColumns : ColumnIds<MASK> {
    float first[SIDE], weight[SIDE], taken[MASK == TARGET ? SIDE : 4];

    __device__ __forceinline__ void bring(const GradientArguments& g, int exponent, int tile, int lane) {
        if (exponent != ROWS)
#pragma unroll
            for (int i = 0; i < SIDE / 32; ++i) {
                const int here = lane + 32 * i, column = tile * SIDE + here;
                const Side side = column < g.chunk.width ? side_of<MASK>(g.column, column, exponent) : no_side();
                first[here] = side.first;
                weight[here] = side.weight;
                if constexpr (MASK == TARGET) taken[here] = side.taken;
            }
        ColumnIds<MASK>::bring(g.pairs, g.chunk, tile, lane);
    }
};

struct GradientRows : RowPairs {
    float entry[CONSUMER_ROWS], taken[CONSUMER_ROWS];
};

// The slot in `parts` of a block's sums of a tile row.
__device__ __forceinline__ long long slot(const Shares& shares, long long block, long long row) {
    return 2 * block + (shares.begin(block) / shares.columns == row ? 0 : 1);
}

template <class T, int MASK>
struct GradientConsumer : Consumer<T, MASK, GradientColumns<MASK>, GradientRows> {
    using Base = Consumer<T, MASK, GradientColumns<MASK>, GradientRows>;
    using Base::base, Base::lane, Base::shares, Base::stages, Base::rows, Base::row_of, Base::in_chunk;
    using L = typename Base::L;

    const NarrowGradientArguments& a;
    const int exponent;
    const float alpha, reference;
    float first[2], weight[2];  // of the thread's two rows

    __device__ __forceinline__ GradientConsumer(const Base& base, const NarrowGradientArguments& a_)
        : Base(base),
          a(a_),
          exponent(exponent_of(a_.gradient)),
          alpha(a_.gradient.plan->alpha),
          reference(a_.gradient.plan->reference) {}

    __device__ __forceinline__ void fetch(const Segment& s) {
        const GradientArguments& g = a.gradient;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const int row = in_chunk(s, row_of(q));
            const Side side = row < g.chunk.height ? side_of<PLAIN>(g.row, g.chunk.row + row, exponent) : no_side();
            first[q] = side.first;
            weight[q] = side.weight;
        }
        this->fetch_rows(s, g.pairs, g.chunk, [&](int row, long long i, bool inside) {
            if (MASK == TARGET)
                rows.taken[row] = inside ? g.row.taken[i] : 0.0f;
            else
                rows.entry[row] = inside && g.entries != nullptr ? g.entries[i] : 0.0f;
        });
    }

    __device__ __forceinline__ void begin_sums(const unsigned (&g)[PARTS][4], int stage, bool add,
                                               float (&sums)[NARROW_VALUES]) const {
        const unsigned columns = operand_across<HALF_BYTES>(base + L::COLUMNS_AT + stage * TILE_BYTES);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            product_narrow_across<T>(sums, g[part], descriptor(columns + 128 * part), part > 0 || add);
        products_commit();
    }

    // Names the operand registers after the products have ended. Otherwise the compiler considers them free as soon as the
    // products have started, and forms the next tile's G in them.
    static __device__ __forceinline__ void keep_until_here(unsigned (&g)[PARTS][4]) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            asm volatile("" : "+r"(g[part][0]), "+r"(g[part][1]), "+r"(g[part][2]), "+r"(g[part][3])::"memory");
    }

    __device__ __forceinline__ void part_of_row(const Segment& s, Cursor<STAGES>& now) {
        fetch(s);
        float x[NARROW_VALUES], sums[NARROW_VALUES];
        unsigned g[PARTS][4] = {}, next[PARTS][4];
        this->wait_for_rows(s);
        this->wait_for(now);
        int before = now.stage;
        // Each iteration issues the logits of one tile and the sums of the tile before. The first has no sums, and nothing
        // reads the logits of the last.
        for (int tile = s.first; tile <= s.last; ++tile) {
            products_fence();
            this->begin_logits(this->rows_at(s), now.stage, x);
            begin_sums(g, before, tile > s.first, sums);
            const bool masked = this->touched(stages[now.stage], tile, a.gradient.chunk.width);
            products_wait<1>();
            if (tile < s.last) make(x, s, tile, now.stage, masked, next);
            products_wait<0>();
            keep_until_here(g);
            if (tile > s.first) this->release(before);
            if (tile == s.last) break;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int i = 0; i < 4; ++i) g[part][i] = next[part][i];
            before = now.stage;
            if (tile + 1 == s.last) continue;
            now.step();
            this->wait_for(now);
        }
        this->release_rows(s);
        now.step();
        put(sums, s);
    }

    // Forms G of a tile from its dots, in the layout of the tensor cores' operand.
    __device__ __forceinline__ void make(const float (&x)[NARROW_VALUES], const Segment& s, int tile, int stage,
                                         bool masked, unsigned (&g)[PARTS][4]) const {
        const GradientColumns<MASK>& columns = stages[stage];
        if (!masked) {
            if (exponent == SHARED)
                fill<SHARED, false, false>(x, s, tile, columns, g);
            else if (exponent == ROWS)
                fill<ROWS, false, false>(x, s, tile, columns, g);
            else
                fill<BOTH, false, false>(x, s, tile, columns, g);
        } else if (MASK == TARGET && a.gradient.plan->certain) {
            if (exponent == ROWS)
                fill<ROWS, true, MASK == TARGET>(x, s, tile, columns, g);
            else
                fill<BOTH, true, MASK == TARGET>(x, s, tile, columns, g);
        } else if (exponent == SHARED) {
            fill<SHARED, true, false>(x, s, tile, columns, g);
        } else if (exponent == ROWS) {
            fill<ROWS, true, false>(x, s, tile, columns, g);
        } else {
            fill<BOTH, true, false>(x, s, tile, columns, g);
        }
    }

    template <int EXPONENT, bool MASKED, bool CERTAIN>
    __device__ __forceinline__ void fill(const float (&x)[NARROW_VALUES], const Segment& s, int tile,
                                         const GradientColumns<MASK>& columns, unsigned (&g)[PARTS][4]) const {
        const int own = 2 * (lane & 3);  // the thread's first column
        PairRow pair[2];
        if (MASKED)
#pragma unroll
            for (int q = 0; q < 2; ++q) pair[q] = this->pair_row(q, tile);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int group = 2 * part + h;
                const float2 none = make_float2(0.0f, 0.0f);
                const float2 column_first = EXPONENT == ROWS ? none : pair_at(columns.first, group);
                const float2 column_weight = EXPONENT == BOTH ? pair_at(columns.weight, group) : none;
                const longlong2 id = MASKED ? Base::ids_of(columns, lane, group) : make_longlong2(0, 0);
                float value[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int q = e >> 1, c = e & 1, column = 8 * group + c;
                    const float dot = x[4 * group + e];
                    value[e] = admitted_gradient<EXPONENT>(dot, alpha, reference, first[q], weight[q],
                                                    c ? column_first.y : column_first.x,
                                                    c ? column_weight.y : column_weight.x);
                    if (!MASKED) continue;
                    const PairStatus status = pair_status<MASK>(pair[q], column, c ? id.y : id.x);
                    if (!status.admitted || tile * SIDE + own + column >= a.gradient.chunk.width) {
                        value[e] = 0.0f;
                    } else if (status.positive) {
                        if constexpr (CERTAIN)
                            value[e] = certain_positive(dot, in_chunk(s, row_of(q)), tile * SIDE + own + column);
                        else if constexpr (MASK == TARGET)
                            value[e] -= rows.taken[row_of(q)] + (EXPONENT == ROWS ? 0.0f : columns.taken[own + column]);
                        else
                            value[e] = rows.entry[row_of(q)];
                    }
                }
                g[part][2 * h] = narrow_pair<T>(value[0], value[1]);
                g[part][2 * h + 1] = narrow_pair<T>(value[2], value[3]);
            }
    }

    __device__ __forceinline__ float2 pair_at(const float* list, int group) const {
        return *reinterpret_cast<const float2*>(list + 8 * group + 2 * (lane & 3));
    }

    // A pair outside the chunk may look positive: nothing may be read for it.
    __device__ __forceinline__ float certain_positive(float dot, int row, int column) const {
        const GradientArguments& g = a.gradient;
        if (row >= g.chunk.height) return 0.0f;
        return certain_gradient(dot, alpha, g.row, g.chunk.row + row) + certain_gradient(dot, alpha, g.column, column);
    }

    __device__ __forceinline__ void put(const float (&sums)[NARROW_VALUES], const Segment& s) const {
        const bool whole = s.first == 0 && s.last == shares.columns;
        const int height = a.gradient.chunk.height, depth = a.gradient.features.depth;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const int row = in_chunk(s, row_of(q));
            if (row >= height) continue;
            float* out = whole ? a.out + row * a.out_stride
                               : a.parts + (slot(shares, blockIdx.x, s.row) * SIDE + row % SIDE) * SIDE;
#pragma unroll
            for (int i = 0; i < NARROW_COLUMNS / 4; ++i) {
                const int column = 8 * (i / 2) + 2 * (lane & 3) + i % 2;
                const float value = sums[4 * (i / 2) + 2 * q + i % 2];
                if (column < depth) out[column] = whole && !a.fresh ? out[column] + value : value;
            }
        }
    }
};

}  // namespace narrow_rows

template <class T, int MASK>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    narrow_gradient_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
                         const __grid_constant__ NarrowGradientArguments a) {
    using namespace narrow_rows;
    const GradientArguments& g = a.gradient;
    const int exponent = exponent_of(g);
    run<GradientConsumer<T, MASK>>(rows, columns, g.chunk, a, [&](GradientColumns<MASK>& to, int tile, int lane) {
        to.bring(g, exponent, tile, lane);
    });
}

// Adds the sums of tile rows that several blocks share, in the order of the blocks. A thread takes one feature of a row.
extern "C" __global__ void __launch_bounds__(256) narrow_join(const __grid_constant__ NarrowGradientArguments a) {
    using namespace narrow_rows;
    constexpr int LINES_A_TURN = 256 / SIDE;
    const Shares shares(a.gradient.chunk, a.blocks);
    const long long row = blockIdx.x / JOINS, first = shares.block_of(row * shares.columns);
    const long long last = shares.block_of((row + 1) * shares.columns - 1);
    const int column = threadIdx.x % SIDE;
    const int start = blockIdx.x % JOINS * JOINED_LINES + threadIdx.x / SIDE;
    if (first == last || column >= a.gradient.features.depth) return;
    const int left = a.gradient.chunk.height - static_cast<int>(row) * SIDE;
    float sums[JOINED_LINES / LINES_A_TURN] = {};
    for (long long block = first; block <= last; ++block) {
        const float* part =
            a.parts + slot(shares, block, row) * SIDE * SIDE + column;
#pragma unroll
        for (int i = 0; i < JOINED_LINES / LINES_A_TURN; ++i) {
            const int line = start + i * LINES_A_TURN;
            if (line < left) sums[i] += part[line * SIDE];
        }
    }
#pragma unroll
    for (int i = 0; i < JOINED_LINES / LINES_A_TURN; ++i) {
        const int line = start + i * LINES_A_TURN;
        if (line >= left) continue;
        float* out = a.out + (row * SIDE + line) * a.out_stride + column;
        *out = a.fresh ? sums[i] : *out + sums[i];
    }
}

}  // namespace contrastile
