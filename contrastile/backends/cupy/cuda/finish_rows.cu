// The rows' gradient from its finished sums: scale times them, rounded once, and their inner products with the rows.
#include "features.cuh"

namespace contrastile {

// out = scale sums / FACTOR, and inner (blocks,) = sum over LINES rows of <features_i, sums_i> / FACTOR.
//
// sums is read once: eight products at a time in float32, their sums in double. FACTOR is a power of two.
template <class T>
__global__ void __launch_bounds__(256) finish_rows(const __grid_constant__ FinishRowsArguments a) {
    __shared__ double parts[8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first = static_cast<long long>(blockIdx.x) * LINES;
    const float whole = 1.0f / a.plan->factor;
    const float factor = *a.scale;
    double inner = 0.0;
    for (long long i = first + warp; i < a.m && i < first + LINES; i += 8) {
        const Row<float> sums = row_of<float>(a.sums, i);
        const Row<T> features = row_of<T>(a.features, i);
        T* out = const_cast<T*>(static_cast<const T*>(a.out.data)) + i * a.out.row_stride;
        const bool dense = a.out.column_stride == 1 && reinterpret_cast<unsigned long long>(out) % 16 == 0;
        long long rest = 0;
        if (sums.wide() && features.wide() && dense) {
            rest = a.depth / 8 * 8;
            for (long long k = 8 * lane; k < rest; k += 256) {
                float x[8], y[8];
                sums.eight(k, x);
                features.eight(k, y);
                float eight = 0.0f;
                struct alignas(16) Pack {
                    T at[16 / sizeof(T)];
                } pack[8 * sizeof(T) / 16];
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    x[e] *= whole;
                    eight = e == 0 ? x[e] * y[e] : fmaf(x[e], y[e], eight);
                    pack[e * sizeof(T) / 16].at[e % (16 / sizeof(T))] = narrow<T>(x[e] * factor);
                }
                inner += eight;
#pragma unroll
                for (int p = 0; p < 8 * sizeof(T) / 16; ++p) reinterpret_cast<Pack*>(out + k)[p] = pack[p];
            }
        }
        for (long long k = rest + lane; k < a.depth; k += 32) {
            const float x = sums.at(k) * whole;
            inner += x * features.at(k);
            out[k * a.out.column_stride] = narrow<T>(x * factor);
        }
    }
    inner = warp_sum(inner);
    if (lane == 0) parts[warp] = inner;
    __syncthreads();
    if (threadIdx.x != 0) return;
    inner = 0.0;
    for (int w = 0; w < 8; ++w) inner += parts[w];
    a.inner[blockIdx.x] = inner;
}

}  // namespace contrastile
