// The rows' gradient: scale times its complete sums, rounded once, and their inner product with the rows.
#include "features.cuh"

namespace contrastile {

// The block that finishes last adds the parts of all blocks, in their order.
__device__ __forceinline__ void add_parts(const FinalizeRowsArguments& a, double part, double (&buffer)[8]) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        a.parts[a.first + blockIdx.x] = part;
        __threadfence();
        last = atomicAdd(&a.plan->blocks_done, 1) == a.all_blocks - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    double sum = 0.0;
    // bypass L1, because other multiprocessors wrote the parts
#pragma unroll 4
    for (long long i = threadIdx.x; i < a.all_blocks; i += THREADS) sum += __ldcg(a.parts + i);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) buffer[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0.0;
    for (int w = 0; w < 8; ++w) sum += buffer[w];
    *a.inner = sum;
}

// What the products lack at row i's positive, because G was rounded there: G - rounded G, times the dot.
//
// A row's entry there is as large as all its others together, and the roundings may have one sign, while inner is a sum
// that cancels: without this part its error would be up to 60 times as large.
template <class T>
__device__ __forceinline__ double lost_at_positive(const FinalizeRowsArguments& a, long long i) {
    const float g = a.entries[i], scale = *a.scale;
    if (g == 0.0f || scale == 0.0f) return 0.0;
    float rounded = widen(narrow<T>(g));
    if (a.row_kept != nullptr && a.plan->kept) {
        // as kept_positives and weighted_sm90 have it
        const float factor = a.row_kept[i] + a.column_kept[a.positives[i]];
        rounded = widen(narrow<T>(widen(narrow<T>(g / factor)) * factor));
    }
    return static_cast<double>(g - rounded) * (a.logits[i] - a.plan->bias) / scale;
}

// out = scale sums / gradient_scale, and inner = sum of <features_i, sums_i> / gradient_scale over the rows of all chunks.
//
// The shares of sums are read once and added in their order. Inner products add eight products at a time in float32 and
// these in double. gradient_scale is a power of two. With entries, inner is of a G that is not rounded at positives.
template <class T>
__global__ void __launch_bounds__(256) finalize_rows(const __grid_constant__ FinalizeRowsArguments a) {
    static_assert(LINES == 8, "a warp takes one row");
    __shared__ double parts[8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float unscale = 1.0f / a.plan->gradient_scale;
    const float factor = *a.scale;
    double inner = 0.0;
    const long long i = static_cast<long long>(blockIdx.x) * LINES + warp;
    if (i < a.m) {
        const Row<float> sums = row_of<float>(a.sums, i);
        const Row<T> features = row_of<T>(a.features, i);
        T* out = const_cast<T*>(static_cast<const T*>(a.out.data)) + i * a.out.row_stride;
        long long tail = 0;
        if (sums.wide() && features.wide() && reinterpret_cast<unsigned long long>(out) % 16 == 0) {
            tail = a.depth / 8 * 8;
#pragma unroll 2
            for (long long k = 8 * lane; k < tail; k += 256) {
                float x[8], y[8];
                sums.eight(k, x);
#pragma unroll 1
                for (long long s = 1; s < a.shares; ++s) {
                    row_of<float>(a.sums, s * a.m + i).eight(k, y);
#pragma unroll
                    for (int e = 0; e < 8; ++e) x[e] += y[e];
                }
                features.eight(k, y);
                float eight = 0.0f;
                struct alignas(16) Pack {
                    T at[16 / sizeof(T)];
                } pack[8 * sizeof(T) / 16];
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    x[e] *= unscale;
                    eight = e == 0 ? x[e] * y[e] : fmaf(x[e], y[e], eight);
                    pack[e * sizeof(T) / 16].at[e % (16 / sizeof(T))] = narrow<T>(x[e] * factor);
                }
                inner += eight;
#pragma unroll
                for (int p = 0; p < 8 * sizeof(T) / 16; ++p) reinterpret_cast<Pack*>(out + k)[p] = pack[p];
            }
        }
        for (long long k = tail + lane; k < a.depth; k += 32) {
            float x = sums.at(k);
#pragma unroll 1
            for (long long s = 1; s < a.shares; ++s) x += row_of<float>(a.sums, s * a.m + i).at(k);
            x *= unscale;
            inner += x * features.at(k);
            out[k] = narrow<T>(x * factor);
        }
        if (a.entries != nullptr && lane == 0) inner += unscale * lost_at_positive<T>(a, i);
    }
    inner = warp_sum(inner);
    if (lane == 0) parts[warp] = inner;
    __syncthreads();
    inner = 0.0;
    for (int w = 0; w < 8; ++w) inner += parts[w];
    // the last block reuses `parts`: all its threads have read them before the barrier in add_parts
    add_parts(a, inner, parts);
}

}  // namespace contrastile
