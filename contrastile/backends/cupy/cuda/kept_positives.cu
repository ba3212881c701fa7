// Fills in the positives among kept exponentials. The forward pass left 0 there, because it sums negatives alone.
#include "features.cuh"

namespace contrastile {

// E_ij = G_ij / (a_i + c_j) for each row's positive j. Rounded to bfloat16 and multiplied by its factors again, it gives
// G_ij with a relative error of two roundings.
//
// If bfloat16 cannot hold a quotient (weights of both signs may cancel in the factors), plan->kept becomes 0: then this
// and every later pass form G instead.
extern "C" __global__ void __launch_bounds__(256) kept_positives(const __grid_constant__ KeptPositivesArguments a) {
    if (__ldcg(&a.plan->kept) == 0) return;
    const long long i = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= a.m) return;
    const long long j = positive_column(a.positives[i], -1, a.n);
    if (j < 0) return;
    const float g = a.entries[i], quotient = g == 0.0f ? 0.0f : g / (a.row_kept[i] + a.column_kept[j]);
    // NaN fails this comparison
    if (fabsf(quotient) < 0x1p127f)
        static_cast<bfloat16*>(a.kept)[i * a.kept_stride + j] = narrow<bfloat16>(quotient);
    else {
        // a block that reads the new value returns early, which is harmless: G will overwrite E
        atomicExch(&a.plan->kept, 0);
        atomicExch(&a.forward->status, 1);
    }
}

}  // namespace contrastile
