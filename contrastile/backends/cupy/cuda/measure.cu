// The precheck of the forward pass: the largest norms, and whether some positive is off the diagonal.
#include "features.cuh"

namespace contrastile {

// A non-finite feature makes the bound infinite, which selects the safe path.
__device__ __forceinline__ float finite_square(float square) { return square < infinity() ? square : infinity(); }

// Writes the maxima over every LINES rows and columns to peaks (blocks, 4). A warp takes row i and column i.
//
// The third maximum is 1 if some row's positive is not the column of the same number. Then sum_positives must run.
template <class T>
__global__ void __launch_bounds__(256) measure(const __grid_constant__ MeasureArguments a) {
    static_assert(LINES == 8, "a warp takes one line");
    const int lane = threadIdx.x % 32;
    const long long i = static_cast<long long>(blockIdx.x) * LINES + threadIdx.x / 32;
    float peaks[3] = {0.0f, 0.0f, 0.0f};
    if (i < a.m) {
        // load the indices first: their latency overlaps with that of the features
        const long long positive = index_or_none(a.positives, i), hidden = index_or_none(a.excluded, i);
        const Row<T> row = row_of<T>(a.rows, i);
        peaks[0] = finite_square(warp_sum(lane_dot<float>(row, row, a.depth, lane)));
        const long long j = positive_column(positive, hidden, a.n);
        peaks[2] = j >= 0 && j != i ? 1.0f : 0.0f;
    }
    if (i < a.n) {
        const Row<T> column = row_of<T>(a.columns, i);
        peaks[1] = finite_square(warp_sum(lane_dot<float>(column, column, a.depth, lane)));
    }
    block_largest(peaks);
    if (threadIdx.x == 0) {
        reinterpret_cast<float4*>(a.peaks)[blockIdx.x] = make_float4(peaks[0], peaks[1], peaks[2], 0.0f);
    }
}

}  // namespace contrastile
