// The forward pass from the side of the host: which kernel serves a problem and how its work is
// cut, and the kernel that merges what blocks with a share of the keys have left.
#include <algorithm>

#include "portable/device/forward_launch.cuh"
#include "portable/forward.h"
#include "portable/gaps.h"

namespace tea::portable {
namespace {

// ----------------------------------------------------------------------------------------- merge

// A warp adds the parts of one row, first split first.
constexpr int kMergeWarps = 4, kMostColumns = 512;

__global__ void __launch_bounds__(32 * kMergeWarps)
    merge_entry(const __grid_constant__ Parameters p) {
  const Tiling& t = p.tiling;
  const int blocks_per_tile = t.rows / kMergeWarps;
  const int64_t block = p.first_block + blockIdx.x;
  const Tiling::Tile tile = t.at(block / blocks_per_tile * t.splits);
  const int local = static_cast<int>(block % blocks_per_tile) * kMergeWarps + warp();
  const SequencePair seq = sequence_pair_of(p.args, tile.b);
  const Query at = query_of(t, tile, local);
  if (at.row >= written_rows(p.args, seq)) return;

  const bool valid = at.row < seq.q.length;
  const int64_t first = tile.number * t.splits * t.rows + local;
  float max = kMinusInfinity, total = 0, o[kMostColumns / 32] = {};
  for (int s = 0; valid && s < t.splits; ++s) max = fmaxf(max, p.partial.top[first + s * t.rows]);
  for (int s = 0; valid && s < t.splits; ++s) {
    const int64_t part = first + s * t.rows;
    const float top = p.partial.top[part];
    const float weight = top == kMinusInfinity ? 1.0f : exp2_fast((top - max) * kLog2E);
    total += p.partial.sum[part] * weight;
#pragma unroll
    for (int i = 0; i < kMostColumns / 32; ++i)
      if (lane() + 32 * i < p.args.dim_v)
        o[i] += p.partial.o[part * p.args.dim_v + lane() + 32 * i] * weight;
  }
  const RowResult result = result_of(max, total, valid ? sink_of(p.args, at.head) : 0.0f);
  const float factor = valid ? result.factor * value_factor(p.args, false) : 0.0f;
  if (lane() == 0) store_per_row(p.args, seq, at, result, max, total);
  const int64_t to =
      first_element(p.args.o, p.args.queries, seq.q, seq.batch, at.head) + at.row * p.args.o.seq;
#pragma unroll
  for (int i = 0; i < kMostColumns / 32; ++i)
    if (lane() + 32 * i < p.args.dim_v)
      store_float(p.args.o.data, p.args.o.dtype, to + lane() + 32 * i, finished(o[i], factor));
}
// ---------------------------------------------------------------------------------------- launch

// A few blocks for each multiprocessor of a large GPU; the same everywhere, so that results are.
constexpr int64_t kEnough = 128, kWanted = 256;
constexpr int64_t kLeastBlocks = 8;  // of keys in a split: below, the merge costs more than it wins

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int table_row(const Problem& p) {
  const auto serves = [&](const Row& r) { return p.dim_qk <= r.dim && p.v_dim() <= r.dim_v; };
  return static_cast<int>(std::find_if(std::begin(kPlain), std::end(kPlain), serves) - kPlain);
}

Variant general_variant(const Problem& p) {
  if (p.is_fp8()) return kAnyFp8;
  if (p.dtype == TEA_FP32) return kAnyFp32;
  return p.dtype == TEA_BF16 ? kAnyBf16 : kAnyFp16;
}

// How the problem is cut where a general kernel serves it. fp8 needs a row's maximum over all keys,
// and dropout wants the rows of one head.
Tiling few_queries(const Problem& p, const Geometry& size) {
  const Row row = config(table_row(p) * kVariants + general_variant(p)).row;
  const int rows = 16 * row.warps * row.tall, group = p.heads_q / p.heads_kv;
  const int64_t max_q = p.q_form == TEA_RAGGED ? std::min(size.max_q, size.tokens_q) : size.max_q;
  Tiling t{0, p.heads_q, rows, 1, 1};
  if (group > 1 && 2 * max_q <= rows && !p.drops()) t.pack = group, t.heads = p.heads_kv;
  t.row_blocks = ceil_div(max_q * t.pack, rows);
  const int64_t tiles = size.batch * t.heads * t.row_blocks;
  const int64_t keys = ceil_div(size.max_kv, row.cols);
  if (!p.is_fp8() && tiles > 0 && tiles < kEnough)
    t.splits = static_cast<int>(
        std::max<int64_t>(1, std::min(ceil_div(kWanted, tiles), keys / kLeastBlocks)));
  return t;
}

bool is_plain(const Problem& p, const AttentionArguments& args) {
  return (p.dtype == TEA_BF16 || p.dtype == TEA_FP16) && p.kv_form != TEA_PAGED &&
         !has_score_mod(args) && !args.has_dropout && args.scale > 0 && args.q.is_vectorizable &&
         args.k.is_vectorizable && args.v.is_vectorizable && args.o.is_vectorizable &&
         args.queries.max_seqlen < int64_t{1} << 30 && args.keys.max_seqlen < int64_t{1} << 30;
}

int64_t partial_rows(const Tiling& t, int64_t batch) {
  return t.splits == 1 ? 0 : batch * t.heads * t.row_blocks * t.splits * t.rows;
}

void launch_kernel(int number, Parameters& p, int64_t blocks, cudaStream_t stream) {
  switch (number % kVariants) {
    case kPlainBf16:
    case kPlainFp16:
      return launch_plain(number, p, blocks, stream);
    case kAnyFp8:
      return launch_fp8(number, p, blocks, stream);
    case kAnyFp32:
      return launch_fp32(number, p, blocks, stream);
    default:
      return launch_general(number, p, blocks, stream);
  }
}

}  // namespace

uint64_t forward_workspace(const Problem& problem, const Geometry& size) {
  const int64_t rows = partial_rows(few_queries(problem, size), size.batch);
  return static_cast<uint64_t>(rows * (problem.v_dim() + 2)) * sizeof(float);
}

void forward(const Problem& problem, const Run& run) {
  const auto stream = static_cast<cudaStream_t>(run.stream);
  Parameters p{make_arguments(problem, run),
               few_queries(problem, run.size),
               {},
               0,
               problem.heads_q / problem.heads_kv};
  clear_gaps(p.args, p.args.queries, {{p.args.o, p.args.heads_q, p.args.dim_v}}, true, stream);
  Tiling& t = p.tiling;
  int number = table_row(problem) * kVariants + general_variant(problem);
  if (t.pack == 1 && t.splits == 1 && is_plain(problem, p.args)) {
    number = table_row(problem) * kVariants + (problem.dtype == TEA_BF16 ? kPlainBf16 : kPlainFp16);
    const Row row = config(number).row;
    const int64_t rows = t.row_blocks * t.rows;
    t.rows = 16 * row.warps * row.tall;
    t.row_blocks = ceil_div(rows, t.rows);
  }
  const int64_t tiles = p.args.batch * t.heads * t.row_blocks;
  if (tiles == 0) return;
  auto* const memory = static_cast<float*>(p.args.workspace);
  const int64_t rows = partial_rows(t, p.args.batch);
  p.partial = {memory, memory + rows * p.args.dim_v, memory + rows * (p.args.dim_v + 1)};
  launch_kernel(number, p, tiles * t.splits, stream);
  if (t.splits > 1)
    launch_all({"forward, merging splits", {}, 32 * kMergeWarps}, merge_entry, p,
               tiles * t.rows / kMergeWarps, stream);
}

}  // namespace tea::portable
