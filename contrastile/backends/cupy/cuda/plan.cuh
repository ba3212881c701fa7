// What one small kernel decides on the device and the tile kernels obey, so that nobody waits for the decision.
#pragma once

namespace contrastile {

// 56 bytes on the device, written by plan_forward, epilogue_scales or plan_sigmoid; a field that the pass does not use is 0.
struct Plan {
    float alpha;      // scale log2 e: logits in powers of two, without the bias
    float reference;  // the shared reference r of the fast path, in powers of two
    float threshold;  // forward: least sum per term at which the terms that underflowed do not matter
    float gradient_scale;  // power of two that keeps a float16 G in range; 1 for other types
    float bias;       // the bias in nats, 0 where there is none
    int fast;         // backward: 1 where the shared reference is proven safe, else 0
    int status;       // forward: 0 while the fast path stands, 1 where the safe path must work
    int off_diagonal;        // forward: 1 if some row's positive is a column other than that of its own number
    float output_scale;  // backward: scale / gradient_scale, which turns a sum into a gradient
    float blas_scale; // backward: the same for cuBLAS, and 2^-149 for 0
    float zero;       // always 0: cuBLAS reads its factors from here
    int blocks_done;     // backward: blocks of finalize_rows that have left their part
    int kept;         // backward: 1 where kept exponentials stand for G, 0 where there are none or G takes their place
    int certain;      // backward: 1 where ids name positives and some row or column is certain of its own
};

static_assert(sizeof(Plan) == 56);

}  // namespace contrastile
