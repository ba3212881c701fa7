// The logits of the positives that indices name.
#include "features.cuh"

namespace contrastile {

// Logits by row, and by column: a column's is right where each row's positive, if it has one, is the column of its own
// number; where not, the survey says so, and sum_positives puts it right. A warp takes the row and the column of one number.
//
// A logit is dot * (alpha ln 2) + bias with the very alpha, rounded, of the tile kernels, and not dot * scale + bias:
// the others must not be measured on another scale. In double: nothing is rounded at its size.
template <class T>
__global__ void __launch_bounds__(256) positive_dots(const __grid_constant__ PositiveDotsArguments a) {
    static_assert(LINES == 8, "a warp takes one line");
    const int lane = threadIdx.x % 32;
    const long long i = static_cast<long long>(blockIdx.x) * LINES + threadIdx.x / 32;
    const long long j = i < a.m ? named(a.positives[i], listed(a.excluded, i), a.n) : -1;
    double logit = 0.0;
    if (j >= 0) {
        const double alpha = in_powers_of_two(*a.scale);
        const double dot = warp_sum(lane_dot<double>(row_of<T>(a.rows, i), row_of<T>(a.columns, j), a.depth, lane));
        logit = dot * (alpha * LN2) + (a.bias == nullptr ? 0.0 : *a.bias);
    }
    if (lane != 0) return;
    if (i < a.m) {
        a.row_lse[i] = j < 0 ? -infinity() : logit;
        a.row_sum[i] = logit;
    }
    if (i < a.n && a.column_lse != nullptr) {
        a.column_lse[i] = j == i ? logit : -infinity();
        a.column_sum[i] = j == i ? logit : 0.0;
    }
}

}  // namespace contrastile
