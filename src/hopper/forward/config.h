// Tile configurations of the forward kernels, the kernels that exist, and the one that serves a
// problem. To add a configuration, add it to kTiles, to is_instantiated() and to select_kernel().
#pragma once
#include <cstdint>
#include <iterator>

#include "gpu/arguments.h"
#include "hopper/device/types.h"

namespace tea::hopper {

struct TileConfig {
  int dim, dim_v;                  // largest head dimensions; TMA fills smaller ones up with zeros
  int consumer_warpgroups;         // each computes 64 query rows
  int block_n;                     // keys of a block of K and V
  int q_stages, kv_stages = 2;     // pipeline depths
  bool ping_pong = false;          // consumers alternate between wgmma and softmax
  bool rescale_before_pv = false;  // rescale O while Q K^T runs, else when P V has completed
  bool skips_blocks = false;       // a consumer skips blocks that are masked for all of its rows
  bool staggered = false;         // skipped blocks take no ping-pong slot: consumers may be a block
                                  // apart
  bool tma_store = false;         // O is stored through shared memory by TMA, if there is room
  bool half_first_block = false;  // a warp whose rows all end in the first half of a tile's first
                                  // block computes no exponentials for the second half

  constexpr int block_m() const { return 64 * consumer_warpgroups; }
};

// In the order in which select_kernel() looks for a configuration that serves the head dimensions.
// clang-format off
inline constexpr TileConfig kTiles[] = {
    {.dim = 64, .dim_v = 64, .consumer_warpgroups = 3, .block_n = 128, .q_stages = 2,
     .ping_pong = true, .skips_blocks = true, .tma_store = true},
    {.dim = 96, .dim_v = 96, .consumer_warpgroups = 2, .block_n = 128, .q_stages = 2,
     .ping_pong = true, .tma_store = true},
    {.dim = 128, .dim_v = 128, .consumer_warpgroups = 2, .block_n = 128, .q_stages = 2,
     .ping_pong = true, .tma_store = true},
    {.dim = 192, .dim_v = 128, .consumer_warpgroups = 2, .block_n = 128, .q_stages = 1},
    {.dim = 192, .dim_v = 192, .consumer_warpgroups = 2, .block_n = 112, .q_stages = 1,
     .rescale_before_pv = true},
    {.dim = 256, .dim_v = 256, .consumer_warpgroups = 2, .block_n = 80, .q_stages = 1,
     .rescale_before_pv = true, .skips_blocks = true},
    // For short sequences: taller tiles at 64, and narrower blocks at 256 under a mask.
    {.dim = 64, .dim_v = 64, .consumer_warpgroups = 4, .block_n = 64, .q_stages = 2,
     .kv_stages = 4, .ping_pong = true, .skips_blocks = true, .tma_store = true},
    {.dim = 256, .dim_v = 256, .consumer_warpgroups = 2, .block_n = 64, .q_stages = 1,
     .rescale_before_pv = true, .skips_blocks = true},
};
// clang-format on
inline constexpr int kNumTiles = static_cast<int>(std::size(kTiles));
inline constexpr int kTile64 = 0, kTile128 = 2, kTile192 = 3, kTile256 = 5, kTile64Short = 6,
                     kTile256Short = 7;

// The features of a kernel in addition to softmax(scale Q K^T) V. Each variant includes masking,
// except for the first.
enum class Variant {
  kUnmasked,
  kMasked,
  kSoftcap,       // soft cap and no other modification
  kDropout,       // dropout and no other modification
  kGeneral,       // any modification except a bias
  kBias,          // any modification
  kPaged,         // keys and values in pages, and no modification
  kPagedGeneral,  // in pages, and any modification except a bias
};

constexpr bool is_paged(Variant v) { return v == Variant::kPaged || v == Variant::kPagedGeneral; }
constexpr bool is_general(Variant v) {
  return v == Variant::kGeneral || v == Variant::kBias || v == Variant::kPagedGeneral;
}

// The tile configuration as a variant uses it. The values were found by measurement, except that a
// bias needs shared memory, which a narrower block or a direct store of O makes available.
constexpr TileConfig tile_config(int tile, Variant variant) {
  TileConfig c = kTiles[tile];
  if ((variant == Variant::kMasked || variant == Variant::kPaged) && c.dim == 64) {
    // Staggered consumers need a stage more. Four consumers are faster without ping-pong.
    if (c.consumer_warpgroups == 3) c.kv_stages = 3, c.staggered = true;
    if (c.consumer_warpgroups == 4) c.ping_pong = false, c.half_first_block = true;
  }
  // Up to 9 % faster from 192 on, where score modifications leave few registers.
  const bool modifies = is_general(variant) || variant == Variant::kSoftcap;
  if (modifies) c.rescale_before_pv = false;
  if (modifies && variant != Variant::kBias && c.dim == 256) c.ping_pong = true;
  if (variant == Variant::kBias) {
    if (c.dim == 128) c.tma_store = false;
    if (c.dim >= 192) c.block_n = c.dim == 256 ? 64 : 96;
  }
  return c;
}

// The kernels that are compiled, each in bf16 and fp16. The variants for one modification exist
// where the general kernel is much slower than the unmodified one.
constexpr bool is_instantiated(int tile, Variant variant) {
  switch (variant) {
    case Variant::kUnmasked:
      return tile != kTile256Short;
    case Variant::kMasked:
      return true;
    case Variant::kSoftcap:
    case Variant::kDropout:
      return tile == kTile64 || tile == kTile128 || tile == kTile256;
    case Variant::kPaged:
    case Variant::kPagedGeneral:
      // At 256 with 64 keys: pages of 64 do not have boxes of 80.
      return tile == kTile64 || tile == kTile128 || tile == kTile192 || tile == kTile256Short;
    default:
      return tile < kTile64Short;
  }
}

// The template argument of a kernel.
struct KernelConfig {
  TileConfig tile;
  Type type;
  Variant variant;
  constexpr bool masked() const { return variant != Variant::kUnmasked; }
  constexpr bool softcap() const { return variant == Variant::kSoftcap; }
  constexpr bool dropout() const { return variant == Variant::kDropout; }
  constexpr bool general() const { return is_general(variant); }
  constexpr bool bias() const { return variant == Variant::kBias; }
  constexpr bool paged() const { return is_paged(variant); }
};

// ---------------------------------------------------------------------------- score modifications

// Bias, soft cap and ALiBi need scores as natural logarithms, and so does a scale that is not
// positive, because it reverses their order. Otherwise scores stay unscaled products.
TEA_HOST_DEVICE bool modifies_scores(const AttentionArguments& a) {
  return has_score_mod(a) || !(a.scale > 0);
}

// Whether the soft cap is the last modification. Scores then stay in the form that softcap_scores()
// returns.
TEA_HOST_DEVICE bool softcap_is_last(const AttentionArguments& a) {
  return a.softcap > 0 && !a.alibi && a.bias.kind != TEA_BIAS_POST_SCALE;
}

// Whether the cells of dropout (math/dropout.h) are aligned with tiles at any first visible key,
// and dropout removes anything at all.
inline bool dropout_is_tile_aligned(const AttentionArguments& a) {
  return !a.origin_device && a.origin[2] % 16 == 0 && a.origin[3] % 16 == 0 &&
         !a.mask.window_left && a.dropout_threshold > 0;
}

// -------------------------------------------------------------------------------------- selection

inline bool has_mask(const MaskRule& m) { return m.causal || m.window_left || m.window_right; }

inline bool is_dense(const AttentionArguments& a) {
  return a.queries.form == TEA_DENSE && a.keys.form == TEA_DENSE;
}

// The first configuration that serves the head dimensions and has a kernel of a variant, or -1.
inline int find_tile(int dim, int dim_v, Variant variant = Variant::kMasked) {
  for (int i = 0; i < kNumTiles; ++i)
    if (dim <= kTiles[i].dim && dim_v <= kTiles[i].dim_v && is_instantiated(i, variant)) return i;
  return -1;
}

inline Variant select_variant(const AttentionArguments& a, int tile) {
  if (a.bias.kind) return Variant::kBias;
  if (is_instantiated(tile, Variant::kDropout) && a.has_dropout && dropout_is_tile_aligned(a) &&
      !modifies_scores(a))
    return Variant::kDropout;
  if (modifies_scores(a) || a.has_dropout) {
    const bool only_softcap = softcap_is_last(a) && !a.has_dropout && a.scale > 0;
    return is_instantiated(tile, Variant::kSoftcap) && only_softcap ? Variant::kSoftcap
                                                                    : Variant::kGeneral;
  }
  return has_mask(a.mask) ? Variant::kMasked : Variant::kUnmasked;
}

struct Selection {
  int tile;  // -1: no kernel serves the problem
  Variant variant;
};

// The page sizes of the paged variants are multiples of the rows after which the swizzle repeats.
inline constexpr int kPageMultiple = 8;

inline Selection select_paged_kernel(const AttentionArguments& a) {
  const Variant variant =
      modifies_scores(a) || a.has_dropout ? Variant::kPagedGeneral : Variant::kPaged;
  const bool serves = a.keys.page_size % kPageMultiple == 0 && !a.bias.kind;
  return {serves ? find_tile(a.dim_qk, a.dim_v, variant) : -1, variant};
}

// The kernel that serves a problem. For short sequences, tiles of 256 rows waste less than tiles of
// 192, and a mask cuts more off blocks of 64 keys than off blocks of 80; the limits were measured.
inline Selection select_kernel(const AttentionArguments& a) {
  if (a.keys.form == TEA_PAGED) return select_paged_kernel(a);
  const int tile = find_tile(a.dim_qk, a.dim_v);
  if (tile < 0) return {-1, Variant::kUnmasked};
  const Variant variant = select_variant(a, tile);
  const auto at_most = [&](int n) { return a.queries.max_seqlen <= n && a.keys.max_seqlen <= n; };
  const bool masked = variant == Variant::kMasked;
  if (!masked && variant != Variant::kUnmasked) return {tile, variant};
  if (tile == kTile64 && a.queries.max_seqlen > 192 && at_most(masked ? 1024 : 512))
    return {kTile64Short, variant};
  if (tile == kTile256 && masked && at_most(1024)) return {kTile256Short, variant};
  return {tile, variant};
}

// Whether CTAs fetch tiles from a counter because tiles differ in the time that they take: lengths
// are known to the device only, a mask is present, or the last tile of a sequence has no rows for
// some consumers. In all other cases CTA i takes tiles i, i + gridDim.x, and so on. O in fp32 is
// that of a part of the keys under context parallelism, while NCCL transfers the next part on some
// SMs: a CTA that has to wait for such an SM must have no tiles of its own.
inline bool needs_tile_counter(const AttentionArguments& a, const Selection& s) {
  if (a.batch == 0) return false;
  if (!is_dense(a) || has_mask(a.mask) || a.o.dtype == TEA_FP32) return true;
  const int block_m = kTiles[s.tile].block_m();
  return block_m > 128 &&
         (s.variant != Variant::kUnmasked || (a.queries.max_seqlen - 1) % block_m < block_m - 64);
}

}  // namespace tea::hopper
