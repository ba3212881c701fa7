// The positives among kept exponentials, put right before anything is made of them.
#include "features.cuh"

namespace contrastile {

// What a side adds to G of a positive pair, u (2^(x - L) - t); a weight of 0 silences it whatever the rest is.
__device__ __forceinline__ float pull(const KeptSide& side, long long i, float x) {
    const float weight = side.weight[i];
    return weight == 0.0f ? 0.0f : weight * exp2f(x - side.log[i]) - weight * side.target[i];
}

// E_ij = G_ij / (a_i + c_j) for each row's positive j: rounded to bfloat16 and times its factors again, that is G_ij with
// a relative error of two roundings, however much p - t cancels. The dot is taken anew, so that it does not matter how
// often this is done.
//
// A quotient that bfloat16 cannot hold (the factors cancel, weights being of both signs) takes plan->kept back: G is
// then formed in the place of E, now and whenever it is asked for again.
extern "C" __global__ void __launch_bounds__(256) kept_positives(const __grid_constant__ KeptPositivesArguments a) {
    static_assert(LINES == 8, "a warp takes one row");
    if (__ldcg(&a.plan->kept) == 0) return;
    const int lane = threadIdx.x % 32;
    const long long i = static_cast<long long>(blockIdx.x) * LINES + threadIdx.x / 32;
    if (i >= a.m) return;
    const long long j = named(a.positives[i], -1, a.n);
    if (j < 0) return;
    const float dot =
        warp_sum(lane_dot<float>(row_of<bfloat16>(a.rows, i), row_of<bfloat16>(a.columns, j), a.depth, lane));
    if (lane != 0) return;
    const float x = dot * a.plan->alpha, factor = a.row.kept[i] + a.column.kept[j];
    const float g = pull(a.row, i, x) + pull(a.column, j, x);
    const float quotient = g == 0.0f ? 0.0f : g / factor;
    // false for NaN
    if (fabsf(quotient) < 0x1p127f)
        static_cast<bfloat16*>(a.kept)[i * a.kept_stride + j] = narrow<bfloat16>(quotient);
    else {
        // others may read it while it changes: who then returns early leaves out what G will replace
        atomicExch(&a.plan->kept, 0);
        atomicExch(&a.forward->status, 1);
    }
}

}  // namespace contrastile
