// Passes over matrices: each element is read and written once.
#include "features.cuh"

namespace contrastile {

// out = factor times the sum of the shares of x, in their order and in float32, rounded once to out's type.
template <class In, class Out>
__global__ void __launch_bounds__(256) scale_cast(const __grid_constant__ ScaleCastArguments a) {
    struct alignas(4 * sizeof(Out)) Four {
        Out at[4];
    };
    struct alignas(4 * sizeof(In)) FourIn {
        In at[4];
    };
    const float factor = *a.factor;
    const In* x = static_cast<const In*>(a.x);
    Out* out = static_cast<Out*>(a.out);
    const long long size = a.size;
    const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    const long long threads = static_cast<long long>(gridDim.x) * THREADS;
    const bool wide = reinterpret_cast<unsigned long long>(x) % sizeof(FourIn) == 0 &&
                       reinterpret_cast<unsigned long long>(out) % sizeof(Four) == 0 && (a.shares == 1 || size % 4 == 0);
    const long long packs = wide ? size / 4 : 0;
    for (long long p = thread; p < packs; p += threads) {
        const FourIn in = reinterpret_cast<const FourIn*>(x)[p];
        float sum[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[e] = widen(in.at[e]);
#pragma unroll 1
        for (int s = 1; s < a.shares; ++s) {
            const FourIn more = reinterpret_cast<const FourIn*>(x + s * size)[p];
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[e] += widen(more.at[e]);
        }
        Four four;
#pragma unroll
        for (int e = 0; e < 4; ++e) four.at[e] = narrow<Out>(sum[e] * factor);
        reinterpret_cast<Four*>(out)[p] = four;
    }
    for (long long p = 4 * packs + thread; p < size; p += threads) {
        float sum = widen(x[p]);
#pragma unroll 1
        for (int s = 1; s < a.shares; ++s) sum += widen(x[s * size + p]);
        out[p] = narrow<Out>(sum * factor);
    }
}

// Sum over LINES rows of <a_i, b_i> to out (blocks,): eight products at a time in float32, their sums in float64.
template <class A, class B>
__global__ void __launch_bounds__(256) row_dots(const __grid_constant__ RowDotsArguments a) {
    __shared__ double sums[8];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first = static_cast<long long>(blockIdx.x) * LINES;
    double sum = 0.0;
    for (long long i = first + warp; i < a.m && i < first + LINES; i += 8) {
        sum += lane_dot<double>(row_of<A>(a.a, i), row_of<B>(a.b, i), a.depth, lane);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0.0;
    for (int w = 0; w < 8; ++w) sum += sums[w];
    a.out[blockIdx.x] = sum;
}

// The sum of a list, 0-d, to `out`, or rounded once to `rounded`.
extern "C" __global__ void __launch_bounds__(1024) add_doubles(const __grid_constant__ AddDoublesArguments a) {
    __shared__ double sums[32];
    double sum = 0.0;
#pragma unroll 4
    for (long long i = threadIdx.x; i < a.length; i += 1024) sum += a.parts[i];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = warp_sum(sums[threadIdx.x]);
    if (threadIdx.x != 0) return;
    if (a.out != nullptr)
        *a.out = sum;
    else
        *a.rounded = static_cast<float>(sum);
}

}  // namespace contrastile
