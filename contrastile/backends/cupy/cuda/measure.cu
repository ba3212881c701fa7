// The survey of the forward pass: peaks of the norms and the logits of the positives, in one reading of the features.
#include "features.cuh"

namespace contrastile {

// The logit of a pair from its dot product.
//
// It is dot * (alpha ln 2) + bias with the very alpha, rounded, of the tile kernels, and not dot * scale + bias:
// where a pair outweighs all others its log-sum-exp and its logit then err alike, and their difference is the loss.
__device__ __forceinline__ float logit_of(float dot, const MeasureArguments& a) {
    const double alpha = in_powers_of_two(*a.scale);
    return static_cast<float>(dot * (alpha * LN2) + (a.bias == nullptr ? 0.0 : *a.bias));
}

// This lane's shares of <row, row>, <column, column> and <row, column>, each feature read once.
template <class T>
__device__ __forceinline__ void lane_products(const Row<T>& row, const Row<T>& column, long long depth, int lane,
                                              float (&out)[3]) {
    long long rest = 0;
    if (row.wide() && column.wide()) {
        rest = depth / 8 * 8;
#pragma unroll 2
        for (long long k = 8 * lane; k < rest; k += 256) {
            float x[8], y[8];
            row.eight(k, x);
            column.eight(k, y);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                out[0] = fmaf(x[e], x[e], out[0]);
                out[1] = fmaf(y[e], y[e], out[1]);
                out[2] = fmaf(x[e], y[e], out[2]);
            }
        }
    }
    for (long long k = rest + lane; k < depth; k += 32) {
        const float x = row.at(k), y = column.at(k);
        out[0] = fmaf(x, x, out[0]);
        out[1] = fmaf(y, y, out[1]);
        out[2] = fmaf(x, y, out[2]);
    }
}

// A feature that is not finite makes the bound infinite, and the path the safe one.
__device__ __forceinline__ float finite_square(float square) { return square < infinity() ? square : infinity(); }

// Peaks of every LINES rows and columns to peaks (blocks, 4), and the logits of the positives. A warp takes the row and
// the column of one number, which mostly are each other's positives.
//
// column_positive is right where each row's positive, if it has one, is the column of its own number; where not, the
// third peak says so, and sum_positives puts it right.
template <class T>
__global__ void __launch_bounds__(256) measure(const __grid_constant__ MeasureArguments a) {
    static_assert(LINES == 8, "a warp takes one line");
    const int lane = threadIdx.x % 32;
    const long long i = static_cast<long long>(blockIdx.x) * LINES + threadIdx.x / 32;
    const bool row_there = i < a.m, column_there = i < a.n;
    float peaks[3] = {0.0f, 0.0f, 0.0f};
    if (row_there || column_there) {
        // asked for before the features, which take as long to come
        const long long positive = row_there ? listed(a.positives, i) : -1;
        const long long hidden = row_there ? listed(a.excluded, i) : -1;
        // past the end of one side the other's line stands in for it
        const Row<T> line = row_there ? row_of<T>(a.rows, i) : row_of<T>(a.columns, i);
        const Row<T> other = column_there ? row_of<T>(a.columns, i) : line;
        float products[3] = {0.0f, 0.0f, 0.0f};
        lane_products(line, other, a.depth, lane, products);
#pragma unroll
        for (int p = 0; p < 3; ++p) products[p] = warp_sum(products[p]);
        if (row_there) peaks[0] = finite_square(products[0]);
        if (column_there) peaks[1] = finite_square(products[1]);
        const long long j = named(positive, hidden, a.n);
        float logit = 0.0f;
        if (j >= 0) {
            float dot = products[2];
            if (j != i) {
                dot = warp_sum(lane_dot<float>(line, row_of<T>(a.columns, j), a.depth, lane));
                peaks[2] = 1.0f;
            }
            logit = logit_of(dot, a);
        }
        if (lane == 0 && row_there && a.row_positive != nullptr) a.row_positive[i] = logit;
        if (lane == 0 && column_there && a.column_positive != nullptr) a.column_positive[i] = j == i ? logit : 0.0f;
    }
    block_largest(peaks);
    if (threadIdx.x == 0) {
        reinterpret_cast<float4*>(a.peaks)[blockIdx.x] = make_float4(peaks[0], peaks[1], peaks[2], 0.0f);
    }
}

}  // namespace contrastile
