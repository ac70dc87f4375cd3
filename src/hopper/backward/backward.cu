// Checks the arguments of a backward run and launches its kernels: preprocess, tiles, sinks.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "hopper/backward/backward.h"
#include "hopper/backward/launch.h"
#include "hopper/backward/preprocess.h"

namespace tea::hopper::backward {
namespace {

// How the tiles of several key heads, or parts of them, are interleaved.
struct Interleaving {
  int heads;        // at once
  bool descending;  // whether all heads but the last `heads` begin with the last key block
};

// The tiles of a head that run at the same time add to dQ in order, so that of tiles that begin at
// the same time the last one waits for all others: few heads suit tiles of many steps only. More
// heads than needed cost power: their Q, dO and dQ exceed L2, and with 16 heads of 16384 rows DRAM
// moved 1.3 TB/s, with 4 heads 0.2 (measured). Tiles of 256 steps together fit.
//
// Under a causal mask tiles of the first key blocks are long. Where these come first, tiles that
// began one behind the other end at about the same time, and those that follow wait again. From the
// last key block on they end one behind the other, and those that follow need not wait; but the
// tiles of a head are then at different rows, all of which must fit in L2. Otherwise there should
// be 8 query heads, whose tiles end at different times. The last heads begin with the long tiles,
// so that all SMs finish together.
Interleaving interleaving(const AttentionArguments& a, int block_m, int heads_per_tile,
                          int64_t heads) {
  const Band band = tea::band(a.mask, 0, 0, 0);
  const bool left = band.lo > -kUnbounded, right = band.hi < kUnbounded;
  int64_t rows = a.queries.max_seqlen;  // that attend to a key, in the mean over long sequences
  if (left && right)
    rows = std::min(rows, band.hi - band.lo + kBlockN);
  else if (left || right)
    rows /= 2;
  const int64_t steps = heads_per_tile * ((rows + block_m - 1) / block_m);
  const int64_t by_steps = 256 / std::max<int64_t>(steps, 1);
  const bool descending = right && !left && by_steps > 0;
  const int64_t fewest = descending ? 1 : (left || right ? 8 : 2) / heads_per_tile;
  const int64_t most = std::min<int64_t>(std::max({by_steps, fewest, int64_t{1}}), 32);
  return {static_cast<int>(std::clamp<int64_t>(heads, 1, most)), descending};
}

KernelParams make_params(const AttentionArguments& a) {
  const int tile = find_tile(a.dim_qk, a.dim_v), parts = group_parts(a);
  KernelParams p{};
  p.args = a;
  p.work = make_workspace(a, tile, a.workspace);
  const auto key_blocks = static_cast<int>((a.keys.max_seqlen + kBlockN - 1) / kBlockN);
  const int64_t heads = int64_t{a.heads_kv} * parts * a.batch;
  p.parts = FastDivisor(parts);
  p.heads_per_tile = a.heads_q / (a.heads_kv * parts);
  const auto [heads_at_once, descending] =
      interleaving(a, kTiles[tile].block_m, p.heads_per_tile, heads);
  p.order = {key_blocks, a.heads_kv * parts, static_cast<int>(a.batch), heads_at_once, true};
  p.divisors = p.order.divisors<FastDivisor>();
  p.descending_heads = descending ? static_cast<int>(heads) - heads_at_once : 0;
  p.scale_log2 = a.scale * kLog2E, p.inverse_scale = 1 / a.scale;
  return p;
}

// Between these LSE / scale is neither infinite nor 0 (RowTerms).
constexpr float kLeastScale = 0x1p-60f, kMostScale = 0x1p60f;

// By configuration, and whether the type is fp16.
constexpr Outcome (*kLaunch[][2])(KernelParams*, cudaStream_t) = {
    {launch<0, Type::kBf16>, launch<0, Type::kFp16>},
    {launch<1, Type::kBf16>, launch<1, Type::kFp16>},
    {launch<2, Type::kBf16>, launch<2, Type::kFp16>},
};
static_assert(std::size(kLaunch) == kNumTiles);

// Whether the number of tiles exceeds 31 bits.
bool has_too_many_tiles(const AttentionArguments& a) {
  const int64_t tiles = (a.keys.max_seqlen / kBlockN + 1) * a.heads_q;
  return a.batch > 0 && tiles > INT32_MAX / a.batch;
}

}  // namespace

std::string limit(const AttentionArguments& a) {
  const float scale = std::fabs(a.scale);
  if (!(scale >= kLeastScale && scale <= kMostScale))
    return "attn_scale is " + shown(a.scale) + "; needs a magnitude from 2^-60 to 2^60";
  if (find_tile(a.dim_qk, a.dim_v) < 0)
    return "dim_qk is " + shown(a.dim_qk) + " and dim_v " + shown(a.dim_v) + "; needs at most 128";
  if (has_score_mod(a)) return "the problem has a bias, ALiBi or a soft cap; needs none";
  if (a.has_dropout) return "the problem has dropout; needs none";
  return "";
}

uint64_t workspace_bytes(const AttentionArguments& a) {
  return make_workspace(a, find_tile(a.dim_qk, a.dim_v), nullptr).bytes;
}

Outcome run(const AttentionArguments& a, void* cuda_stream) {
  const auto stream = static_cast<cudaStream_t>(cuda_stream);
  if (a.heads_q == 0) return {};
  if (has_too_many_tiles(a)) return refusal("more tiles than can be counted");
  KernelParams p = make_params(a);
  const int tile = find_tile(a.dim_qk, a.dim_v);
  if (const Outcome done = launch_preprocess(p, tile, stream); done.code) return done;
  const bool half = a.q.dtype == TEA_FP16;
  const bool has_tiles = a.batch > 0 && a.queries.max_seqlen > 0 && a.keys.max_seqlen > 0;
  if (has_tiles)
    if (const Outcome done = kLaunch[tile][half](&p, stream); done.code) return done;
  return launch_sink_gradient(p, tile, stream);
}

}  // namespace tea::hopper::backward
