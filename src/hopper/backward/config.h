// Tile configurations of the backward kernels, and the one that serves a problem. To add a
// configuration, add it to kTiles.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>

#include "gpu/arguments.h"
#include "hopper/device/types.h"

namespace tea::hopper::backward {

// Two consumer warpgroups compute 64 keys each. Per step, a consumer holds 64 x block_m scores and
// as many gradients of probabilities in registers, and a 64 x 64 part of dQ.
struct TileConfig {
  int dim;                 // largest head dimension; TMA fills smaller ones up with zeros
  int block_m;             // query rows of a step
  bool ping_pong = false;  // one consumer's exponentials overlap the other one's products
  int q_stages = 2, dout_stages = 2, dq_stages = 3;  // pipeline depths
};

inline constexpr int kBlockN = 128;  // keys of a tile

// In the order in which find_tile() looks for a configuration. block_m * dim is at most 64 * 128,
// which bounds the registers and the shared memory that a step needs.
// clang-format off
inline constexpr TileConfig kTiles[] = {
    {.dim = 64, .block_m = 128, .ping_pong = true},
    {.dim = 96, .block_m = 64},
    {.dim = 128, .block_m = 64},
};
// clang-format on
inline constexpr int kNumTiles = static_cast<int>(std::size(kTiles));

// Gradients are accumulated in memory in units of 64 columns (workspace.h).
constexpr int units_per_row(int dim) { return (dim + 63) / 64; }

// The template argument of a kernel.
struct KernelConfig {
  TileConfig tile;
  Type type;
};

// The first configuration that serves the head dimensions, or -1.
inline int find_tile(int dim, int dim_v) {
  const auto serves = [&](const TileConfig& c) { return dim <= c.dim && dim_v <= c.dim; };
  const TileConfig* found = std::find_if(std::begin(kTiles), std::end(kTiles), serves);
  return found == std::end(kTiles) ? -1 : static_cast<int>(found - kTiles);
}

// The heads of a group of query heads may be divided among several tiles, whose dK and dV are then
// accumulated in memory: where a tile would have more than two heads, since four and eight were
// slower from 2048 rows on, or where whole groups would make too few tiles for the SMs to finish
// together. The latter limit, about two tiles for each of 132 SMs, is a constant, so that the bits
// of a result do not depend on the device.
inline constexpr int kMostHeadsPerTile = 2;
inline constexpr int64_t kEnoughTiles = 256;
// The query heads of a tile where groups are divided no further than they must be: an odd number is
// not divided.
constexpr int most_heads_per_tile(int group) {
  while (group % 2 == 0 && group > kMostHeadsPerTile) group /= 2;
  return group;
}
inline int group_parts(const AttentionArguments& a) {
  const int64_t blocks = a.keys.form == TEA_RAGGED
                             ? a.keys.tokens / kBlockN
                             : (a.keys.max_seqlen + kBlockN - 1) / kBlockN * a.batch;
  const int64_t tiles = std::max<int64_t>(blocks, 1) * a.heads_kv;
  const int group = a.heads_q / a.heads_kv;
  int parts = 1;
  while (group % (2 * parts) == 0 &&
         (group / parts > kMostHeadsPerTile || tiles * parts < kEnoughTiles))
    parts *= 2;
  return parts;
}

}  // namespace tea::hopper::backward
