// Checks the arguments of a decoding launch, selects the kernel and launches it.
#include "core/error.h"
#include "hopper/decode/decode.h"
#include "hopper/decode/launch.h"
#include "hopper/forward/score_mod.cuh"

namespace tea::hopper::decode {

std::string limit(const AttentionArguments& a) {
  const int64_t rows = packed_rows(a), most = most_rows(has_fp8_kv(a), a.dim_qk, a.dim_v);
  if (most == 0)
    return "dim_qk is " + shown(a.dim_qk) + " and dim_v " + shown(a.dim_v) + "; needs at most 256";
  if (rows > most)
    return "the queries of a sequence and a head of k and v are " + shown(rows) +
           "; needs at most " + shown(most);
  if (has_fp8_kv(a) && (a.dim_qk % 16 || a.dim_v % 16))
    return "dim_qk is " + shown(a.dim_qk) + " and dim_v " + shown(a.dim_v) +
           "; FP8 keys and values need multiples of 16";
  if (a.has_dropout) return "the problem has dropout; needs none";
  return "";
}

uint64_t workspace_bytes(const AttentionArguments& a) {
  const int64_t group = a.heads_kv ? a.heads_q / a.heads_kv : 0, rows = packed_rows(a);
  const int64_t most = most_rows(has_fp8_kv(a), a.dim_qk, a.dim_v);
  // A run of a ragged problem may have fewer queries, which the kernels serve.
  const bool fewer = a.queries.form == TEA_RAGGED && group <= most;
  const int tile = find_tile(has_fp8_kv(a), fewer ? std::min(rows, most) : rows, a.dim_qk, a.dim_v);
  if (tile < 0 || rows == 0) return 0;
  return workspace_bytes(tiles_of(has_fp8_kv(a))[tile], most_ctas(a));
}

Outcome run(const AttentionArguments& a, void* stream) {
  const int tile = select_tile(a);
  if (tile < 0) return refusal("rows or head dimensions beyond the table");
  const bool empty = a.queries.form != TEA_RAGGED && a.queries.max_seqlen == 0;
  if (empty || a.heads_q == 0 || (a.batch == 0 && a.queries.form != TEA_RAGGED)) return {};
  KernelParams p = {};
  p.args = a;
  p.group = FastDivisor(a.heads_q / a.heads_kv);
  p.page_size = FastDivisor(a.keys.form == TEA_PAGED ? a.keys.page_size : 1);
  if (a.is_uniform) p.bounds = make_bounds(a.uniform_pair);
  p.unit = score_unit(a);
  p.scale_log2 = p.unit.factor * kLog2E;
  p.modifies_scores = modifies_scores(a);
  p.launch_number = next_launch_number();
  p.flags = static_cast<uint64_t*>(a.workspace);
  p.slots = reinterpret_cast<float*>(static_cast<char*>(a.workspace) + kFlagBytes);
  const Launcher launch = a.q.dtype == TEA_FP16 ? find_launcher<Type::kFp16>(has_fp8_kv(a), tile)
                                                : find_launcher<Type::kBf16>(has_fp8_kv(a), tile);
  return launch(p, static_cast<cudaStream_t>(stream));
}

}  // namespace tea::hopper::decode
