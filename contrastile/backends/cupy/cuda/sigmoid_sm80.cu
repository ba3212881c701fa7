// The sigmoid loss of one chunk, value and gradient_scale * G in one pass over the tiles of X, for sm_80 and later.
//
// sigmoid_sm80<P, MASK, STAGES>: grid, threads and shared memory as forward_sm80. If g is null, only the sums are computed.
#include "epilogue_sigmoid.cuh"
#include "tile_sm80.cuh"

namespace contrastile {

struct SigmoidStorage {
    PairStorage pairs;
    float weight[SIDE];                     // of the tile's rows, times gradient_scale
    float loss[2][SIDE], slope[2][SIDE];    // of the tile's rows, left and right warps
};

static_assert(sizeof(SigmoidStorage) <= STORAGE_BYTES);

// Sums of softplus(-z x) and of -z sigmoid(-z x) over a strip's columns inside the chunk, [q]; the dots become G.
// scale and bias: times log2 e.
template <int MASK>
__device__ __forceinline__ void strip_of_losses(float (&value)[4 * GROUPS], int s, const SigmoidStorage& storage,
                                                const Thread& thread, int columns, float scale, float bias,
                                                float (&loss)[2], float (&slope)[2]) {
    const PairRow rows[2] = {pair_row<MASK>(storage.pairs, thread, s, 0), pair_row<MASK>(storage.pairs, thread, s, 1)};
    const float weight[2] = {storage.weight[thread.row(s, 0)], storage.weight[thread.row(s, 1)]};
    AdditiveSums sums[2];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
        const longlong2 id = pair_of_ids<MASK>(storage.pairs.column_ids + thread.column(), g);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int q = e >> 1, column = 8 * g + (e & 1);
            const PairStatus status = pair_status<MASK>(rows[q], column, e & 1 ? id.y : id.x);
            const bool counts = status.admitted && column < columns;
            const float slope_of_pair =
                counts ? sums[q].add(fmaf(value[4 * g + e], scale, bias), status.positive, e & 1) : 0.0f;
            // a weight of 0 silences its row, whatever its logits
            value[4 * g + e] = weight[q] != 0.0f ? weight[q] * slope_of_pair : 0.0f;
        }
    }
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        loss[q] = row_total(sums[q].loss());
        slope[q] = row_total(sums[q].slope);
    }
}

template <class P, int MASK, int STAGES>
__global__ void __launch_bounds__(BLOCK, 2) sigmoid_sm80(const __grid_constant__ SigmoidArguments a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    using T = typename P::Type;
    const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(memory));
    SigmoidStorage& storage = *reinterpret_cast<SigmoidStorage*>(memory + STAGES * 2 * STEP_SIDE);
    const Thread thread;
    const Order order(a.chunk, a.features.band);
    const float scale = a.plan->alpha, bias = static_cast<float>(a.plan->bias * LOG2E);
    Stream<STAGES> stream(a.features, a.chunk, sizeof(T), shared);
    for (int tile = blockIdx.x; tile < order.tiles(); tile += gridDim.x) {
        const Tile at = order.at(tile);
        const int row = at.row + threadIdx.x;
        store_pairs<MASK>(storage.pairs, a.pairs, a.chunk, at);
        storage.weight[threadIdx.x] =
            row < a.chunk.height ? a.row_weight[a.chunk.row + row] * a.plan->gradient_scale : 0.0f;
        Accumulators dots;
        tile_of_dots<P>(stream, thread, dots);
        const int columns = a.chunk.width - at.column - thread.column();
#pragma unroll
        for (int s = 0; s < STRIPS; ++s) {
            float loss[2], slope[2];
            strip_of_losses<MASK>(dots[s], s, storage, thread, columns, scale, bias, loss, slope);
#pragma unroll
            for (int q = 0; q < 2; ++q)
                if (thread.lane % 4 == 0) {
                    storage.loss[thread.warp % 2][thread.row(s, q)] = loss[q];
                    storage.slope[thread.warp % 2][thread.row(s, q)] = slope[q];
                }
            if (a.g != nullptr) store_strip(dots[s], s, static_cast<T*>(a.g), a.g_stride, a.chunk, at, thread);
        }
        // the next writer has passed the stream's barriers, and so have all readers
        __syncthreads();
        if (row < a.chunk.height) {
            const long long to = at.column / SIDE * a.part_stride + row;
            a.loss_parts[to] = storage.loss[0][threadIdx.x] + storage.loss[1][threadIdx.x];
            a.slope_parts[to] = storage.slope[0][threadIdx.x] + storage.slope[1][threadIdx.x];
        }
    }
}

}  // namespace contrastile
