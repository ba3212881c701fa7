// Rows of features, read by one warp.
#pragma once

#include "arguments_small.cuh"
#include "elements.cuh"
#include "reduce.cuh"

namespace contrastile {

template <class T>
struct Row {
    const T* data;

    __device__ __forceinline__ float at(long long k) const { return widen(data[k]); }

    // Whether eight features can be read by 16-byte loads.
    __device__ __forceinline__ bool wide() const { return reinterpret_cast<unsigned long long>(data) % 16 == 0; }

    __device__ __forceinline__ void eight(long long k, float (&out)[8]) const {
        constexpr int PACK = 16 / sizeof(T);
        struct alignas(16) Pack {
            T at[PACK];
        };
#pragma unroll
        for (int p = 0; p < 8 / PACK; ++p) {
            const Pack pack = *reinterpret_cast<const Pack*>(data + k + p * PACK);
#pragma unroll
            for (int e = 0; e < PACK; ++e) out[p * PACK + e] = widen(pack.at[e]);
        }
    }
};

template <class T>
__device__ __forceinline__ Row<T> row_of(const Matrix& x, long long i) {
    return {static_cast<const T*>(x.data) + i * x.row_stride};
}

// This lane's share of <a, b>. Sum is float or double; eight products at a time are added in float first.
template <class Sum, class A, class B>
__device__ __forceinline__ Sum lane_dot(const Row<A>& a, const Row<B>& b, long long depth, int lane) {
    Sum sum = 0;
    long long rest = 0;
    if (a.wide() && b.wide()) {
        rest = depth / 8 * 8;
#pragma unroll 2
        for (long long k = 8 * lane; k < rest; k += 256) {
            float x[8], y[8];
            a.eight(k, x);
            b.eight(k, y);
            float eight = x[0] * y[0];
#pragma unroll
            for (int e = 1; e < 8; ++e) eight = fmaf(x[e], y[e], eight);
            sum += eight;
        }
    }
    for (long long k = rest + lane; k < depth; k += 32) sum += a.at(k) * b.at(k);
    return sum;
}

// The column of a row's positive; -1 if it is outside this block or excluded.
__device__ __forceinline__ long long positive_column(long long positive, long long excluded, long long n) {
    return positive >= 0 && positive < n && positive != excluded ? positive : -1;
}

// Element i of a list of indices; -1 if the list is null.
__device__ __forceinline__ long long index_or_none(const long long* list, long long i) {
    return list == nullptr ? -1 : list[i];
}

}  // namespace contrastile
