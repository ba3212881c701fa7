// The survey of the forward pass: peaks of the norms and the logits of the positives, in one reading of the features.
#include "features.cuh"

namespace contrastile {

// Peaks of every LINES rows or columns to peaks (blocks, 2), and the logits of the positives.
//
// A logit is dot * (alpha ln 2) + bias with the very alpha, rounded, of the tile kernels, and not dot * scale + bias:
// where a pair outweighs all others its log-sum-exp and its logit then err alike, and their difference is the loss.
//
// column_positive is right where each row's positive, if it has one, is the column of its own number; where not, the
// second peak says so, and sum_positives puts it right.
template <class T>
__global__ void __launch_bounds__(256) measure(const __grid_constant__ MeasureArguments a) {
    __shared__ float buffer[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long row_blocks = ceil_div(a.m, LINES);
    const bool of_rows = blockIdx.x < row_blocks;
    const long long first = (of_rows ? blockIdx.x : blockIdx.x - row_blocks) * LINES;
    const long long length = of_rows ? a.m : a.n;
    float top = 0.0f, stray = 0.0f;
    for (long long i = first + warp; i < length && i < first + LINES; i += 8) {
        const Row<T> line = row_of<T>(of_rows ? a.rows : a.columns, i);
        const float square = warp_sum(lane_dot<float>(line, line, a.depth, lane));
        // a feature that is not finite makes the bound infinite, and the path the safe one
        top = fmaxf(top, square < infinity() ? square : infinity());
        if (!of_rows) {
            if (lane == 0 && a.column_positive != nullptr && i >= a.m) a.column_positive[i] = 0.0f;
            continue;
        }
        const long long j = a.positives == nullptr ? -1 : named(a.positives, a.excluded, i, a.n);
        float logit = 0.0f;
        if (j >= 0) {
            const Row<T> column = row_of<T>(a.columns, j);
            const float dot = warp_sum(lane_dot<float>(line, column, a.depth, lane));
            const double alpha = in_powers_of_two(*a.scale);
            logit = static_cast<float>(dot * (alpha * LN2) + (a.bias == nullptr ? 0.0 : *a.bias));
            if (j != i) stray = 1.0f;
        }
        if (lane == 0) {
            if (a.row_positive != nullptr) a.row_positive[i] = logit;
            if (a.column_positive != nullptr && i < a.n) a.column_positive[i] = j == i ? logit : 0.0f;
        }
    }
    top = block_choice<Largest>(top, buffer);
    stray = block_choice<Largest>(stray, buffer);
    if (threadIdx.x == 0) {
        a.peaks[2ll * blockIdx.x] = top;
        a.peaks[2ll * blockIdx.x + 1] = stray;
    }
}

}  // namespace contrastile
