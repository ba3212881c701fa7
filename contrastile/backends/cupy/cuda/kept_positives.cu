// The positives among kept exponentials, put right before anything is made of them.
#include "features.cuh"

namespace contrastile {

// What a positive takes away on one side; a weight of 0 silences it whatever the target is.
__device__ __forceinline__ float taken(const KeptSide& side, long long i) {
    return side.weight[i] == 0.0f ? 0.0f : side.weight[i] * side.target[i];
}

// E_ij = G_ij / (a_i + c_j) for each row's positive j: rounded to bfloat16 and times its factors again, that is G_ij with
// a relative error of two roundings, however much p - t cancels. G comes of the exponential that is in the sums, as it
// was before it was rounded: a dot taken in another way errs otherwise, and alike for all pairs that outweigh the rest.
//
// A quotient that bfloat16 cannot hold (the factors cancel, weights being of both signs) takes plan->kept back: G is
// then formed in the place of E, now and whenever it is asked for again.
extern "C" __global__ void __launch_bounds__(256) kept_positives(const __grid_constant__ KeptPositivesArguments a) {
    if (__ldcg(&a.plan->kept) == 0) return;
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= a.m) return;
    const long long j = named(a.positives[i], -1, a.n);
    if (j < 0) return;
    const float factor = a.row.kept[i] + a.column.kept[j];
    const float g = fmaf(a.exponentials[i], factor, -(taken(a.row, i) + taken(a.column, j)));
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
