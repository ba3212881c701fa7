// One step of the dot products of a tile, in each arithmetic. A warp adds 64 rows by 64 columns to its accumulators,
// in the layout of pairs.cuh.
//
// Half<T>: bfloat16 or float16 on tensor cores. Float32 features: Ieee by fused multiply-adds, Tf32 rounded to nearest
// on tensor cores.
#pragma once

#include "pairs.cuh"
#include "stream_sm80.cuh"

namespace contrastile {

// A thread's place in a tile.
struct Thread {
    int warp, lane;
    int row_line, column_line;  // first row and column of the warp inside the tile

    __device__ __forceinline__ Thread() {
        warp = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x) / 32, 0);
        lane = threadIdx.x % 32;
        row_line = warp / 2 * WARP_SIDE;
        column_line = warp % 2 * WARP_SIDE;
    }

    // The row of the tile of strip s and q.
    __device__ __forceinline__ int row(int s, int q) const { return row_line + 16 * s + 8 * q + lane / 4; }

    // First column of this thread inside the tile.
    __device__ __forceinline__ int column() const { return column_line + 2 * (lane % 4); }
};

using Accumulators = float[STRIPS][4 * GROUPS];

// Four 8 x 16-byte matrices; lane 8 i + l gives the address of line l of matrix i.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
}

// Slices of a step, each 32 bytes of features: 16 of two bytes or 8 of four bytes, in the same layout.
constexpr int SLICES = STEP_BYTES / 32;
static_assert(SLICES == Stream<2>::PARTS);  // a part of the copies goes out with each slice

struct Fragments {
    unsigned row[STRIPS][4];
    unsigned column[GROUPS / 2][4];  // of groups 2 g and 2 g + 1
};

// The addresses that a lane passes to load_matrices, before the offsets of strip, group and slice.
struct Lines {
    unsigned row, column;
    int row_piece, column_piece;  // 16-byte pieces, already exclusive-ored with the line

    __device__ __forceinline__ Lines(unsigned shared, int row_line, int column_line, int lane) {
        const int first = lane % 16, second = lane % 8 + lane / 16 * 8;
        row = shared + (row_line + first) * STEP_BYTES;
        column = shared + STEP_SIDE + (column_line + second) * STEP_BYTES;
        row_piece = (lane / 16) ^ (lane % 8);
        column_piece = (lane / 8 % 2) ^ (lane % 8);
    }

    __device__ __forceinline__ void load(Fragments& to, int slice) const {
#pragma unroll
        for (int s = 0; s < STRIPS; ++s)
            load_matrices(to.row[s], row + s * 16 * STEP_BYTES + ((row_piece ^ (2 * slice)) << 4));
#pragma unroll
        for (int g = 0; g < GROUPS / 2; ++g)
            load_matrices(to.column[g], column + g * 16 * STEP_BYTES + ((column_piece ^ (2 * slice)) << 4));
    }
};

// to += a b of 16 x 8.
#define CONTRASTILE_MMA(shape, kind)                                                                         \
    asm("mma.sync.aligned." shape ".row.col.f32." kind "." kind ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "  \
        "{%8, %9}, {%0, %1, %2, %3};"                                                                        \
        : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])                                                 \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

template <class T>
struct Half {
    using Type = T;

    // The word of features as the products read it.
    static __device__ __forceinline__ unsigned word(unsigned two) { return two; }

    static __device__ __forceinline__ void add(float* to, const unsigned (&a)[4], unsigned b0, unsigned b1) {
        if constexpr (IS_BFLOAT16<T>)
            CONTRASTILE_MMA("m16n8k16", "bf16");
        else
            CONTRASTILE_MMA("m16n8k16", "f16");
    }

    template <int STAGES>
    static __device__ __forceinline__ void multiply(Stream<STAGES>& stream, int row_line, int column_line, int lane,
                                                    Accumulators& to) {
        const Lines lines(stream.ready(), row_line, column_line, lane);
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            Fragments fragments;
            lines.load(fragments, slice);
            stream.copy(slice);
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int g = 0; g < GROUPS; ++g)
                    add(to[s] + 4 * g, fragments.row[s], fragments.column[g / 2][g % 2 * 2],
                        fragments.column[g / 2][g % 2 * 2 + 1]);
        }
    }
};

// One chain of fused multiply-adds per element, in the order of the features.
struct Ieee {
    using Type = float;

    template <int STAGES>
    static __device__ __forceinline__ void multiply(Stream<STAGES>& stream, int row_line, int column_line, int lane,
                                                    Accumulators& to) {
        const unsigned shared = stream.ready();
#pragma unroll
        for (int part = 0; part < Stream<STAGES>::PARTS; ++part) stream.copy(part);
        const int row = row_line + lane / 4, column = column_line + 2 * (lane % 4);
        // the exclusive or of place_of repeats every 8 lines
        const unsigned rows = shared + row * STEP_BYTES, columns = shared + STEP_SIDE + column * STEP_BYTES;
#pragma unroll 1
        for (int piece = 0; piece < STEP_BYTES / 16; ++piece) {
            float4 a[STRIPS][2];
            for_each_row<STRIPS>([&](int s, int q) {
                a[s][q] = four(rows + (16 * s + 8 * q) * STEP_BYTES + ((piece ^ (row & 7)) << 4));
            });
#pragma unroll
            for (int g = 0; g < GROUPS; ++g)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float4 b = four(columns + (8 * g + c) * STEP_BYTES + ((piece ^ ((column + c) & 7)) << 4));
                    for_each_row<STRIPS>([&](int s, int q) {
                        float& sum = to[s][4 * g + 2 * q + c];
                        sum = fmaf(a[s][q].x, b.x, sum);
                        sum = fmaf(a[s][q].y, b.y, sum);
                        sum = fmaf(a[s][q].z, b.z, sum);
                        sum = fmaf(a[s][q].w, b.w, sum);
                    });
                }
        }
    }

    static __device__ __forceinline__ float4 four(unsigned from) {
        float4 x;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(from));
        return x;
    }
};

// Products of float32 rounded to nearest tf32.
struct Tf32 {
    using Type = float;

    // Rounds to nearest, ties away. Tensor cores alone would truncate, and all errors would have one sign.
    static __device__ __forceinline__ unsigned word(unsigned x) {
        unsigned y;
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
        return y;
    }

    static __device__ __forceinline__ void add(float* to, const unsigned (&a)[4], unsigned b0, unsigned b1) {
        CONTRASTILE_MMA("m16n8k8", "tf32");
    }

    template <int STAGES>
    static __device__ __forceinline__ void multiply(Stream<STAGES>& stream, int row_line, int column_line, int lane,
                                                    Accumulators& to) {
        const Lines lines(stream.ready(), row_line, column_line, lane);
#pragma unroll
        for (int slice = 0; slice < SLICES; ++slice) {
            Fragments fragments;
            lines.load(fragments, slice);
            stream.copy(slice);
#pragma unroll
            for (int s = 0; s < STRIPS; ++s)
#pragma unroll
                for (int i = 0; i < 4; ++i) fragments.row[s][i] = word(fragments.row[s][i]);
#pragma unroll
            for (int g = 0; g < GROUPS; ++g) {
                unsigned b[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) b[i] = word(fragments.column[g / 2][g % 2 * 2 + i]);
#pragma unroll
                for (int s = 0; s < STRIPS; ++s) add(to[s] + 4 * g, fragments.row[s], b[0], b[1]);
            }
        }
    }
};

// The dots of a warp's part of the next tile.
template <class P, int STAGES>
__device__ __forceinline__ void tile_of_dots(Stream<STAGES>& stream, const Thread& thread, Accumulators& to) {
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
#pragma unroll
        for (int i = 0; i < 4 * GROUPS; ++i) to[s][i] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < stream.steps; ++step) {
        P::multiply(stream, thread.row_line, thread.column_line, thread.lane, to);
        stream.sent();
    }
}

}  // namespace contrastile
