// One product of kept exponentials E, which are weighted on their way to the tensor cores, for sm_90a: the second products
// of the backward pass, without G in memory.
//
// weighted_sm90<ACROSS>: out (height, width) = G features, G_ik = E_ik (line_i + step_k), E in bfloat16. The contraction
// runs along the rows of E (0: lines are rows, the rows' gradient) or across them (1: lines are columns of E, the
// columns' gradient). Grid of 2 ceil(height / 256) ceil(width / 256) shares blocks of PIPELINE_THREADS threads,
// ALL_SHARED bytes of dynamic shared memory.
//
// A block computes a tile of 128 lines by 256 columns over its share of the contraction. Its producer feeds a ring of
// stages, each one step of 64 of the contraction: 128 x 64 of E, 64 x 256 of the features and 64 factors. Each of two
// consumers takes 64 lines: it reads its part of E into registers, in the layout of wgmma's first operand, weights it,
// rounds it to bfloat16, and multiplies. While the tensor cores work on one step a consumer weights the next.
//
// Blocks come in clusters of two, on neighbouring tiles of lines: each copies half of the features of a step to both.
// Clusters that run at the same time walk the same steps, those of the same lines side by side: E is read from memory once.
//
// Hazards:
// * The tensor cores read a step's fragments from registers. There are two sets, and a set is written only after the
//   products that read it are done.
// * Elements outside E and the features arrive as zeros, and the factors' vectors end in zeros, so no NaN of
//   uninitialised memory can enter.
#include "pipeline_sm90.cuh"

namespace contrastile {

constexpr int LINES_A_BLOCK = 128, STEP = 64, PARTS = STEP / 16, STAGES = 4;
constexpr int BOXES_OF_E = 2, BOXES = BOXES_OF_E + WIDE_COLUMNS / 64;
constexpr int STAGE_BYTES = BOXES * BOX_BYTES, FACTORS_BYTES = STEP * 4;
constexpr int FACTORS_AT = STAGES * STAGE_BYTES, FULL_AT = FACTORS_AT + STAGES * FACTORS_BYTES;
constexpr int EMPTY_AT = FULL_AT + 8 * STAGES;

static_assert(EMPTY_AT + 8 * STAGES + SWIZZLE_ATOM <= ALL_SHARED);

// Factors of a step while E holds G itself: 1/2 + 1/2 = 1.
__device__ const struct alignas(16) {
    float at[STEP];
} halves = {{0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f,
             0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f,
             0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f,
             0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f}};

// A block's tile: its first line and column, its share, its first step and the number of its steps.
struct Tile {
    int line, column, share, begin, steps;
    unsigned rank;  // in the cluster

    __device__ __forceinline__ explicit Tile(const WeightedArguments& a) : rank(cluster_rank()) {
        const unsigned across = (a.width + WIDE_COLUMNS - 1) / WIDE_COLUMNS, clusters = gridDim.x / 2 / a.shares;
        const unsigned cluster = blockIdx.x / 2 % clusters;
        line = (2 * (cluster / across) + rank) * LINES_A_BLOCK;
        column = cluster % across * WIDE_COLUMNS;
        share = blockIdx.x / 2 / clusters;
        const int all = (a.depth + STEP - 1) / STEP;
        begin = all * share / a.shares;
        steps = all * (share + 1) / a.shares - begin;
    }
};

template <int ACROSS>
__device__ __forceinline__ void produce(unsigned base, const TensorMap& e, const TensorMap& features,
                                        const WeightedArguments& a, const Tile& tile) {
    const bool kept = a.plan->kept != 0;
    Cursor<STAGES> at;
    at.parity = 1;  // the phase before the first counts as complete: the ring starts empty
    for (int k = tile.begin; k < tile.begin + tile.steps; ++k) {
        const unsigned stage = base + at.stage * STAGE_BYTES, full = base + FULL_AT + 8 * at.stage;
        barrier_wait(base + EMPTY_AT + 8 * at.stage, at.parity);
        barrier_expect(full, STAGE_BYTES + FACTORS_BYTES);
#pragma unroll
        for (int box = 0; box < BOXES_OF_E; ++box) {
            const int line = tile.line + 64 * box, step = k * STEP;
            copy_in(stage + box * BOX_BYTES, e, ACROSS ? line : step, ACROSS ? step : line, full);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int box = 2 * tile.rank + half;
            copy_in_both(stage + (BOXES_OF_E + box) * BOX_BYTES, features, tile.column + 64 * box, k * STEP, full);
        }
        copy_vector_in<FACTORS_BYTES>(base + FACTORS_AT + at.stage * FACTORS_BYTES,
                                      kept ? a.steps + static_cast<long long>(k) * STEP : halves.at, full);
        at.step();
    }
}

// One consumer: 64 lines of the tile.
template <int ACROSS>
struct Consumer {
    unsigned base, mine;  // the ring; where in a stage this lane's first 16 bytes of E lie
    int lane;
    float lines[2];       // factors of this lane's rows

    // Loads E of one step and weights it. Lanes point at the rows of each 8 x 8 matrix; ACROSS loads it transposed.
    __device__ __forceinline__ void apply_factors(int stage, unsigned (&fragments)[PARTS][4]) const {
        const unsigned from = base + stage * STAGE_BYTES + mine;
        const unsigned factors = base + FACTORS_AT + stage * FACTORS_BYTES + 8 * (lane % 4);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            unsigned e[4];
            if (ACROSS)
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3])
                             : "r"(from + part * 16 * 128)
                             : "memory");
            else
                asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                             : "=r"(e[0]), "=r"(e[1]), "=r"(e[2]), "=r"(e[3])
                             : "r"(from ^ part << 5)
                             : "memory");
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float step[2];
                asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                             : "=f"(step[0]), "=f"(step[1])
                             : "r"(factors + 64 * part + 32 * half)
                             : "memory");
#pragma unroll
                for (int q = 0; q < 2; ++q) {
                    const unsigned two = e[2 * half + q];
                    fragments[part][2 * half + q] =
                        narrow_pair<bfloat16>(__uint_as_float(two << 16) * (lines[q] + step[0]),
                                              __uint_as_float(two & 0xffff0000u) * (lines[q] + step[1]));
                }
            }
        }
    }

    __device__ __forceinline__ void multiply(int stage, const unsigned (&fragments)[PARTS][4], bool add,
                                             float (&acc)[WIDE_VALUES]) const {
        const unsigned b = operand_across(base + stage * STAGE_BYTES + BOXES_OF_E * BOX_BYTES);
        products_fence();
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
            product_wide(acc, fragments[part], descriptor(b + 128 * part), part > 0 || add);
        products_commit();
    }

    // Both blocks may refill the stage.
    __device__ __forceinline__ void release(int stage) const {
        if (lane < 2) barrier_arrive(base + EMPTY_AT + 8 * stage, lane);
    }

    __device__ __forceinline__ void run(int steps, float (&acc)[WIDE_VALUES]) const {
        unsigned fragments[2][PARTS][4];
        Cursor<STAGES> now, next;
        barrier_wait(base + FULL_AT, 0);
        apply_factors(0, fragments[0]);
        next.step();
        int last = 0;
        // two steps per iteration, so that the compiler knows the set of registers
        for (int k = 0; k < steps; k += 2) {
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                if (k + odd >= steps) break;
                multiply(now.stage, fragments[odd], k + odd > 0, acc);
                products_wait<1>();
                if (k + odd > 0) release(last);
                last = now.stage;
                now.step();
                if (k + odd + 1 < steps) {
                    barrier_wait(base + FULL_AT + 8 * next.stage, next.parity);
                    apply_factors(next.stage, fragments[1 - odd]);
                    next.step();
                }
            }
        }
        products_wait<0>();
        release(last);
    }
};

// Writes the thread's two rows of the tile: two columns of each group of 8.
__device__ __forceinline__ void put(const float (&acc)[WIDE_VALUES], float* share, const WeightedArguments& a, int line,
                                    int column) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        if (line + 8 * q >= a.height) continue;
        float* out = share + (line + 8 * q) * a.out_stride;
#pragma unroll
        for (int g = 0; g < WIDE_COLUMNS / 8; ++g) {
            const int at = column + 8 * g;
            const float x = acc[4 * g + 2 * q], y = acc[4 * g + 2 * q + 1];
            if (at + 1 < a.width && a.out_stride % 2 == 0) {
                *reinterpret_cast<float2*>(out + at) = make_float2(x, y);
                continue;
            }
            if (at < a.width) out[at] = x;
            if (at + 1 < a.width) out[at + 1] = y;
        }
    }
}

template <int ACROSS>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(PIPELINE_THREADS, 1)
    weighted_sm90(const __grid_constant__ TensorMap e, const __grid_constant__ TensorMap features,
                  const __grid_constant__ WeightedArguments a) {
    extern __shared__ unsigned char dynamic[];
    const unsigned start = shared_address(dynamic), base = start + (-start & (SWIZZLE_ATOM - 1));
    const int group = __shfl_sync(0xffffffffu, threadIdx.x / WARPGROUP, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(base + FULL_AT + 8 * s, 1);                          // the producer, then the bytes
            barrier_init(base + EMPTY_AT + 8 * s, 2 * 2 * WARPGROUP / 32);  // all consumers' warps of both blocks
        }
        publish_barriers();
    }
    cluster_sync();
    const Tile tile(a);
    if (group == 0) {
        shrink_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce<ACROSS>(base, e, features, a, tile);
    } else {
        grow_registers<CONSUMER_REGISTERS>();
        const int consumer = group - 1, warp = threadIdx.x / 32 % 4, low = lane % 8;
        const int line = tile.line + 64 * consumer + 16 * warp + lane / 4;
        const bool kept = a.plan->kept != 0;
        Consumer<ACROSS> self{base, 0, lane, {}};
        // 8 lanes point at each 8 x 8 matrix: the second is 8 rows of the result further, the third 8 steps
        const int row = ACROSS ? lane / 16 * 8 + low : 16 * warp + lane % 16;
        const int piece = ACROSS ? 2 * warp + lane / 8 % 2 : lane / 16;
        self.mine = consumer * BOX_BYTES + row * 128 + ((piece ^ low) << 4);
#pragma unroll
        for (int q = 0; q < 2; ++q)
            self.lines[q] = line + 8 * q >= a.height ? 0.0f : kept ? a.lines[line + 8 * q] : 0.5f;
        float acc[WIDE_VALUES];
        self.run(tile.steps, acc);
        float* share = a.out + static_cast<long long>(tile.share) * a.height * a.out_stride;
        put(acc, share, a, line, tile.column + 2 * (lane % 4));
    }
    cluster_sync();  // the other block may still copy here or arrive at these barriers
}

}  // namespace contrastile
