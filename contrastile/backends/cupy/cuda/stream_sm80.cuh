// The features of one tile after another, streamed into shared memory by cp.async.
//
// A tile is SIDE rows by SIDE columns of X. A step brings STEP_BYTES of features of each of its rows and columns: 64 of
// two bytes or 32 of four. A block works through every gridDim.x-th tile, and the stream runs STAGES - 1 steps ahead of
// the products, across the end of a tile: while the epilogue works, the first steps of the next tile arrive.
#pragma once

#include "arguments.cuh"

namespace contrastile {

constexpr int SIDE = 128;
constexpr int STEP_BYTES = 128;
constexpr int STEP_SIDE = SIDE * STEP_BYTES;  // bytes of one side of one step
constexpr int BLOCK = 128;                    // threads: 2 x 2 warps, each 64 rows by 64 columns of the tile
constexpr int STRIPS = 4;                     // strips (see pairs.cuh) of a warp: 16 rows each
constexpr int GROUPS = 8;                     // groups of 8 columns of a warp
constexpr int WARP_SIDE = 64;

struct Tile {
    int row, column;  // first row and column inside the chunk
};

// The order of the tiles: bands of `band` tile rows, each walked down and then across. Blocks that run at the same time
// then share rows and columns in the L2 cache.
struct Order {
    int row_tiles, column_tiles, band;

    __device__ __forceinline__ Order(const Chunk& chunk, int wanted)
        : row_tiles((chunk.height + SIDE - 1) / SIDE),
          column_tiles((chunk.width + SIDE - 1) / SIDE),
          band(max(wanted, 1)) {}

    __device__ __forceinline__ int tiles() const { return row_tiles * column_tiles; }

    __device__ __forceinline__ Tile at(int tile) const {
        const int top = tile / (band * column_tiles) * band, inside = tile - top * column_tiles;
        const int height = min(row_tiles - top, band);
        return {(top + inside % height) * SIDE, inside / height * SIDE};
    }
};

// Copies sixteen bytes to shared memory: `bytes` are read, the rest are zero.
__device__ __forceinline__ void copy_async(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// Copies sixteen bytes if `wanted`. A predicate instead of a branch lets the products' instructions move past it.
__device__ __forceinline__ void copy_async_if(bool wanted, unsigned to, const void* from) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::"r"(to),
                 "l"(from), "r"(static_cast<int>(wanted)));
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }

// Waits until all but the latest PENDING groups of this thread's copies have arrived.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// The offset of 16-byte piece `piece` (0..7) of line `line` inside a side of a step. The exclusive or spreads eight
// neighbouring lines over all banks, for the copies and for the products' reads.
__device__ __forceinline__ int place_of(int line, int piece) { return line * STEP_BYTES + ((piece ^ (line & 7)) << 4); }

// One block's stream. Shared memory: STAGES steps, rows' side first.
//
// In each step call ready(), then the products of its stage with the PARTS copies of a later step spread among them, then
// sent(). The copies overwrite the stage of the previous step, which no thread reads any more once ready() returns.
template <int STAGES>
class Stream {
public:
    static constexpr int PARTS = 4;
    const int steps;  // of a tile, at least 1

    __device__ __forceinline__ Stream(const Features& features, const Chunk& chunk, int element_bytes, unsigned shared)
        : steps((features.depth * element_bytes + STEP_BYTES - 1) / STEP_BYTES),
          order(chunk, features.band),
          features(features),
          chunk(chunk),
          element_bytes(element_bytes),
          shared(shared),
          tile(blockIdx.x) {
        locate();
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) {
            copy_with_care();
#pragma unroll
            for (int part = 0; part < PARTS; ++part) copy(part);
            sent();
        }
    }

    // Waits for the oldest step and returns the shared address of its stage.
    __device__ __forceinline__ unsigned ready() {
        wait_copies<STAGES - 2>();
        __syncthreads();
        const unsigned stage = shared + oldest * (2 * STEP_SIDE);
        oldest = oldest + 1 == STAGES ? 0 : oldest + 1;
        copy_with_care();
        return stage;
    }

    // Starts a part of the copies of one step if all of the step is inside. Otherwise copy_with_care has done it.
    __device__ __forceinline__ void copy(int part) {
        const bool of_rows = part < PARTS / 2;
        const int first = part % (PARTS / 2) * COPIES;
        const long long apart = line_bytes(of_rows) * LINES_APART;
        const char* from = (of_rows ? row_from : column_from) + first * apart;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) copy_async_if(inside, place(of_rows, first + i), from + i * apart);
    }

    // Ends the copies of one step. A group is committed even when no tile is left, so that wait_copies counts steps.
    __device__ __forceinline__ void sent() {
        commit_copies();
        newest = newest + 1 == STAGES ? 0 : newest + 1;
        row_from += STEP_BYTES;
        column_from += STEP_BYTES;
        inside = whole && depth_left() >= 2 * STEP_BYTES;
        if (++step == steps) {
            tile += gridDim.x;
            locate();
        }
    }

private:
    // a thread copies the same 16-byte piece of every LINES_APART-th line of either side
    static constexpr int LINES_APART = BLOCK / 8, COPIES = SIDE / LINES_APART * 2 / PARTS;

    const Order order;
    const Features& features;
    const Chunk& chunk;
    const int element_bytes;
    const unsigned shared;
    int tile, step;                      // what is copied next
    int newest = 0, oldest = 0;          // the stage it goes to, and the stage that is used next
    const char *row_from, *column_from;  // this thread's piece of its first row and column
    bool whole, inside;                  // whether all of the tile, all of the step is inside the chunk

    __device__ __forceinline__ long long line_bytes(bool of_rows) const {
        return (of_rows ? features.row_stride : features.column_stride) * element_bytes;
    }

    // Bytes of features left, from the step that is copied next.
    __device__ __forceinline__ int depth_left() const { return features.depth * element_bytes - step * STEP_BYTES; }

    // Shared address of the i-th piece that this thread copies of a side.
    __device__ __forceinline__ unsigned place(bool of_rows, int i) const {
        return shared + newest * (2 * STEP_SIDE) + place_of(threadIdx.x / 8, threadIdx.x % 8) +
               (of_rows ? 0 : STEP_SIDE) + i * LINES_APART * STEP_BYTES;
    }

    // All copies of a step that is partly outside. Lines outside the chunk and features past the depth become zero, and
    // nothing is read for them.
    __device__ __forceinline__ void copy_with_care() {
        if (inside || tile >= order.tiles()) return;
        const int line = threadIdx.x / 8, piece = threadIdx.x % 8;
        const int bytes = min(max(depth_left() - 16 * piece, 0), 16);
        const Tile from = order.at(tile);
#pragma unroll 1
        for (int i = 0; i < SIDE / LINES_APART; ++i) {
            const int at = line + i * LINES_APART;
            copy_async(place(true, i), row_from + line_bytes(true) * LINES_APART * i,
                       from.row + at < chunk.height ? bytes : 0);
            copy_async(place(false, i), column_from + line_bytes(false) * LINES_APART * i,
                       from.column + at < chunk.width ? bytes : 0);
        }
    }

    __device__ __forceinline__ void locate() {
        step = 0;
        // past the last tile both stay false: sent() goes on, and nothing may be read
        inside = whole = false;
        if (tile >= order.tiles()) return;
        const Tile at = order.at(tile);
        const int line = threadIdx.x / 8, piece = threadIdx.x % 8;
        row_from = static_cast<const char*>(features.rows) + (chunk.row + at.row + line) * line_bytes(true) + 16 * piece;
        column_from = static_cast<const char*>(features.columns) +
                      (chunk.column + at.column + line) * line_bytes(false) + 16 * piece;
        whole = at.row + SIDE <= chunk.height && at.column + SIDE <= chunk.width;
        inside = whole && depth_left() >= STEP_BYTES;
    }
};

}  // namespace contrastile
