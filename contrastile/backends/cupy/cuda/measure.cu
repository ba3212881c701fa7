// The survey of the forward pass: peaks of the norms and the logits of the positives, in one reading of the features.
#include "features.cuh"

namespace contrastile {

// The logit of a pair.
//
// It is dot * (alpha ln 2) + bias with the very alpha, rounded, of the tile kernels, and not dot * scale + bias:
// where a pair outweighs all others its log-sum-exp and its logit then err alike, and their difference is the loss.
template <class T>
__device__ __forceinline__ float logit_of(const Row<T>& row, const Row<T>& column, const MeasureArguments& a, int lane) {
    const float dot = warp_sum(lane_dot<float>(row, column, a.depth, lane));
    const double alpha = in_powers_of_two(*a.scale);
    return static_cast<float>(dot * (alpha * LN2) + (a.bias == nullptr ? 0.0 : *a.bias));
}

// Peaks of every LINES rows or columns to peaks (blocks, 2), and the logits of the positives.
//
// column_positive is right where each row's positive, if it has one, is the column of its own number; where not, the
// second peak says so, and sum_positives puts it right.
template <class T>
__global__ void __launch_bounds__(256) measure(const __grid_constant__ MeasureArguments a) {
    static_assert(LINES == 8, "a warp takes one line");
    const int lane = threadIdx.x % 32;
    const long long row_blocks = ceil_div(a.m, LINES);
    const bool of_rows = blockIdx.x < row_blocks;
    const long long i = (of_rows ? blockIdx.x : blockIdx.x - row_blocks) * LINES + threadIdx.x / 32;
    float peaks[2] = {0.0f, 0.0f};
    if (i < (of_rows ? a.m : a.n)) {
        // asked for before the features, which take as long to come
        const long long positive = of_rows ? listed(a.positives, i) : -1, hidden = listed(a.excluded, of_rows ? i : 0);
        const Row<T> line = row_of<T>(of_rows ? a.rows : a.columns, i);
        const float square = warp_sum(lane_dot<float>(line, line, a.depth, lane));
        // a feature that is not finite makes the bound infinite, and the path the safe one
        peaks[0] = square < infinity() ? square : infinity();
        if (of_rows) {
            const long long j = named(positive, hidden, a.n);
            const float logit = j >= 0 ? logit_of(line, row_of<T>(a.columns, j), a, lane) : 0.0f;
            peaks[1] = j >= 0 && j != i ? 1.0f : 0.0f;
            if (lane == 0 && a.row_positive != nullptr) a.row_positive[i] = logit;
            if (lane == 0 && a.column_positive != nullptr && i < a.n) a.column_positive[i] = j == i ? logit : 0.0f;
        } else if (lane == 0 && a.column_positive != nullptr && i >= a.m) {
            a.column_positive[i] = 0.0f;
        }
    }
    block_largest(peaks);
    if (threadIdx.x == 0) reinterpret_cast<float2*>(a.peaks)[blockIdx.x] = make_float2(peaks[0], peaks[1]);
}

}  // namespace contrastile
