// The positives among kept exponentials, whose place is empty: the sums that were kept are over the others.
#include "features.cuh"

namespace contrastile {

// E_ij = G_ij / (a_i + c_j) for each row's positive j: rounded to bfloat16 and times its factors again, that is G_ij with
// a relative error of two roundings.
//
// A quotient that bfloat16 cannot hold (the factors cancel, weights being of both signs) takes plan->kept back: G is
// then formed instead of E, now and whenever it is asked for again.
extern "C" __global__ void __launch_bounds__(256) kept_positives(const __grid_constant__ KeptPositivesArguments a) {
    if (__ldcg(&a.plan->kept) == 0) return;
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= a.m) return;
    const long long j = named(a.positives[i], -1, a.n);
    if (j < 0) return;
    const float g = a.entries[i], quotient = g == 0.0f ? 0.0f : g / (a.row_kept[i] + a.column_kept[j]);
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
