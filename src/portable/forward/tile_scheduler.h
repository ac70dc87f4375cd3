// How a forward launch is divided into tiles, and the tile of each CTA. The tiles of a head are in
// sequence, the last rows first, since under a causal mask their tile is the longest; the splits of
// a tile's keys are adjacent.
#pragma once
#include <cstdint>

#include "math/host_device.h"

namespace tea::portable {

struct TileIndex {
  int64_t number;  // among all tiles of the launch
  int64_t batch;
  int64_t first;  // the first row; with packed heads row * pack + head of the group
  int head;       // the first query head
  int split;
};

struct TileScheduler {
  int64_t row_blocks, heads;  // heads: of Q, or where heads are packed of K and V
  int rows;                   // of a tile
  int pack;                   // query heads in the rows of one tile
  int splits;                 // of the keys of a tile, which are computed at once
  // Splits with fixed bounds: split n begins at key block n * split_blocks. A launch computes
  // `splits` of them from first_split on. 0: the blocks of a tile are divided evenly.
  int split_blocks = 0, first_split = 0;

  TEA_HOST_DEVICE bool is_split() const { return splits > 1 || split_blocks > 0; }
  constexpr int64_t tiles(int64_t batch) const { return batch * heads * row_blocks; }
  constexpr int64_t ctas(int64_t batch) const { return tiles(batch) * splits; }

  // Divides in 32 bits, which takes fewer instructions, where the numbers fit.
  TEA_HOST_DEVICE TileIndex at(int64_t cta) const {
    return cta < int64_t{1} << 31 && row_blocks < int64_t{1} << 31 ? index<uint32_t>(cta)
                                                                   : index<uint64_t>(cta);
  }
  template <class Number>
  TEA_HOST_DEVICE TileIndex index(int64_t cta) const {
    const auto all = static_cast<Number>(cta);
    const Number number = splits == 1 ? all : all / static_cast<Number>(splits);
    const Number rest = number / static_cast<Number>(row_blocks);
    const Number batch = rest / static_cast<Number>(heads);
    const auto row_block = row_blocks - 1 - (number - rest * row_blocks);
    return {static_cast<int64_t>(number), static_cast<int64_t>(batch),
            static_cast<int64_t>(row_block) * rows, static_cast<int>(rest - batch * heads) * pack,
            static_cast<int>(all - number * splits)};
  }
};

}  // namespace tea::portable
