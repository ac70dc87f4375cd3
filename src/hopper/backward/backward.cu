// Checks the arguments of a backward run and launches its kernels: preprocess, tiles, sinks.
#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "hopper/backward/backward.h"
#include "hopper/backward/interleaving.h"
#include "hopper/backward/launch.h"
#include "hopper/backward/preprocess.h"

namespace tea::hopper::backward {
namespace {

KernelParams make_params(const AttentionArguments& a) {
  const int tile = find_tile(a.dim_qk, a.dim_v), parts = group_parts(a);
  KernelParams p{};
  p.args = a;
  p.work = make_workspace(a, tile, a.workspace);
  const auto key_blocks = static_cast<int>((a.keys.max_seqlen + kBlockN - 1) / kBlockN);
  p.parts = FastDivisor(parts);
  p.stores_by_tma = parts == 1 && a.dk.dtype != TEA_FP32;
  p.heads_per_tile = a.heads_q / (a.heads_kv * parts);
  const Interleaving order = interleave(a, tile, parts);
  p.order = {key_blocks, a.heads_kv * parts, static_cast<int>(a.batch), order.heads_at_once, true};
  p.divisors = p.order.divisors<FastDivisor>();
  p.descending_heads = order.descending_heads;
  p.tasks = term_tasks(a, kTiles[tile].block_m, p.heads_per_tile);
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
