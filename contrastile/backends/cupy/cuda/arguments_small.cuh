// The structs that cross from the host to the small kernels, one a kernel, passed by value.
//
// Pointers are to device memory; a vector is contiguous; a pointer that may be null says so. Sizes and strides are in
// elements, 64-bit everywhere. The host mirrors these structs field by field: keep the order, keep the types.
#pragma once

#include "plan.cuh"

namespace contrastile {

// A matrix of features or of gradients, unit stride along rows.
struct Matrix {
    const void* data;
    long long row_stride;
};

// Rows or columns that one block of measure or row_dots takes.
constexpr int LINES = 8;
// Rows or columns that one block of positive_dots takes.
constexpr int PAIRS = 64;
// Rows or columns that one block of weight_bounds takes.
constexpr int LANES = 1024;
// Rows or columns that one block of a fold takes.
constexpr int FOLD = 32;
// Least number of elements for one block of an elementwise kernel. The kernel loops over the remaining ones.
constexpr int THREADS = 256;

// measure<T>: blocks ceil(max(m, n) / LINES), 256 threads.
struct MeasureArguments {
    Matrix rows;                 // (m, depth) of T
    Matrix columns;              // (n, depth) of T
    long long m, n, depth;
    const long long* positives;  // (m,) or null
    const long long* excluded;   // (m,) or null
    float* peaks;                // (blocks, 4): largest squared norm of rows, of columns; 1 if a positive is off-diagonal; 0
};

// positive_dots<P>: blocks ceil(max(m, n) / PAIRS), 256 threads.
struct PositiveDotsArguments {
    Matrix rows;                 // (m, depth) of P::Type, each row on a 16-byte boundary
    Matrix columns;              // (n, depth), likewise
    long long m, n, depth;
    const long long* positives;  // (m,)
    const long long* excluded;   // (m,) or null
    const float* scale;          // 0-d
    const float* bias;           // 0-d or null
    double* row_lse;             // (m,): logit of each row's positive, -inf where it has none
    double* row_sum;             // (m,): the same, 0 where it has none
    double* column_lse;          // (n,) or null: likewise of columns, right unless plan->off_diagonal
    double* column_sum;          // (n,) or null with column_lse
};

// plan_forward: 1 block, 1024 threads.
struct PlanForwardArguments {
    const float* peaks;  // of measure
    const float* scale;
    const float* bias;   // or null
    Plan* plan;
    long long m, n, depth;
    int exact;           // whether no reference is shared
};

// sum_positives: blocks ceil(n / 256), 256 threads. Runs only if plan->off_diagonal.
struct SumPositivesArguments {
    const Plan* plan;
    const long long* positives;  // (m,)
    const long long* excluded;   // (m,) or null
    const double* row_sum;       // (m,), of positive_dots
    double* column_lse;          // (n,): log-sum-exp of the logits of the positives; for one positive, exactly its logit
    double* column_sum;          // (n,): their sum
    long long m, n;
};

// One side of a fold: rows or columns of one chunk.
struct FoldSide {
    const float* sums;        // (tiles, part_stride >= length): partials of this chunk
    const float* references;  // likewise; read where SAFE
    long long part_stride;
    long long tiles;
    double* state;            // (length,): running state of these rows or columns
    double* lse;              // (length,): written with the last chunk
    long long length;         // 0: nothing to do on this side
    long long terms;          // how many terms the whole sum has: n for rows, m for columns
    int first, last;          // whether this is the state's first, last chunk
    int empty;                // whether a sum of 0 means that no term counts
};

// fold<SAFE>: blocks ceil(rows.length / FOLD) + ceil(columns.length / FOLD), 256 threads.
struct FoldArguments {
    FoldSide rows, columns;
    Plan* plan;
};

// One side of the fold of positives that ids name.
struct PositiveSide {
    const float* dots;        // (tiles, part_stride): sums of dots over positive pairs, without scale and bias
    const float* dots_low;    // likewise, the rounding errors of these sums
    const float* counts;      // likewise, the numbers of positive pairs
    const float* sums;        // as of FoldSide, over positive pairs
    const float* references;
    long long part_stride;
    long long tiles;
    double* state;            // (3, state_stride >= length): running dots, counts, and the state of the sums
    long long state_stride;
    double* lse;              // (length,), written with the last chunk: for one positive, exactly its logit
    double* sum;              // (length,), likewise: sum of logits
    long long length;         // 0: nothing to do on this side
    int first, last;
};

// fold_positives<SAFE>: blocks and threads as fold; runs if SAFE matches plan->status.
struct FoldPositivesArguments {
    PositiveSide rows, columns;
    Plan* plan;
};

// fold_sigmoid: blocks ceil(length / FOLD), 256 threads.
struct FoldSigmoidArguments {
    const float* loss_parts;   // (tiles, part_stride): sums of softplus
    const float* slope_parts;  // likewise, sums of -z sigmoid(-z x)
    long long part_stride;
    long long tiles;
    double* state;             // (2, state_stride >= length): running losses, running slopes
    long long state_stride;
    const float* row_weight;   // (length,)
    float* loss;               // (length,), written with the last chunk
    float* slope;              // (length,): w times the sum, 0 where w is 0
    long long length;
    int first, last;
};

// The weights of one side of the loss; all null for a loss of one direction. Log-sum-exps in nats, with the bias.
//
// In a loss with bars `share` replaces e^N / (e^N + e^P), and negative_lse is L: see bars.normalised.
struct WeightSide {
    const double* negative_lse;
    const double* positive_lse;
    const float* weight;
    const float* target;
    const double* share;  // or null
};

// weight_bounds: blocks ceil(m / LANES) + (two-sided ? ceil(n / LANES) : 0), 256 threads.
struct WeightBoundsArguments {
    long long m, n;
    const float* bias;       // or null
    const float* upstream;   // 0-d, multiplies every weight; or null
    WeightSide row, column;  // of lengths m and n
    float* peaks;            // (blocks, 8): by WeightPeak, then zeros
};

// The maxima that weight_bounds takes, L and N in powers of two. Those marked * skip rows whose weight is 0.
enum WeightPeak {
    NEGATED_LSE,        // -L *
    LARGEST_LSE,        // L
    NEGATED_WEIGHT,     // -|w| *
    LARGEST_BOUND,      // |w| (1 + |t|), a bound of the row's G
    ANY_CERTAIN,        // 1 if some row is certain of its positives
    NEGATED_NEGATIVES,  // -N *; infinity with bars
    WEIGHT_PEAKS
};

// epilogue_scales: blocks ceil(m / 256) + (two-sided ? ceil(n / 256) : 0), 256 threads.
struct EpilogueScalesArguments {
    const float* peaks;     // of weight_bounds
    long long programs;     // blocks of weight_bounds
    const float* scale;
    const float* bias;      // or null
    const float* upstream;  // as of weight_bounds
    Plan* plan;             // written
    long long m, n;
    WeightSide row, column;
    const long long* positives;  // (m,) or null
    const long long* excluded;   // (m,) or null
    float* row_vectors;     // log, weight and folded of GradientSide, (3, m); by ids also taken and certain, (8, m)
    float* column_vectors;  // likewise with n, or null
    float* entries;         // (m,): of GradientArguments; null with positives
    Plan* forward;          // plan of the pass that kept exponentials; its status becomes 1 when G overwrites them; or null
    float* row_kept;        // (m rounded up to KEPT_UNIT,): u 2^(r - L) with r of the forward pass, then zeros; or null
    float* column_kept;     // (n rounded up to KEPT_UNIT,): likewise of columns
    int two_sided;
    int by_ids;             // whether ids name the positives
    int half;               // whether G is float16 and needs a gradient_scale
    int exact;              // whether no reference is shared
};

// The vectors that accompany kept exponentials are padded to a multiple of this.
constexpr int KEPT_UNIT = 128;

// kept_positives: blocks ceil(m / THREADS), 256 threads. Runs only if plan->kept, which it may reset to 0.
struct KeptPositivesArguments {
    long long m, n;              // m: rows whose exponentials are kept
    const long long* positives;  // (m,) column of each row's positive
    const float* entries;        // (m,) of epilogue_scales, as the next two
    const float* row_kept;
    const float* column_kept;
    Plan* plan;
    Plan* forward;               // as that of epilogue_scales
    void* kept;                  // (m, n) bfloat16 exponentials, unit stride along rows
    long long kept_stride;
};

// plan_sigmoid: 1 block, 1024 threads.
struct PlanSigmoidArguments {
    const float* row_weight;  // (m,)
    const float* scale;
    const float* bias;        // or null
    Plan* plan;
    long long m;
    int half;
};

// scale_cast<In, Out>: any number of blocks, 256 threads.
struct ScaleCastArguments {
    const void* x;        // (shares, size) of In
    void* out;            // (size,) of Out; may be x itself where In is Out
    long long size;
    int shares;           // how many partial results are added
    const float* factor;  // 0-d
};

// row_dots<A, B>: blocks ceil(m / LINES), 256 threads; then add_doubles.
struct RowDotsArguments {
    Matrix a, b;   // (m, depth)
    long long m, depth;
    double* out;   // (blocks,)
};

// add_doubles: 1 block, 1024 threads.
struct AddDoublesArguments {
    const double* parts;
    long long length;
    double* out;     // 0-d, or null
    float* rounded;  // 0-d, given where out is not
};

// merge_lse: blocks ceil(length / THREADS), THREADS threads.
struct MergeLseArguments {
    const double* first;  // (length,) each
    const double* second;
    double* out;
    long long length;
};

// Terms that one block of weighted_nll takes.
constexpr int TERMS = 1024;

// Statistics and weights of rows or of columns, (length,) each.
struct LossSide {
    const double* negative_lse;
    const double* positive_lse;
    const double* positive_sum;
    const float* weight;
    const float* target;
    long long length;
};

// weighted_nll: blocks ceil(length / TERMS) of the rows and then of the columns, 1024 threads; then add_doubles.
struct WeightedNllArguments {
    LossSide row, column;  // column: length 0 for a loss of one direction
    double* out;           // (blocks,)
};

// finalize_rows<T>: blocks ceil(m / LINES), 256 threads. One launch for each chunk of rows; the last block adds.
struct FinalizeRowsArguments {
    Matrix sums;         // (shares m, depth) float, of these rows, times gradient_scale
    Matrix features;     // (m, depth) of T
    Matrix out;          // (m, depth) of T
    long long m, depth, shares;
    const float* scale;  // 0-d
    Plan* plan;
    double* parts;       // (all_blocks,): of all chunks
    long long first;     // number of parts that earlier chunks wrote
    long long all_blocks;
    double* inner;       // 0-d, written by the block that finishes last
    const float* entries;        // (m,) of these rows, of GradientArguments; null in float32 and where ids name positives
    const double* logits;        // (m,) of the rows' positives, given with entries
    const long long* positives;  // (m,) given, as the next two, where the rows' exponentials were kept
    const float* row_kept;       // (m,) of epilogue_scales
    const float* column_kept;
};

}  // namespace contrastile
