// The precheck of the forward pass: peaks of the norms, and whether there are off-diagonal positives.
#include "features.cuh"

namespace contrastile {

// A feature that is not finite makes the bound infinite, and the path the safe one.
__device__ __forceinline__ float finite_square(float square) { return square < infinity() ? square : infinity(); }

// Peaks of every LINES rows and columns to peaks (blocks, 4). A warp takes the row and the column of one number.
//
// The third peak says that some row's positive is not the column of its own number: sum_positives has work then.
template <class T>
__global__ void __launch_bounds__(256) measure(const __grid_constant__ MeasureArguments a) {
    static_assert(LINES == 8, "a warp takes one line");
    const int lane = threadIdx.x % 32;
    const long long i = static_cast<long long>(blockIdx.x) * LINES + threadIdx.x / 32;
    float peaks[3] = {0.0f, 0.0f, 0.0f};
    if (i < a.m) {
        // asked for before the features, which take as long to come
        const long long positive = listed(a.positives, i), hidden = listed(a.excluded, i);
        const Row<T> row = row_of<T>(a.rows, i);
        peaks[0] = finite_square(warp_sum(lane_dot<float>(row, row, a.depth, lane)));
        const long long j = named(positive, hidden, a.n);
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
