// Tile configurations of the forward kernels, and the kernel that serves a problem. To add a
// configuration, add it to the three tables; all of its kernels are compiled.
#pragma once
#include <algorithm>
#include <iterator>

#include "gpu/arguments.h"
#include "math/load_store.h"
#include "portable/forward/tile_scheduler.h"

namespace tea::portable {

struct TileConfig {
  int dim, dim_v;   // largest head dimensions; loads fill smaller ones up with zeros
  int warps_m;      // warps along the rows of a tile
  int mma_m;        // each warp computes 16 * mma_m rows
  int warps_n = 1;  // warps along the columns of O
  int block_n;      // keys of a block of K and V
  int ctas_per_sm;  // that the registers must allow
  int piece = 0;    // columns of K and V in shared memory at a time; 0: all

  constexpr int pieces() const { return piece ? dim / piece : 1; }
  constexpr int block_m() const { return 16 * warps_m * mma_m; }
};

// In the order in which select_kernel() looks for a configuration that serves the head dimensions.
// Measured (docs/kernels/portable.md), within 99 KiB of shared memory, which every GPU from sm_80
// on has: more rows per warp until O and the scores fill 255 registers, since each fragment of K
// and V serves all of them; then more keys until spills cost time. Head dimensions above 512, which
// only inference has, do not leave room for whole rows of K and V: these pass through shared memory
// in pieces of 256 columns. There are only general kernels of them.
// clang-format off
inline constexpr TileConfig kPlainTiles[] = {
    {.dim = 64, .dim_v = 64, .warps_m = 4, .mma_m = 2, .block_n = 64, .ctas_per_sm = 3},
    {.dim = 128, .dim_v = 128, .warps_m = 4, .mma_m = 2, .block_n = 64, .ctas_per_sm = 2},
    {.dim = 192, .dim_v = 128, .warps_m = 4, .mma_m = 1, .block_n = 64, .ctas_per_sm = 2},
    {.dim = 256, .dim_v = 256, .warps_m = 4, .mma_m = 1, .block_n = 64, .ctas_per_sm = 2},
    {.dim = 512, .dim_v = 512, .warps_m = 2, .mma_m = 1, .warps_n = 2, .block_n = 32,
     .ctas_per_sm = 1},
};
inline constexpr TileConfig kGeneralTiles[] = {
    {.dim = 64, .dim_v = 64, .warps_m = 4, .mma_m = 1, .block_n = 64, .ctas_per_sm = 2},
    {.dim = 128, .dim_v = 128, .warps_m = 4, .mma_m = 1, .block_n = 64, .ctas_per_sm = 2},
    {.dim = 192, .dim_v = 128, .warps_m = 4, .mma_m = 1, .block_n = 64, .ctas_per_sm = 2},
    {.dim = 256, .dim_v = 256, .warps_m = 4, .mma_m = 1, .block_n = 64, .ctas_per_sm = 1},
    {.dim = 512, .dim_v = 512, .warps_m = 2, .mma_m = 1, .warps_n = 2, .block_n = 32,
     .ctas_per_sm = 1},
    {.dim = 1024, .dim_v = 1024, .warps_m = 2, .mma_m = 1, .warps_n = 4, .block_n = 32,
     .ctas_per_sm = 1, .piece = 256},
};
inline constexpr TileConfig kFp32Tiles[] = {
    {.dim = 64, .dim_v = 64, .warps_m = 4, .mma_m = 1, .block_n = 64, .ctas_per_sm = 1},
    {.dim = 128, .dim_v = 128, .warps_m = 4, .mma_m = 1, .block_n = 32, .ctas_per_sm = 1},
    {.dim = 192, .dim_v = 128, .warps_m = 4, .mma_m = 1, .block_n = 32, .ctas_per_sm = 1},
    {.dim = 256, .dim_v = 256, .warps_m = 2, .mma_m = 1, .warps_n = 2, .block_n = 32,
     .ctas_per_sm = 1},
    {.dim = 512, .dim_v = 512, .warps_m = 1, .mma_m = 1, .warps_n = 4, .block_n = 16,
     .ctas_per_sm = 1},
    {.dim = 1024, .dim_v = 1024, .warps_m = 1, .mma_m = 1, .warps_n = 4, .block_n = 16,
     .ctas_per_sm = 1, .piece = 256},
};
// clang-format on
inline constexpr int kNumPlainTiles = static_cast<int>(std::size(kPlainTiles));
inline constexpr int kNumTiles = static_cast<int>(std::size(kGeneralTiles));
static_assert(std::size(kFp32Tiles) == kNumTiles && kNumPlainTiles <= kNumTiles);

// The plain kernels scale and mask scores, and copy 16 bytes of any tensor at once; the general
// ones serve every problem of their type.
enum class Variant { kPlainBf16, kPlainFp16, kGeneralBf16, kGeneralFp16, kFp8, kFp32 };

constexpr int num_tiles(Variant variant) {
  const bool plain = variant == Variant::kPlainBf16 || variant == Variant::kPlainFp16;
  return plain ? kNumPlainTiles : kNumTiles;
}

// The template argument of a kernel's parts.
struct KernelConfig {
  TileConfig tile;
  int dtype;  // of tiles in shared memory
  bool general, fp8;
};
constexpr KernelConfig kernel_config(int tile, Variant variant) {
  switch (variant) {
    case Variant::kPlainBf16:
      return {kPlainTiles[tile], TEA_BF16, false, false};
    case Variant::kPlainFp16:
      return {kPlainTiles[tile], TEA_FP16, false, false};
    case Variant::kGeneralBf16:
      return {kGeneralTiles[tile], TEA_BF16, true, false};
    case Variant::kGeneralFp16:
      return {kGeneralTiles[tile], TEA_FP16, true, false};
    case Variant::kFp8:
      return {kGeneralTiles[tile], TEA_FP16, true, true};
    case Variant::kFp32:
      break;
  }
  return {kFp32Tiles[tile], TEA_FP32, true, false};
}

// -------------------------------------------------------------------------------------- selection

// The first configuration that serves the head dimensions. A valid problem has at most 1024.
inline int find_tile(int dim, int dim_v) {
  const auto serves = [&](const TileConfig& c) { return dim <= c.dim && dim_v <= c.dim_v; };
  const TileConfig* const found =
      std::find_if(std::begin(kGeneralTiles), std::end(kGeneralTiles), serves);
  return static_cast<int>(found - kGeneralTiles);
}

inline Variant general_variant(const AttentionArguments& a) {
  if (is_fp8(a.q.dtype)) return Variant::kFp8;
  if (a.q.dtype == TEA_FP32) return Variant::kFp32;
  return a.q.dtype == TEA_BF16 ? Variant::kGeneralBf16 : Variant::kGeneralFp16;
}

// Whether a plain kernel can serve the problem. It counts rows and keys in 32 bits.
inline bool is_plain(const AttentionArguments& a, int tile) {
  return tile < kNumPlainTiles && (a.q.dtype == TEA_BF16 || a.q.dtype == TEA_FP16) &&
         a.k.dtype == a.q.dtype && a.keys.form != TEA_PAGED && !has_score_mod(a) &&
         !a.has_dropout && a.scale > 0 && a.q.is_vectorizable && a.k.is_vectorizable &&
         a.v.is_vectorizable && a.o.is_vectorizable && a.queries.max_seqlen < int64_t{1} << 30 &&
         a.keys.max_seqlen < int64_t{1} << 30;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A few CTAs for each SM of a large GPU. The same numbers are used on every GPU, so that results
// are equal bit for bit.
inline constexpr int64_t kMinTiles = 128, kSplitCtas = 256;
// Key blocks of a split; with fewer, combining the splits costs more than it saves.
inline constexpr int64_t kMinSplitBlocks = 8;
// The keys of a split of a batch-invariant problem.
inline constexpr int64_t kInvariantSplit = 2048;

// The tiles of a general kernel. Where queries are few, the heads of a GQA group are packed into a
// tile and keys are split. FP8 needs a row's maximum over all keys, and dropout a single head.
inline TileScheduler make_scheduler(const AttentionArguments& a, const TileConfig& tile) {
  const int rows = tile.block_m(), group = a.heads_q / a.heads_kv;
  const int64_t max_q = a.queries.form == TEA_RAGGED
                            ? std::min(a.queries.max_seqlen, a.queries.tokens)
                            : a.queries.max_seqlen;
  TileScheduler s{.row_blocks = 0, .heads = a.heads_q, .rows = rows, .pack = 1, .splits = 1};
  if (group > 1 && 2 * max_q <= rows && !a.has_dropout) s.pack = group, s.heads = a.heads_kv;
  s.row_blocks = ceil_div(max_q * s.pack, rows);
  const int64_t tiles = s.tiles(a.batch), blocks = ceil_div(a.keys.max_seqlen, tile.block_n);
  if (a.batch_invariant) {
    if (is_fp8(a.q.dtype) || a.keys.max_seqlen <= kInvariantSplit) return s;
    s.split_blocks = static_cast<int>(kInvariantSplit / tile.block_n);
    if (tiles < kMinTiles) s.splits = static_cast<int>(ceil_div(blocks, s.split_blocks));
    return s;
  }
  if (!is_fp8(a.q.dtype) && tiles > 0 && tiles < kMinTiles)
    s.splits = static_cast<int>(
        std::max<int64_t>(1, std::min(ceil_div(kSplitCtas, tiles), blocks / kMinSplitBlocks)));
  return s;
}

// The splits of all launches of a problem, and the rows of the results of earlier launches.
inline int all_splits(const TileScheduler& s, const SequenceLayout& keys) {
  return s.split_blocks ? static_cast<int>(ceil_div(keys.max_seqlen, kInvariantSplit)) : s.splits;
}
inline int64_t earlier_rows(const TileScheduler& s, const SequenceLayout& keys, int64_t batch) {
  return all_splits(s, keys) == s.splits ? 0 : s.tiles(batch) * s.rows;
}

struct Selection {
  int tile;
  Variant variant;
  TileScheduler scheduler;
};

// The kernel that serves a problem, and its tiles. A batch-invariant problem always has a general
// kernel, whose arithmetic is that of no plain one. Otherwise only `variant` and the rows of a tile
// depend on pointers and strides, and not where keys are split.
inline Selection select_kernel(const AttentionArguments& a) {
  const int tile = find_tile(a.dim_qk, a.dim_v);
  const Variant general = general_variant(a);
  TileScheduler scheduler = make_scheduler(a, kernel_config(tile, general).tile);
  if (a.batch_invariant || scheduler.pack > 1 || scheduler.splits > 1 || !is_plain(a, tile))
    return {tile, general, scheduler};
  const int64_t rows = scheduler.row_blocks * scheduler.rows;
  scheduler.rows = kPlainTiles[tile].block_m();
  scheduler.row_blocks = ceil_div(rows, scheduler.rows);
  return {tile, a.q.dtype == TEA_BF16 ? Variant::kPlainBf16 : Variant::kPlainFp16, scheduler};
}

// Rows of the splits' results; none where keys are not split.
inline int64_t split_rows(const TileScheduler& s, int64_t batch) {
  return !s.is_split() ? 0 : s.ctas(batch) * s.rows;
}

}  // namespace tea::portable
