// The decisions of one small kernel on the device. Later kernels read them there, so the host never waits.
#pragma once

namespace contrastile {

// 56 bytes on the device, written by plan_forward, epilogue_scales or plan_sigmoid. Fields that a pass does not use are 0.
struct Plan {
    float alpha;      // scale log2 e: logits in powers of two, without the bias
    float reference;  // the shared reference r of the fast path, in powers of two
    float threshold;  // forward: a sum below this, per term, may have lost terms that count to underflow
    float gradient_scale;  // power of two that keeps a float16 G in range; 1 for other types
    float bias;       // the bias in nats, 0 where there is none
    int fast;         // backward: 1 where the shared reference is proven safe, else 0
    int status;       // forward: 0 while the fast path is valid, 1 if the safe path must run
    int off_diagonal;        // forward: 1 if some row's positive is a column other than that of its own number
    float output_scale;  // backward: scale / gradient_scale, which turns a sum into a gradient
    float blas_scale; // backward: the same for cuBLAS, and 2^-149 for 0
    float zero;       // always 0: cuBLAS reads its factors from here
    int blocks_done;     // backward: number of blocks of finalize_rows that have written their part
    int kept;         // backward: 1 if kept exponentials replace G; 0 if there are none or G overwrites them
    int certain;      // backward: 1 if ids name positives and some row or column is certain of its own
};

static_assert(sizeof(Plan) == 56);

}  // namespace contrastile
