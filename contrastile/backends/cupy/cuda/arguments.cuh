// The structs that cross from the host to the tile kernels, one a kernel, passed by value.
//
// A kernel works on one chunk of X = rows columns^T: `height` rows from `row` by `width` columns from `column`.
// Tiles, partial results and G are numbered inside the chunk; features and vectors inside the block. A pointer that
// may be null says so. The host mirrors these structs field by field: keep the order, keep the types.
#pragma once

#include "plan.cuh"

namespace contrastile {

// Dynamic shared memory of each sm_90a tile kernel: the most that a block may have, for one block fills a multiprocessor.
constexpr int ALL_SHARED = 232448;

// A CUtensorMap by value: a parameter of the sm_90a kernels, ahead of the arguments.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

struct Features {
    const void* rows;     // (m, depth) of T, unit stride along depth; sm_90a reads it through a tensor map
    const void* columns;  // (n, depth) of T
    long long row_stride, column_stride;
    int depth;
    int guide_depth;      // width of the guide's features, which a guided kernel reads through maps of their own; else 0
    int band;             // tile rows (sm_90a: pairs of tile rows) walked together, so that they share the L2 cache
};

struct Chunk {
    long long row, column;  // first row and column of the chunk inside the block
    int height, width;      // at least 1 each
};

// Which pairs count: block-wide, each may be null.
struct PairVectors {
    const long long* positives;   // (m,) column of the row's positive; outside the block: none here
    const long long* excluded;    // (m,) column that the row never sees
    const long long* row_ids;     // (m,), given together with column_ids
    const long long* column_ids;  // (n,)
    const float* row_limits;      // (m,) LIMITED alone: logits without the bias, times log2 e
    const float* column_limits;   // (n,) likewise
};

// Partial results of one side of a chunk: (tiles, stride >= length) each. Sums are of 2^(x - r). On the fast path r is the
// plan's. On the safe path each sum has its own r in `references`, so that no number is rounded at the size of a logit.
struct Partials {
    float* sums;                 // over negatives; null if this side is not requested
    float* references;           // safe path alone: the r of each sum
    float* dots;                 // TARGET alone: sums of dots over positive pairs, without scale and bias
    float* dots_low;             // TARGET alone: the rounding errors of `dots`
    float* counts;               // TARGET alone: numbers of positive pairs
    float* positive_sums;        // TARGET alone: as sums, over positive pairs
    float* positive_references;  // TARGET alone: as references
    long long stride;
};

struct ForwardArguments {
    Features features;
    Chunk chunk;
    PairVectors pairs;
    const Plan* plan;  // the fast instance runs if status is 0, else the safe one; the other returns at once
    Partials rows;     // a partial for each tile column, (column tiles, height)
    Partials columns;  // a partial for each tile row, (row tiles, width); sums may be null
};

// One side's vectors for the epilogue of G, block-wide, of length m or n; s is plan->gradient_scale.
// L = log2 (2^N + 2^P), without the bias, is computed in double and split: a float, the high part, and the low part.
struct GradientSide {
    const float* log;      // high part of L; +inf where the weight is 0 or L is -inf
    const float* weight;   // w s 2^-low
    const float* folded;   // w s 2^(r - L), and 0 where the weight is 0; read where plan->fast
    const float* taken;    // TARGET alone: w s t, and 0 where the weight is 0
    const float* certain;  // TARGET alone: (length, 4), high and low part of P, w s, and that times 2^N / (2^N + 2^P);
                           // read where plan->certain
};

struct GradientArguments {
    Features features;
    Chunk chunk;
    PairVectors pairs;
    const Plan* plan;
    GradientSide row, column;  // column all null for a loss of one direction
    const float* entries;      // (m,) s G of each row's positive by index, read where it has one; else null
    void* g;                   // (height, width) of T; sm_90a writes it through a tensor map
    long long g_stride;
    int in_place_of_kept;      // sm_90a: 1 if g holds kept exponentials; then the kernel returns if plan->kept
};

// Kernels of narrow features: the side of a tile, which is also the largest width; blocks of narrow_join per tile row.
constexpr int NARROW_SIDE = 128;
constexpr int NARROW_JOINS = 8;

// Row statistics of narrow features, fast path only. Each block that computes some of a row's tiles writes one partial.
// The partials, (parts, height), are in the order of the blocks; unused ones are 0.
struct NarrowForwardArguments {
    ForwardArguments forward;  // the chunk has all columns of the block; no columns' partials
    int blocks, parts;         // blocks of the grid; the largest number of them that share one tile row
};

// Row gradient of narrow features: one kernel forms G and multiplies it.
struct NarrowGradientArguments {
    GradientArguments gradient;  // the chunk has all columns of the block; g is null
    float* out;                  // (height, depth): G columns is added to it, or overwrites it if `fresh`
    long long out_stride;
    float* parts;                // (2 blocks, 128, 128): sums of tile rows that several blocks share
    int blocks, fresh;           // blocks of the grid of narrow_gradient_sm90
};

// One product of weighted kept exponentials E: out = (E * (line_i + step_k)) features, contracted over k.
struct WeightedArguments {
    const Plan* plan;         // kept 0: E holds G itself, and both factors count as 1/2
    const float* lines;       // one factor for each line of out, (lines rounded up to 128,)
    const float* steps;       // one factor for each step of the contraction, (rounded up to 64,), 16-byte aligned
    float* out;               // (shares, height, width), written: their sum is the product
    long long out_stride;     // from one line to the next
    int height, width, depth;  // of one share of out, and of the contraction
    int shares;               // parts of the contraction
};

struct SigmoidArguments {
    Features features;
    Chunk chunk;
    PairVectors pairs;
    const Plan* plan;
    const float* row_weight;   // (m,) without gradient_scale
    float* loss_parts;         // (column tiles, part_stride >= height): sums of softplus(-z x)
    float* slope_parts;        // likewise, sums of -z sigmoid(-z x), unweighted
    long long part_stride;
    void* g;                   // as in GradientArguments; null if G is not requested
    long long g_stride;
};

}  // namespace contrastile
