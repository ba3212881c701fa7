// The walk of a persistent grid over the tiles of a chunk: static, so that every role finds the same tiles by itself.
#pragma once

#include "arguments.cuh"

namespace contrastile {

struct Place {
    int row, column;  // first row and column of a tile inside the chunk
};

// Clusters of two blocks take pairs of tile rows. Bands of `band` pairs are walked down first, then across, so that
// clusters at work at the same time share columns and rows in the L2 cache.
template <int BM, int BN>
struct Walk {
    unsigned row_pairs, band, band_tiles, clusters, first, rank;
    int count;

    __device__ __forceinline__ Walk(const Chunk& chunk, unsigned band_, unsigned rank_)
        : row_pairs((chunk.height + 2 * BM - 1) / (2 * BM)),
          band(band_),
          clusters(gridDim.x / 2),
          first(blockIdx.x / 2),
          rank(rank_) {
        const unsigned column_tiles = (chunk.width + BN - 1) / BN;
        band_tiles = band * column_tiles;
        const unsigned tiles = row_pairs * column_tiles;
        count = first < tiles ? (tiles - first + clusters - 1) / clusters : 0;
    }

    // Tile number `index` of this block's. Holds two integer divisions: call it where products hide them.
    __device__ __forceinline__ Place at(int index) const {
        const unsigned tile = first + index * clusters, number = tile / band_tiles;
        const unsigned above = number * band, inside = tile - number * band_tiles;
        const unsigned high = above < row_pairs ? min(band, row_pairs - above) : 1;  // past the end: any place
        const unsigned across = inside / high, pair = above + inside - across * high;
        return {static_cast<int>((2 * pair + rank) * BM), static_cast<int>(across * BN)};
    }
};

}  // namespace contrastile
