// The rows' gradient of features of at most 128, without a G in memory, for sm_90a: a tile of G goes from the registers
// that it is made in to the tensor cores.
//
// fused_sm90<T, MASK>: adds G columns to out (or writes it). Grid of `blocks` blocks, at most one for each tile, of
// PIPELINE_THREADS threads, fused_sm90_shared bytes of dynamic shared memory. fused_join: JOINS blocks for each tile row,
// 256 threads; then out is complete.
//
// The chunk is cut into tiles of 128 x 128, counted along the tile rows. Each block takes an equal share of them, which
// are neighbours: whole tile rows, and parts of its first and of its last. Sums of a part go to `parts`, and fused_join
// adds them in the order of the blocks.
//
// In a block one thread, the producer, copies the rows of each tile row and feeds a ring of stages, each the 128 columns of
// a tile; three warps beside it bring the columns' vectors. Each of two consumers takes 64 rows. Columns are multiplied twice
// from where they lie: with the rows, for the logits, and with G. While the tensor cores work on G columns of one tile,
// a consumer makes G of the next.
//
// Hazards:
// * A tile's G is registers that the tensor cores read: that of the next is made beside it, and takes its place only when
//   they have done.
// * Columns past the block's come as zeros, but 2^(0 - r) may be infinite: there G is masked.
#include "epilogue_gradient.cuh"
#include "pair_storage_sm90.cuh"

namespace contrastile {

namespace fused {

constexpr int SIDE = FUSED_SIDE, JOINS = FUSED_JOINS;
constexpr int JOINED_LINES = SIDE / JOINS;
constexpr int HALF = 64, CONSUMER_ROWS = 64, PARTS = SIDE / 16, STAGES = 4, VECTOR_WARPS = 3;
constexpr int HALF_BYTES = SIDE * HALF * 2, TILE_BYTES = 2 * HALF_BYTES;  // 128 rows or columns of 64 features, of 128
constexpr int OF_PRODUCERS = 40, OF_CONSUMERS = 232;  // registers of a thread

template <int MASK>
struct alignas(16) ColumnVectors {
    static constexpr bool IDS = MASK >= DROP;
    float first[SIDE], weight[SIDE], taken[MASK == TARGET ? SIDE : 4];
    long long ids[IDS ? SIDE : 2];
    unsigned low, high;  // least and largest folded id
};

// Of the rows of one consumer; columns are those of the block, -1 for none.
struct RowVectors {
    int positive[CONSUMER_ROWS], excluded[CONSUMER_ROWS];
    float entry[CONSUMER_ROWS], taken[CONSUMER_ROWS];
    alignas(16) long long id[CONSUMER_ROWS];
};

template <int MASK>
struct Shared {
    static constexpr int COLUMNS_AT = 2 * TILE_BYTES, VECTORS_AT = COLUMNS_AT + STAGES * TILE_BYTES;
    static constexpr int ROWS_AT = VECTORS_AT + STAGES * sizeof(ColumnVectors<MASK>);
    static constexpr int FULL_AT = ROWS_AT + 2 * sizeof(RowVectors), EMPTY_AT = FULL_AT + 8 * STAGES;
    static constexpr int ROWS_FULL_AT = EMPTY_AT + 8 * STAGES, ROWS_EMPTY_AT = ROWS_FULL_AT + 16;
    static constexpr int BYTES = ROWS_EMPTY_AT + 16 + SWIZZLE_ATOM;
    static_assert(BYTES <= 232448, "more shared memory than a block may have");
};

// Tiles of the chunk, and which block has which.
struct Shares {
    long long rows, columns, blocks;  // tile rows, tile columns

    __device__ __forceinline__ explicit Shares(const FusedArguments& a)
        : rows((a.gradient.chunk.height + SIDE - 1) / SIDE),
          columns((a.gradient.chunk.width + SIDE - 1) / SIDE),
          blocks(a.blocks) {}

    __device__ __forceinline__ long long begin(long long block) const { return block * (rows * columns) / blocks; }
    __device__ __forceinline__ long long block_of(long long tile) const {
        return ((tile + 1) * blocks - 1) / (rows * columns);
    }
    // Where the sums of a block's part of a tile row lie.
    __device__ __forceinline__ long long slot(long long block, long long row) const {
        return 2 * block + (begin(block) / columns == row ? 0 : 1);
    }
};

// The part of one tile row that a block has: tile columns [first, last).
struct Segment {
    int number, row, first, last;
};

template <class Do>
__device__ __forceinline__ void each_segment(const Shares& shares, Do act) {
    const long long end = shares.begin(blockIdx.x + 1);
    int number = 0;
    for (long long tile = shares.begin(blockIdx.x); tile < end; ++number) {
        const int row = static_cast<int>(tile / shares.columns), first = static_cast<int>(tile - row * shares.columns);
        const int last = static_cast<int>(min(shares.columns, first + end - tile));
        act(Segment{number, row, first, last});
        tile += last - first;
    }
}

template <int MASK>
__device__ __forceinline__ void produce(unsigned base, const TensorMap& rows, const TensorMap& columns,
                                        const FusedArguments& a, const Shares& shares) {
    using L = Shared<MASK>;
    Cursor<STAGES> at;
    at.parity = 1;  // the phase before the first counts as complete: the ring starts empty
    each_segment(shares, [&](const Segment& s) {
        const int buffer = s.number & 1;
        const unsigned rows_full = base + L::ROWS_FULL_AT + 8 * buffer;
        barrier_wait(base + L::ROWS_EMPTY_AT + 8 * buffer, ~s.number >> 1 & 1);
        barrier_expect(rows_full, TILE_BYTES);
#pragma unroll
        for (int half = 0; half < 2; ++half)
            copy_in(base + buffer * TILE_BYTES + half * HALF_BYTES, rows, half * HALF,
                    static_cast<int>(a.gradient.chunk.row) + s.row * SIDE, rows_full);
        for (int column = s.first; column < s.last; ++column) {
            const unsigned full = base + L::FULL_AT + 8 * at.stage;
            const unsigned to = base + L::COLUMNS_AT + at.stage * TILE_BYTES;
            barrier_wait(base + L::EMPTY_AT + 8 * at.stage, at.parity);
            barrier_expect(full, TILE_BYTES);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                copy_in(to + half * HALF_BYTES, columns, half * HALF, column * SIDE, full);
            at.step();
        }
    });
}

// The columns' vectors of every VECTOR_WARPS-th stage, by one warp: what it reads is a long way off.
template <int MASK>
__device__ __forceinline__ void produce_vectors(unsigned base, ColumnVectors<MASK>* stages, const FusedArguments& a,
                                                const Shares& shares, int warp, int lane) {
    using L = Shared<MASK>;
    const GradientArguments& g = a.gradient;
    const int exponent = exponent_of(g);
    Cursor<STAGES> at;
    at.parity = 1;
    int turn = 0;
    each_segment(shares, [&](const Segment& s) {
        for (int tile = s.first; tile < s.last; ++tile, at.step()) {
            const bool mine = turn == warp;
            turn = turn + 1 == VECTOR_WARPS ? 0 : turn + 1;
            if (!mine) continue;
            barrier_wait(base + L::EMPTY_AT + 8 * at.stage, at.parity);
            ColumnVectors<MASK>& to = stages[at.stage];
            unsigned low = 0xffffffffu, high = 0;
#pragma unroll
            for (int i = 0; i < SIDE / 32; ++i) {
                const int here = lane + 32 * i, column = tile * SIDE + here;
                const bool inside = column < g.chunk.width;
                if (exponent != ROWS) {
                    const Side side = inside ? side_of<MASK>(g.column, column, exponent) : no_side();
                    to.first[here] = side.first;
                    to.weight[here] = side.weight;
                    if constexpr (MASK == TARGET) to.taken[here] = side.taken;
                }
                if constexpr (MASK >= DROP) {
                    const long long id = inside ? g.pairs.column_ids[column] : 0;
                    to.ids[here] = id;
                    low = min(low, folded(id));
                    high = max(high, folded(id));
                }
            }
            if constexpr (MASK >= DROP) {
                low = __reduce_min_sync(WHOLE_WARP, low);
                high = __reduce_max_sync(WHOLE_WARP, high);
                if (lane == 0) {
                    to.low = low;
                    to.high = high;
                }
            }
            barrier_arrive(base + L::FULL_AT + 8 * at.stage);
        }
    });
}

// One consumer: 64 rows of each tile.
template <class T, int MASK>
struct Consumer {
    using L = Shared<MASK>;
    static constexpr bool IDS = MASK >= DROP;

    const FusedArguments& a;
    const Shares& shares;
    unsigned base;  // shared memory
    const ColumnVectors<MASK>* stages;
    RowVectors& rows;
    int consumer, warp, lane, exponent;
    float alpha, reference;

    // of the tile row at hand
    float first[2], weight[2];  // of the thread's two rows
    int named;                  // of one of the warp's rows: the column of its positive (lanes under 16) or exclusion
    unsigned low, high;         // least and largest folded id of the warp's rows

    __device__ __forceinline__ void run() {
        Cursor<STAGES> at;
        each_segment(shares, [&](const Segment& s) { part_of_row(s, at); });
    }

  private:
    __device__ __forceinline__ int row_of(int q) const { return 16 * warp + lane / 4 + 8 * q; }

    // Number inside the chunk of a row of this consumer's.
    __device__ __forceinline__ int in_chunk(const Segment& s, int row) const {
        return s.row * SIDE + consumer * CONSUMER_ROWS + row;
    }

    __device__ __forceinline__ void fetch_rows(const Segment& s) {
        const GradientArguments& g = a.gradient;
        consumer_sync(consumer);  // all have left the row before
        const int mine = consumer_thread(), number = in_chunk(s, mine);
        if (mine < CONSUMER_ROWS) {
            const bool inside = number < g.chunk.height;
            const long long i = g.chunk.row + number;
            int positive = -1, excluded = -1;
            if (inside && MASK != TARGET && g.pairs.positives != nullptr)
                positive = inside_tile(g.pairs.positives[i], 0, g.chunk.width);
            if (inside && MASK != PLAIN && g.pairs.excluded != nullptr)
                excluded = inside_tile(g.pairs.excluded[i], 0, g.chunk.width);
            rows.positive[mine] = positive == excluded ? -1 : positive;  // an excluded pair is not positive
            rows.excluded[mine] = excluded;
            if (MASK == TARGET)
                rows.taken[mine] = inside ? g.row.taken[i] : 0.0f;
            else
                rows.entry[mine] = inside && g.entries != nullptr ? g.entries[i] : 0.0f;
            if (IDS) rows.id[mine] = inside ? g.pairs.row_ids[i] : 0;
        }
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const int row = in_chunk(s, row_of(q));
            const Side side = row < g.chunk.height ? side_of<PLAIN>(g.row, g.chunk.row + row, exponent) : no_side();
            first[q] = side.first;
            weight[q] = side.weight;
        }
        consumer_sync(consumer);
        const int one = 16 * warp + lane % 16;
        named = lane < 16 ? rows.positive[one] : rows.excluded[one];
        if (IDS) {
            const unsigned id = folded(rows.id[one]);
            low = __reduce_min_sync(WHOLE_WARP, id);
            high = __reduce_max_sync(WHOLE_WARP, id);
        }
    }

    // Whether a pair of this warp's rows and of the tile is masked or positive. It may be a false alarm: ids are compared
    // folded to 32 bits. Ids that are sorted, as labels are, tell most tiles apart by their ranges.
    __device__ __forceinline__ bool touched(const ColumnVectors<MASK>& of, int tile) const {
        bool found = static_cast<unsigned>(named - tile * SIDE) < SIDE;
        if constexpr (IDS)
            if (of.low <= high && of.high >= low) {
                unsigned mine[SIDE / 32];
#pragma unroll
                for (int i = 0; i < SIDE / 32; ++i) mine[i] = folded(of.ids[lane + 32 * i]);
#pragma unroll
                for (int row = 0; row < 16; ++row) {
                    const unsigned id = folded(rows.id[16 * warp + row]);
#pragma unroll
                    for (int i = 0; i < SIDE / 32; ++i) found = found || id == mine[i];
                }
            }
        return __any_sync(WHOLE_WARP, found) || (tile + 1) * SIDE > a.gradient.chunk.width;
    }

    __device__ __forceinline__ void begin_logits(unsigned rows_at, int stage, float (&x)[NARROW_VALUES]) const {
        const unsigned columns = operand(base + L::COLUMNS_AT + stage * TILE_BYTES), mine = operand(rows_at);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const unsigned on = part / 4 * (HALF_BYTES >> 4) + 2 * (part % 4);
            product_narrow<T>(x, descriptor(mine + on), descriptor(columns + on), part > 0);
        }
        products_commit();
    }

    __device__ __forceinline__ void begin_sums(const unsigned (&g)[PARTS][4], int stage, bool add,
                                               float (&sums)[NARROW_VALUES]) const {
        const unsigned columns = operand_across<HALF_BYTES>(base + L::COLUMNS_AT + stage * TILE_BYTES);
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            product_narrow_across<T>(sums, g[part], descriptor(columns + 128 * part), part > 0 || add);
        products_commit();
    }

    // The registers of the products that have just ended. Unless they are named here, the compiler takes them for free as
    // soon as the products have begun, and makes the next tile's G in them.
    static __device__ __forceinline__ void keep_until_here(unsigned (&g)[PARTS][4]) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            asm volatile("" : "+r"(g[part][0]), "+r"(g[part][1]), "+r"(g[part][2]), "+r"(g[part][3])::"memory");
    }

    // Both consumers' warps arrive.
    __device__ __forceinline__ void release(unsigned barrier) const {
        if (lane == 0) barrier_arrive(barrier);
    }

    __device__ __forceinline__ void part_of_row(const Segment& s, Cursor<STAGES>& now) {
        fetch_rows(s);
        const int buffer = s.number & 1;
        const unsigned rows_at = base + buffer * TILE_BYTES + consumer * CONSUMER_ROWS * 128;
        float x[NARROW_VALUES], sums[NARROW_VALUES];
        unsigned g[PARTS][4] = {}, next[PARTS][4];
        barrier_wait(base + L::ROWS_FULL_AT + 8 * buffer, s.number >> 1 & 1);
        barrier_wait(base + L::FULL_AT + 8 * now.stage, now.parity);
        int before = now.stage;
        // the logits of a tile beside the sums of the one before: of none at first, and at last logits that nobody reads
        for (int tile = s.first; tile <= s.last; ++tile) {
            products_begin();
            begin_logits(rows_at, now.stage, x);
            begin_sums(g, before, tile > s.first, sums);
            products_done<1>();
            if (tile < s.last) make(x, s, tile, now.stage, next);
            products_done<0>();
            keep_until_here(g);
            if (tile > s.first) release(base + L::EMPTY_AT + 8 * before);
            if (tile == s.last) break;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int i = 0; i < 4; ++i) g[part][i] = next[part][i];
            before = now.stage;
            if (tile + 1 == s.last) continue;
            now.step();
            barrier_wait(base + L::FULL_AT + 8 * now.stage, now.parity);
        }
        release(base + L::ROWS_EMPTY_AT + 8 * buffer);
        now.step();
        put(sums, s);
    }

    // G of a tile from its dots, as the tensor cores take it.
    __device__ __forceinline__ void make(const float (&x)[NARROW_VALUES], const Segment& s, int tile, int stage,
                                         unsigned (&g)[PARTS][4]) const {
        const ColumnVectors<MASK>& of = stages[stage];
        if (!touched(of, tile)) {
            if (exponent == SHARED)
                fill<SHARED, false, false>(x, s, tile, of, g);
            else if (exponent == ROWS)
                fill<ROWS, false, false>(x, s, tile, of, g);
            else
                fill<BOTH, false, false>(x, s, tile, of, g);
        } else if (MASK == TARGET && a.gradient.plan->certain) {
            if (exponent == ROWS)
                fill<ROWS, true, MASK == TARGET>(x, s, tile, of, g);
            else
                fill<BOTH, true, MASK == TARGET>(x, s, tile, of, g);
        } else if (exponent == SHARED) {
            fill<SHARED, true, false>(x, s, tile, of, g);
        } else if (exponent == ROWS) {
            fill<ROWS, true, false>(x, s, tile, of, g);
        } else {
            fill<BOTH, true, false>(x, s, tile, of, g);
        }
    }

    template <int EXPONENT, bool MASKED, bool CERTAIN>
    __device__ __forceinline__ void fill(const float (&x)[NARROW_VALUES], const Segment& s, int tile,
                                         const ColumnVectors<MASK>& of, unsigned (&g)[PARTS][4]) const {
        const int own = 2 * (lane & 3);  // the thread's first column
        PairRow pair[2];
        if (MASKED)
#pragma unroll
            for (int q = 0; q < 2; ++q) {
                const int row = row_of(q), start = tile * SIDE + own;
                // columns of other tiles are no 8 g + c of this
                pair[q] = PairRow{rows.positive[row] < 0 ? -1 : rows.positive[row] - start,
                                  rows.excluded[row] < 0 ? -1 : rows.excluded[row] - start, IDS ? rows.id[row] : 0};
            }
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int group = 2 * part + h;
                const float2 none = make_float2(0.0f, 0.0f);
                const float2 column_first = EXPONENT == ROWS ? none : pair_at(of.first, group);
                const float2 column_weight = EXPONENT == BOTH ? pair_at(of.weight, group) : none;
                const longlong2 id = MASKED ? pair_of_ids<MASK>(of.ids + (IDS ? own : 0), group) : make_longlong2(0, 0);
                float value[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int q = e >> 1, c = e & 1, column = 8 * group + c;
                    const float dot = x[4 * group + e];
                    value[e] = attraction<EXPONENT>(dot, alpha, reference, first[q], weight[q],
                                                    c ? column_first.y : column_first.x,
                                                    c ? column_weight.y : column_weight.x);
                    if (!MASKED) continue;
                    const Standing found = standing<MASK>(pair[q], column, c ? id.y : id.x);
                    if (!found.admitted || tile * SIDE + own + column >= a.gradient.chunk.width) {
                        value[e] = 0.0f;
                    } else if (found.positive) {
                        if constexpr (CERTAIN)
                            value[e] = certain_positive(dot, in_chunk(s, row_of(q)), tile * SIDE + own + column);
                        else if constexpr (MASK == TARGET)
                            value[e] -= rows.taken[row_of(q)] + (EXPONENT == ROWS ? 0.0f : of.taken[own + column]);
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

    // What lies outside the chunk may look positive: nothing may be read for it.
    __device__ __forceinline__ float certain_positive(float dot, int row, int column) const {
        const GradientArguments& g = a.gradient;
        if (row >= g.chunk.height) return 0.0f;
        return certain_part(dot, alpha, g.row, g.chunk.row + row) + certain_part(dot, alpha, g.column, column);
    }

    __device__ __forceinline__ void put(const float (&sums)[NARROW_VALUES], const Segment& s) const {
        const bool whole = s.first == 0 && s.last == shares.columns;
        const int height = a.gradient.chunk.height, depth = a.gradient.features.depth;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const int row = in_chunk(s, row_of(q));
            if (row >= height) continue;
            float* out = whole ? a.out + row * a.out_stride
                               : a.parts + (shares.slot(blockIdx.x, s.row) * SIDE + row % SIDE) * SIDE;
#pragma unroll
            for (int i = 0; i < NARROW_COLUMNS / 4; ++i) {
                const int column = 8 * (i / 2) + 2 * (lane & 3) + i % 2;
                const float value = sums[4 * (i / 2) + 2 * q + i % 2];
                if (column < depth) out[column] = whole && !a.fresh ? out[column] + value : value;
            }
        }
    }
};

}  // namespace fused

extern "C" __device__ const int fused_sm90_shared = fused::Shared<TARGET>::BYTES;

template <class T, int MASK>
__global__ void __launch_bounds__(PIPELINE_THREADS, 1)
    fused_sm90(const __grid_constant__ TensorMap rows, const __grid_constant__ TensorMap columns,
               const __grid_constant__ FusedArguments a) {
    using L = fused::Shared<MASK>;
    extern __shared__ unsigned char dynamic[];
    unsigned char* memory = dynamic + (-shared_address(dynamic) & (SWIZZLE_ATOM - 1));
    const unsigned base = shared_address(memory);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    auto* vectors = reinterpret_cast<fused::ColumnVectors<MASK>*>(memory + L::VECTORS_AT);
    if (threadIdx.x == 0) {
        for (int s = 0; s < fused::STAGES; ++s) {
            barrier_init(base + L::FULL_AT + 8 * s, 1 + 32);  // the producer, then the bytes; a warp's vectors
            barrier_init(base + L::EMPTY_AT + 8 * s, 2 * CONSUMER_WARPS);
        }
        for (int buffer = 0; buffer < 2; ++buffer) {
            barrier_init(base + L::ROWS_FULL_AT + 8 * buffer, 1);
            barrier_init(base + L::ROWS_EMPTY_AT + 8 * buffer, 2 * CONSUMER_WARPS);
        }
        publish_barriers();
    }
    __syncthreads();
    const fused::Shares shares(a);
    if (warp < CONSUMER_WARPS) {
        give_registers<fused::OF_PRODUCERS>();
        if (threadIdx.x == 0) fused::produce<MASK>(base, rows, columns, a, shares);
        if (warp > 0) fused::produce_vectors<MASK>(base, vectors, a, shares, warp - 1, lane);
    } else {
        take_registers<fused::OF_CONSUMERS>();
        const int consumer = warp / CONSUMER_WARPS - 1;
        auto& of_rows = reinterpret_cast<fused::RowVectors*>(memory + L::ROWS_AT)[consumer];
        const Plan& plan = *a.gradient.plan;
        fused::Consumer<T, MASK> self{a, shares, base, vectors, of_rows, consumer, warp % CONSUMER_WARPS, lane,
                                      exponent_of(a.gradient), plan.alpha, plan.reference, {}, {}, -1, 0, 0};
        self.run();
    }
}

// Sums of tile rows that several blocks share, added in the order of the blocks. A thread takes one feature of a row.
extern "C" __global__ void __launch_bounds__(256) fused_join(const __grid_constant__ FusedArguments a) {
    constexpr int LINES_A_TURN = 256 / fused::SIDE;
    const fused::Shares shares(a);
    const long long row = blockIdx.x / fused::JOINS, first = shares.block_of(row * shares.columns);
    const long long last = shares.block_of((row + 1) * shares.columns - 1);
    const int column = threadIdx.x % fused::SIDE, start = blockIdx.x % fused::JOINS * fused::JOINED_LINES;
    if (first == last || column >= a.gradient.features.depth) return;
    float sums[fused::JOINED_LINES / LINES_A_TURN] = {};
    for (long long block = first; block <= last; ++block) {
        const float* part = a.parts + shares.slot(block, row) * fused::SIDE * fused::SIDE + column;
#pragma unroll
        for (int i = 0; i < fused::JOINED_LINES / LINES_A_TURN; ++i)
            sums[i] += part[(start + i * LINES_A_TURN + threadIdx.x / fused::SIDE) * fused::SIDE];
    }
#pragma unroll
    for (int i = 0; i < fused::JOINED_LINES / LINES_A_TURN; ++i) {
        const long long at = row * fused::SIDE + start + i * LINES_A_TURN + threadIdx.x / fused::SIDE;
        if (at >= a.gradient.chunk.height) continue;
        float* out = a.out + at * a.out_stride + column;
        *out = a.fresh ? sums[i] : *out + sums[i];
    }
}

}  // namespace contrastile
