// The order in which a backward run visits its tiles.
#pragma once
#include <algorithm>
#include <cstdint>

#include "hopper/backward/config.h"
#include "math/mask.h"

namespace tea::hopper::backward {

// Key heads, or parts of them, are counted over all sequences.
struct Interleaving {
  int heads_at_once;
  // So many heads begin with the last key block, the others with the first one. A multiple of
  // `parts`: the parts of a key head add to dK and dV in order, so that they must visit its key
  // blocks in the same order, or a tile could wait for one of a higher number.
  int descending_heads;
};

// The tiles of a head that run at the same time add to dQ in order, so that of tiles that begin at
// the same time the last one waits for all others: few heads suit tiles of many steps only. More
// heads than needed cost power: their Q, dO and dQ exceed L2, and with 16 heads of 16384 rows DRAM
// moved 1.3 TB/s, with 4 heads 0.2 (measured). Tiles of 256 steps together fit in L2. Of tiles with
// 8 steps these would belong to 32 heads; 20 were faster at each of four shapes (1024 causal
// rows of d = 128: 4 %), where DRAM wrote 320 MB with 32 heads and 269 with 24. Of tiles with 4
// steps 32 were faster.
//
// Under a causal mask tiles of the first key blocks are long. Where these come first, tiles that
// began one behind the other end at about the same time, and those that follow wait again. From the
// last key block on they end one behind the other, and those that follow need not wait; but the
// tiles of a head are then at different rows, all of which must fit in L2. Otherwise there should
// be 8 query heads, whose tiles end at different times. The last heads begin with the long tiles,
// so that all SMs finish together.
inline Interleaving interleave(const AttentionArguments& a, int tile, int parts) {
  const int block_m = kTiles[tile].block_m, heads_per_tile = a.heads_q / (a.heads_kv * parts);
  const int64_t heads = int64_t{a.heads_kv} * parts * a.batch;
  const Band band = tea::band(a.mask, 0, 0, 0);
  const bool left = band.lo > -kUnbounded, right = band.hi < kUnbounded;
  int64_t rows = a.queries.max_seqlen;  // that attend to a key, in the mean over long sequences
  if (left && right)
    rows = std::min(rows, band.hi - band.lo + kBlockN);
  else if (left || right)
    rows /= 2;
  const int64_t steps = heads_per_tile * ((rows + block_m - 1) / block_m);
  const int64_t by_steps = 256 / std::max<int64_t>(steps, 1);
  const bool descends = right && !left && by_steps > 0;
  const int64_t fewest = descends ? 1 : (left || right ? 8 : 2) / heads_per_tile;
  const int64_t limit = steps < 8 ? 32 : 20;
  const int64_t most = std::min(std::max({by_steps, fewest, int64_t{1}}), limit);
  const int64_t at_once = std::clamp<int64_t>(heads, 1, most);
  const int64_t descending = descends ? std::max<int64_t>(heads - at_once, 0) / parts * parts : 0;
  return {static_cast<int>(at_once), static_cast<int>(descending)};
}

}  // namespace tea::hopper::backward
