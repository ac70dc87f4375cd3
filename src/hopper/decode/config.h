// Tile configurations of the decoding kernels, the one that serves a problem, and the division of
// keys among CTAs. To add a configuration, add it to kTiles; its kernels are compiled in every
// type.
#pragma once
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>

#include "gpu/arguments.h"
#include "hopper/device/types.h"
#include "math/divide.h"

namespace tea::hopper::decode {

// The unit in which keys are divided among CTAs.
struct BlockShape {
  int keys;
  // Blocks of a CTA at least: with fewer, adding the results of CTAs takes longer.
  int min_share = 1;
  // Where a tile has more parts than max_parts + 1, they are added in two levels: the last share of
  // each group_parts adds the parts of that group to its own, and the share before the tile's last
  // one those of an incomplete group. A batch-invariant problem always has
  // two levels, so that the order does not depend on the number of parts: the sum of a row does not
  // change by parts behind its keys, which are zero and are added first.
  int max_parts = 0, group_parts = 1;
};
// A team of warps loads and computes one block at a time.
inline constexpr BlockShape kBlockShape = {
    .keys = 16, .min_share = 8, .max_parts = 24, .group_parts = 12};
inline constexpr int kBlockN = kBlockShape.keys;

struct TileConfig {
  int dim, dim_v;  // largest head dimensions; smaller ones are filled up with zeros
  int mma_m;       // each warp computes 16 * mma_m packed rows
  int team_warps;  // warps that share the blocks of a team, each with rows of its own
  int teams;       // each computes all rows over key blocks of its own
  int stages;      // blocks of K and V that a team holds in shared memory
  int passes = 1;  // in which the teams' results are added: shared memory holds one pass
  bool has_producers = false;     // a warp for each team that loads its blocks
  bool has_plain_kernel = false;  // see KernelConfig

  constexpr int block_m() const { return 16 * mma_m * team_warps; }
  constexpr int computing_threads() const { return 32 * team_warps * teams; }
  constexpr int threads() const { return computing_threads() + (has_producers ? 32 * teams : 0); }
};

// Two row counts for each pair of head dimensions: 16 rows for a query and one group of heads, and
// 64 for several queries or large groups, which would spill registers at 256. As many stages as
// shared memory holds.
// clang-format off
inline constexpr TileConfig kTiles[] = {
    {.dim = 64, .dim_v = 64, .mma_m = 1, .team_warps = 1, .teams = 8, .stages = 5},
    {.dim = 64, .dim_v = 64, .mma_m = 2, .team_warps = 2, .teams = 4, .stages = 8, .passes = 2},
    {.dim = 128, .dim_v = 128, .mma_m = 1, .team_warps = 1, .teams = 4, .stages = 5,
     .has_producers = true, .has_plain_kernel = true},
    {.dim = 128, .dim_v = 128, .mma_m = 1, .team_warps = 4, .teams = 2, .stages = 8, .passes = 2},
    {.dim = 192, .dim_v = 128, .mma_m = 1, .team_warps = 1, .teams = 4, .stages = 4,
     .has_producers = true},
    {.dim = 192, .dim_v = 128, .mma_m = 1, .team_warps = 4, .teams = 2, .stages = 7, .passes = 2},
    {.dim = 256, .dim_v = 256, .mma_m = 1, .team_warps = 1, .teams = 4, .stages = 3, .passes = 4,
     .has_producers = true},
};
// clang-format on
inline constexpr int kNumTiles = static_cast<int>(std::size(kTiles));

// Of K and V in FP8, whose blocks have half the bytes: more teams, since each must compute its
// blocks in half the time.
// clang-format off
inline constexpr TileConfig kFp8KvTiles[] = {
    {.dim = 64, .dim_v = 64, .mma_m = 1, .team_warps = 1, .teams = 8, .stages = 8},
    {.dim = 128, .dim_v = 128, .mma_m = 1, .team_warps = 1, .teams = 8, .stages = 5, .passes = 2,
     .has_producers = true},
    {.dim = 192, .dim_v = 128, .mma_m = 1, .team_warps = 1, .teams = 8, .stages = 4, .passes = 2},
    {.dim = 256, .dim_v = 256, .mma_m = 1, .team_warps = 1, .teams = 4, .stages = 5, .passes = 4},
};
// clang-format on
inline constexpr int kNumFp8KvTiles = static_cast<int>(std::size(kFp8KvTiles));

// The template argument of a kernel's parts.
struct KernelConfig {
  TileConfig tile;
  Type type;        // of Q
  bool has_fp8_kv;  // K and V are FP8, E4M3 or E5M2
  // Only for dense K, V and queries that exist and whose lengths the host knows, without
  // modifications of scores, and not batch-invariant: less code, because the instruction cache is
  // cold, and short runs spend much of their time in instruction fetch.
  bool is_plain = false;

  // The operands' type. FP8 becomes fp16 by one instruction, exactly; bf16 takes four times as
  // many.
  constexpr Type operand_type() const { return has_fp8_kv ? Type::kFp16 : type; }
  constexpr bool scales_q() const { return operand_type() != type; }  // see load_q.cuh
};

// The configurations that serve K and V of a type.
inline std::span<const TileConfig> tiles_of(bool has_fp8_kv) {
  return has_fp8_kv ? std::span<const TileConfig>(kFp8KvTiles)
                    : std::span<const TileConfig>(kTiles);
}

// -------------------------------------------------------------------------------------- selection

// Whether K and V alone are FP8.
inline bool has_fp8_kv(const AttentionArguments& a) { return a.k.dtype != a.q.dtype; }

// The rows of a tile: every query of a sequence with every query head of a group.
inline int64_t packed_rows(const AttentionArguments& a) {
  return a.queries.max_seqlen * (a.heads_q / a.heads_kv);
}

// The most rows of a tile with these head dimensions, 0 if no configuration holds them.
inline int most_rows(bool has_fp8_kv, int dim, int dim_v) {
  int most = 0;
  for (const TileConfig& c : tiles_of(has_fp8_kv))
    if (dim <= c.dim && dim_v <= c.dim_v) most = std::max(most, c.block_m());
  return most;
}
// The first configuration that holds the rows and the head dimensions, or -1.
inline int find_tile(bool has_fp8_kv, int64_t rows, int dim, int dim_v) {
  const std::span<const TileConfig> tiles = tiles_of(has_fp8_kv);
  const auto serves = [&](const TileConfig& c) {
    return rows <= c.block_m() && dim <= c.dim && dim_v <= c.dim_v;
  };
  const auto found = std::find_if(tiles.begin(), tiles.end(), serves);
  return found == tiles.end() ? -1 : static_cast<int>(found - tiles.begin());
}
// A batch-invariant problem always has the configuration with the most rows, because the teams of
// another divide the keys of a tile in another way.
inline int select_tile(const AttentionArguments& a, int64_t rows) {
  const int most = most_rows(has_fp8_kv(a), a.dim_qk, a.dim_v);
  if (a.batch_invariant && rows <= most) rows = most;
  return find_tile(has_fp8_kv(a), rows, a.dim_qk, a.dim_v);
}
inline int select_tile(const AttentionArguments& a) { return select_tile(a, packed_rows(a)); }

// --------------------------------------------------------------------- division of keys among CTAs

// The most CTAs of a launch, one for each SM of the largest GPU.
inline constexpr int kMaxCtas = 144;

// Key blocks of a tile. Tiles without keys count as one block, because they have results too.
TEA_HOST_DEVICE constexpr int tile_blocks(const BlockShape& shape, int64_t rows, int64_t keys) {
  if (rows == 0) return 0;
  return keys == 0 ? 1 : static_cast<int>((keys + shape.keys - 1) / shape.keys);
}

// The keys of a part of a tile of a batch-invariant problem. Each part has a CTA, so that the parts
// depend on nothing but the keys of the tile.
inline constexpr int kInvariantKeys = 1024;

// Key blocks, one tile after the other, in `count` shares of equal size: share i has the blocks
// from begin(i) to begin(i + 1). In a batch-invariant problem a share is a part of a tile, and
// parts are counted instead of blocks.
struct Shares {
  int64_t blocks;
  int count;

  Shares() = default;
  TEA_HOST_DEVICE Shares(const BlockShape& shape, int64_t all_blocks, int max_count)
      : blocks(all_blocks) {
    const int64_t most = (blocks + shape.min_share - 1) / shape.min_share;
    count = static_cast<int>(most < max_count ? most : max_count);
  }
  TEA_HOST_DEVICE int64_t begin(int share) const { return quotient(blocks * share, count); }
  // The share that contains a block.
  TEA_HOST_DEVICE int owner(int64_t block) const {
    return static_cast<int>(quotient((block + 1) * count - 1, blocks));
  }
};

// Adjacent tiles of a sequence (heads of K and V) that have a CTA each for the same share, so that
// the CTAs read the rows of a key, which are adjacent in most caches, at about the same time. The
// number divides `tiles`, and leaves few of at most `ctas` CTAs without work.
inline int tiles_at_once(int tiles, int ctas) {
  int count = std::min(tiles, ctas);
  while (count > 1 && (tiles % count || ctas % count > ctas / 16)) --count;
  return count;
}

// The most key blocks that the sequences can have, of one tile each: the bound from which the
// number of CTAs is planned.
inline int64_t max_blocks(const BlockShape& shape, const AttentionArguments& a) {
  const int64_t blocks =
      a.batch * std::max<int64_t>(1, (a.keys.max_seqlen + shape.keys - 1) / shape.keys);
  if (a.keys.form != TEA_RAGGED) return blocks;
  return std::min(blocks, a.keys.tokens / shape.keys + 2 * a.batch);
}
// Shares of which each has whole tiles, or each tile whole shares, so that fewer results are added:
// that number, if there is one that leaves few of `max_count` CTAs without work.
inline int even_shares(int64_t tiles, int max_count) {
  for (int count = max_count; count > max_count - max_count / 16; --count)
    if (tiles % count == 0 || (tiles > 0 && count % tiles == 0)) return count;
  return max_count;
}
// The CTAs of a launch.
inline int num_ctas(const BlockShape& shape, const AttentionArguments& a, int tiles, int at_once,
                    int max_ctas) {
  if (a.batch_invariant) return static_cast<int>(max_blocks({.keys = kInvariantKeys}, a) * tiles);
  const int groups = tiles / at_once, most = max_ctas / at_once;
  const int shares = even_shares(a.batch * groups, most);
  return Shares(shape, max_blocks(shape, a) * groups, shares).count * at_once;
}
// At least num_ctas(), whatever the number of tiles at once is.
inline int most_ctas(const BlockShape& shape, const AttentionArguments& a, int tiles) {
  if (a.batch_invariant) return num_ctas(shape, a, tiles, tiles, 0);
  const int64_t of_tile = (max_blocks(shape, a) + shape.min_share - 1) / shape.min_share;
  return static_cast<int>(std::min<int64_t>(of_tile * tiles, kMaxCtas));
}

// -------------------------------------------------------------------------------------- workspace

// A flag for each CTA, then for each CTA the unnormalised O of one tile, and the maximum and the
// sum of each row.
constexpr int64_t flag_bytes(int ctas) { return (int64_t{ctas} * 8 + 2047) / 2048 * 2048; }
constexpr int64_t slot_floats(int block_m, int dim_v) { return block_m * (dim_v + 2); }
constexpr int64_t slot_floats(const TileConfig& c) { return slot_floats(c.block_m(), c.dim_v); }

// Of a launch of at most `ctas` CTAs. One CTA alone shares no tile.
constexpr uint64_t workspace_bytes(int64_t slot_floats, int ctas) {
  return ctas < 2 ? 0 : static_cast<uint64_t>(flag_bytes(ctas) + ctas * slot_floats * 4);
}

}  // namespace tea::hopper::decode
