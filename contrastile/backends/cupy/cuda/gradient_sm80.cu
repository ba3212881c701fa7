// gradient_scale * G of one chunk, rounded once to the features' type, for sm_80 and later.
//
// gradient_sm80<P, MASK, STAGES>: grid, threads and shared memory as forward_sm80. The plan chooses the exponent
// (epilogue_gradient.cuh) on the device. G of a positive is float32 until it is rounded.
#include "epilogue_gradient.cuh"
#include "tile_sm80.cuh"

namespace contrastile {

struct SideStorage {
    float first[SIDE], weight[SIDE], taken[SIDE];  // of Side

    __device__ __forceinline__ void put(const Side& side) {
        first[threadIdx.x] = side.first;
        weight[threadIdx.x] = side.weight;
        taken[threadIdx.x] = side.taken;
    }
};

struct GradientStorage {
    PairStorage pairs;
    SideStorage row, column;
    float entry[SIDE];  // G of the rows' positives by index
};

static_assert(sizeof(GradientStorage) <= STORAGE_BYTES);

__device__ __forceinline__ float2 two(const float* list, int at) { return *reinterpret_cast<const float2*>(list + at); }

// Turns the dots of strip s into G, except for positives by index. CERTAIN: plan->certain. `masked`: whether MASK affects
// some pair of the tile.
template <int EXPONENT, int MASK, bool CERTAIN>
__device__ __forceinline__ void strip_of_g(float (&value)[4 * GROUPS], int s, const GradientStorage& storage,
                                           const GradientArguments& a, Tile at, const Thread& thread, float alpha,
                                           float reference, bool masked) {
    float first[2], weight[2], taken[2];
    PairRow rows[2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        const int row = thread.row(s, q);
        first[q] = storage.row.first[row];
        weight[q] = storage.row.weight[row];
        taken[q] = storage.row.taken[row];
        rows[q] = pair_row<MASK>(storage.pairs, thread, s, q);
    }
    const int column = thread.column();
    const auto limits = limits_of<MASK>(storage.pairs, thread, alpha);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const float2 column_first = two(storage.column.first, column + 8 * g);
        const float2 column_weight = two(storage.column.weight, column + 8 * g);
        const float2 column_taken = two(storage.column.taken, column + 8 * g);
        const longlong2 id = pair_of_ids<MASK>(storage.pairs.column_ids + column, g);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int q = e >> 1, c = e & 1;
            const float dot = value[4 * g + e];
            float x = admitted_gradient<EXPONENT, LIMITED<MASK>>(
                dot, alpha, reference, first[q], weight[q], c ? column_first.y : column_first.x,
                c ? column_weight.y : column_weight.x, limits.beyond_row(dot, s, 4 * g + e),
                limits.beyond_column(dot, s, 4 * g + e));
            if (MASK >= EXCLUSIONS && masked) {
                const PairStatus status = pair_status<MASK>(rows[q], 8 * g + c, c ? id.y : id.x);
                if (!status.admitted) x = 0.0f;
                if (MASK == TARGET && !CERTAIN && status.positive) x -= taken[q] + (c ? column_taken.y : column_taken.x);
                // a pair outside the chunk may look positive: nothing may be read for it
                if (CERTAIN && status.positive && at.row + thread.row(s, q) < a.chunk.height &&
                    at.column + column + 8 * g + c < a.chunk.width)
                    x = certain_gradient(dot, alpha, a.row, a.chunk.row + at.row + thread.row(s, q)) +
                        certain_gradient(dot, alpha, a.column, a.chunk.column + at.column + column + 8 * g + c);
            }
            value[4 * g + e] = x;
        }
    }
}

// Writes G of positives by index to strip s. A row has at most one; most tiles have none.
__device__ __forceinline__ void put_positives(float (&value)[4 * GROUPS], int s, const GradientStorage& storage,
                                               const Thread& thread) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        const int row = thread.row(s, q), named = storage.pairs.named[row].x;
        if (!__any_sync(WHOLE_WARP, named >= 0)) continue;
        const float entry = storage.entry[row];
        const int column = named - thread.column();  // negative numbers match none
#pragma unroll
        for (int g = 0; g < GROUPS; ++g)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (column == 8 * g + c) value[4 * g + 2 * q + c] = entry;
    }
}

template <int EXPONENT, int MASK, bool CERTAIN, class T>
__device__ __forceinline__ void write_g(Accumulators& dots, const GradientStorage& storage, const GradientArguments& a,
                                        Tile at, const Thread& thread) {
    const bool masked = MASK >= EXCLUSIONS && touched<MASK>(storage.pairs);
#pragma unroll
    for (int s = 0; s < STRIPS; ++s) {
        strip_of_g<EXPONENT, MASK, CERTAIN>(dots[s], s, storage, a, at, thread, a.plan->alpha, a.plan->reference,
                                            masked);
        if (MASK != TARGET) put_positives(dots[s], s, storage, thread);
        store_strip(dots[s], s, static_cast<T*>(a.g), a.g_stride, a.chunk, at, thread);
        // no data depends on this barrier: it makes the compiler reload the columns for the next strip instead of spilling
        __syncwarp();
    }
}

// `certain`: plan->certain; `exponent` is not SHARED then.
template <int MASK, class T>
__device__ __forceinline__ void choose_g(int exponent, bool certain, Accumulators& dots, const GradientStorage& storage,
                                         const GradientArguments& a, Tile at, const Thread& thread) {
    constexpr bool CERTAIN = MASK == TARGET;
    if (exponent == SHARED)
        write_g<SHARED, MASK, false, T>(dots, storage, a, at, thread);
    else if (CERTAIN && certain && exponent == ROWS)
        write_g<ROWS, MASK, CERTAIN, T>(dots, storage, a, at, thread);
    else if (CERTAIN && certain)
        write_g<BOTH, MASK, CERTAIN, T>(dots, storage, a, at, thread);
    else if (exponent == ROWS)
        write_g<ROWS, MASK, false, T>(dots, storage, a, at, thread);
    else
        write_g<BOTH, MASK, false, T>(dots, storage, a, at, thread);
}

template <class P, int MASK, int STAGES>
__global__ void __launch_bounds__(BLOCK, 2) gradient_sm80(const __grid_constant__ GradientArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    using T = typename P::Type;
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(memory));
    GradientStorage& storage = *reinterpret_cast<GradientStorage*>(memory + STAGES * 2 * STEP_SIDE);
    const Thread thread;
    const Order order(a.chunk, a.features.band);
    const int exponent = exponent_of(a);
    Stream<STAGES> stream(a.features, a.chunk, sizeof(T), shared);
    for (int tile = blockIdx.x; tile < order.tiles(); tile += gridDim.x) {
        const Tile at = order.at(tile);
        const int row = at.row + threadIdx.x, column = at.column + threadIdx.x;
        store_pairs<MASK>(storage.pairs, a.pairs, a.chunk, at);
        storage.row.put(row < a.chunk.height ? side_of<MASK>(a.row, a.chunk.row + row, exponent) : no_side());
        storage.column.put(column < a.chunk.width ? side_of<MASK>(a.column, a.chunk.column + column, exponent)
                                               : no_side());
        if (MASK != TARGET && a.entries != nullptr && row < a.chunk.height)
            storage.entry[threadIdx.x] = a.entries[a.chunk.row + row];
        Accumulators dots;
        tile_of_dots<P>(stream, thread, dots);
        choose_g<MASK, T>(exponent, a.plan->certain != 0, dots, storage, a, at, thread);
        // the next tile overwrites the storage
        __syncthreads();
    }
}

}  // namespace contrastile
