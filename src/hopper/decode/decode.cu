// Checks the arguments of a decoding launch, selects the kernel and launches it.
#include "core/error.h"
#include "hopper/decode/decode.h"
#include "hopper/decode/launch.h"
#include "hopper/decode/mla/config.h"
#include "hopper/forward/score_mod.cuh"

namespace tea::hopper::decode {

namespace {

// Why the kernel that serves the head dimensions of MLA does not serve the arguments.
std::string mla_limit(const AttentionArguments& a) {
  if (has_fp8_kv(a)) return "k and v are FP8; needs the type of q where dim_qk is beyond 256";
  if (packed_rows(a) > mla::kMaxRows)
    return "the queries of a sequence and a head of k and v are " + shown(packed_rows(a)) +
           "; needs at most " + shown(mla::kMaxRows);
  if (modifies_scores(a))
    return "the problem modifies scores (bias, ALiBi, soft cap or a scale that is not positive); "
           "needs none where dim_qk is beyond 256";
  return "";
}

std::string rows_limit(const AttentionArguments& a) {
  const int64_t rows = packed_rows(a), most = most_rows(has_fp8_kv(a), a.dim_qk, a.dim_v);
  if (most == 0)
    return "dim_qk is " + shown(a.dim_qk) + " and dim_v " + shown(a.dim_v) + "; needs at most 256";
  if (rows > most)
    return "the queries of a sequence and a head of k and v are " + shown(rows) +
           "; needs at most " + shown(most);
  if (has_fp8_kv(a) && (a.dim_qk % 16 || a.dim_v % 16))
    return "dim_qk is " + shown(a.dim_qk) + " and dim_v " + shown(a.dim_v) +
           "; FP8 keys and values need multiples of 16";
  return "";
}

}  // namespace

std::string limit(const AttentionArguments& a) {
  if (a.has_dropout) return "the problem has dropout; needs none";
  if (a.batch_invariant && a.mask.window_left)
    return "window_left is " + shown(a.mask.window_left) + "; needs 0";
  if (a.batch_invariant && a.max_ctas)
    return "max_ctas is " + shown(a.max_ctas) +
           "; needs 0, because each part of the keys has a CTA";
  return mla::serves_dims(a) ? mla_limit(a) : rows_limit(a);
}

uint64_t workspace_bytes(const AttentionArguments& a) {
  const int64_t group = a.heads_kv ? a.heads_q / a.heads_kv : 0, rows = packed_rows(a);
  if (rows == 0) return 0;
  if (mla::serves_dims(a)) {
    const int tiles = a.heads_kv * mla::row_tiles(a);
    return mla::workspace_bytes(most_ctas(mla::kBlockShape, a, tiles));
  }
  const int64_t most = most_rows(has_fp8_kv(a), a.dim_qk, a.dim_v);
  // A run of a ragged problem may have fewer queries, which the kernels serve.
  const bool fewer = a.queries.form == TEA_RAGGED && group <= most;
  const int tile = select_tile(a, fewer ? std::min(rows, most) : rows);
  if (tile < 0) return 0;
  const TileConfig& config = tiles_of(has_fp8_kv(a))[static_cast<size_t>(tile)];
  return workspace_bytes(slot_floats(config), most_ctas(kBlockShape, a, a.heads_kv));
}

Outcome run(const AttentionArguments& a, void* stream) {
  const int tile = select_tile(a);
  const bool is_mla = mla::serves_dims(a);
  if (tile < 0 && !is_mla) return refusal("rows or head dimensions beyond the table");
  const bool empty = a.queries.form != TEA_RAGGED && a.queries.max_seqlen == 0;
  if (empty || a.heads_q == 0 || (a.batch == 0 && a.queries.form != TEA_RAGGED)) return {};
  KernelParams p = {};
  p.args = a;
  p.tiles = a.heads_kv;
  p.group = FastDivisor(a.heads_q / a.heads_kv);
  p.page_size = FastDivisor(a.keys.form == TEA_PAGED ? a.keys.page_size : 1);
  if (a.is_uniform) p.bounds = make_bounds(a.uniform_pair);
  p.unit = score_unit(a);
  p.scale_log2 = p.unit.factor * kLog2E;
  p.modifies_scores = modifies_scores(a);
  p.launch_number = next_launch_number();
  p.flags = static_cast<uint64_t*>(a.workspace);
  if (a.batch_invariant)
    p.part_blocks = kInvariantKeys / (is_mla ? mla::kBlockShape : kBlockShape).keys;
  if (is_mla)
    return (a.q.dtype == TEA_FP16 ? mla::launch<Type::kFp16>
                                  : mla::launch<Type::kBf16>)(p, static_cast<cudaStream_t>(stream));
  const Launcher launch = a.q.dtype == TEA_FP16 ? find_launcher<Type::kFp16>(has_fp8_kv(a), tile)
                                                : find_launcher<Type::kBf16>(has_fp8_kv(a), tile);
  return launch(p, static_cast<cudaStream_t>(stream));
}

}  // namespace tea::hopper::decode
