// How a tile of G reaches global memory on sm_90a: from registers to a slab of shared memory, then by the copy engine.
//
// A slab is 16 rows by 64 columns of 16-bit numbers, 128 bytes a row, in the 128-byte swizzle: the 16-byte piece p of
// row r lies where piece p ^ (r % 8) would. Each warp has BUFFERS slabs and fills one while the copy engine reads others.
#pragma once

#include "pipeline_sm90.cuh"

namespace contrastile {

constexpr int SLAB_COLUMNS = 64, SLABS = BN / SLAB_COLUMNS, SLAB_GROUPS = SLAB_COLUMNS / 8;
constexpr int SLAB_BYTES = 16 * SLAB_COLUMNS * 2;

// A slab is opened, filled by four calls of `put`, and sent. Slab n uses buffer n % BUFFERS. Several may be open at a
// time; they are opened and sent in order.
template <int BUFFERS>
class SlabWriter {
  public:
    static constexpr int WARP_SPACE = BUFFERS * SLAB_BYTES, SPACE = 2 * CONSUMER_WARPS * WARP_SPACE;

    // base: this warp's WARP_SPACE, aligned to SWIZZLE_ATOM.
    __device__ __forceinline__ SlabWriter(const TensorMap& map, unsigned base, int lane)
        : map_(map), base_(base), mine_(base + lane % 16 * 128 + ((lane / 16 ^ lane % 8) << 4)), first_(lane == 0) {}

    // Waits until the copy that reads the slab's buffer is over; call it before the first store. UNSENT earlier slabs are
    // still open: they have started no copy. Copies end in their order.
    template <int UNSENT = 0>
    __device__ __forceinline__ void open() const {
        static_assert(UNSENT < BUFFERS, "as many slabs are open as there are buffers");
        if (first_) wait_copies_read<BUFFERS - 1 - UNSENT>();
        __syncwarp();
    }

    // Two neighbouring groups of 8 columns: values[2 h + q] holds the thread's row q of group 2 pair + h.
    __device__ __forceinline__ void put(int slab, int pair, const unsigned (&values)[4]) const {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         (mine_ ^ pair << 5) + slab % BUFFERS * SLAB_BYTES),
                     "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
                     : "memory");
    }

    // Copies the slab to (row, column) of G. The copy writes nothing outside G, except to fill a row's last 16 bytes.
    __device__ __forceinline__ void send(int slab, int row, int column) const {
        publish_to_copies();
        __syncwarp();
        if (first_) copy_out(map_, column, row, base_ + slab % BUFFERS * SLAB_BYTES);
    }

    __device__ __forceinline__ void drain() const {
        if (first_) wait_copies_written();
    }

  private:
    const TensorMap& map_;
    unsigned base_, mine_;
    bool first_;
};

}  // namespace contrastile
