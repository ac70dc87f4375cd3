// Split keys: combines the results of the splits of a row. A warp adds them in order, first split
// first, so that equal inputs give equal bits.
#include "portable/forward/launch.h"
#include "portable/forward/row_results.cuh"
#include "portable/grid.h"

namespace tea::portable {
namespace {

constexpr int kWarps = 4;

__global__ void __launch_bounds__(32 * kWarps)
    combine_kernel(const __grid_constant__ KernelParams p) {
  const TileScheduler& s = p.scheduler;
  const int ctas_per_tile = s.rows / kWarps;
  const int64_t cta = p.first_cta + blockIdx.x;
  const TileIndex tile = s.at(cta / ctas_per_tile * s.splits);
  const int local = static_cast<int>(cta % ctas_per_tile) * kWarps + warp();
  const SequencePair seq = sequence_pair_of(p.args, tile.batch);
  const QueryIndex at = query_index(s, tile, local);
  if (at.row >= rows_to_write(p.args, seq)) return;

  const bool valid = at.row < seq.q.length;
  const int64_t first = tile.number * s.splits * s.rows + local;
  const int64_t own = tile.number * s.rows + local;
  float row_max = kMinusInfinity, row_sum = 0, o[kMostDim / 32] = {};
  if (p.has_earlier) {
    row_max = p.earlier.row_max[own], row_sum = p.earlier.row_sum[own];
#pragma unroll
    for (int i = 0; i < kMostDim / 32; ++i)
      if (lane() + 32 * i < p.args.dim_v) o[i] = p.earlier.o[own * p.args.dim_v + lane() + 32 * i];
  }
  for (int n = 0; valid && n < s.splits; ++n) {
    const int64_t row = first + n * s.rows;
    const PartialRow split = {p.splits.row_max[row], p.splits.row_sum[row]};
    const RowMerge merge({row_max, row_sum}, split);
    row_max = merge.row_max();
    row_sum = merge(row_sum, split.row_sum);
#pragma unroll
    for (int i = 0; i < kMostDim / 32; ++i)
      if (lane() + 32 * i < p.args.dim_v)
        o[i] = merge(o[i], p.splits.o[row * p.args.dim_v + lane() + 32 * i]);
  }
  if (!p.is_last) {
    __syncwarp();  // every lane has read the earlier statistics
    if (lane() == 0) p.earlier.row_max[own] = row_max, p.earlier.row_sum[own] = row_sum;
#pragma unroll
    for (int i = 0; i < kMostDim / 32; ++i)
      if (lane() + 32 * i < p.args.dim_v) p.earlier.o[own * p.args.dim_v + lane() + 32 * i] = o[i];
    return;
  }
  const RowResult result = normalize_row(row_max, row_sum, valid ? sink_of(p.args, at.head) : 0.0f);
  const float factor =
      valid ? result.factor * value_factor(p.args, false, at.head / p.heads_per_kv) : 0.0f;
  if (lane() == 0) write_statistics(p.args, seq, at, result, row_max, row_sum);
  const int64_t to =
      first_element(p.args.o, p.args.queries, seq.q, seq.batch, at.head) + at.row * p.args.o.seq;
#pragma unroll
  for (int i = 0; i < kMostDim / 32; ++i)
    if (lane() + 32 * i < p.args.dim_v)
      store_float(p.args.o.data, p.args.o.dtype, to + lane() + 32 * i, normalized(o[i], factor));
}

}  // namespace

void combine_splits(KernelParams& p, cudaStream_t stream) {
  launch_grids({"forward, combining splits", {}, 32 * kWarps}, combine_kernel, p, p.args,
               p.scheduler.tiles(p.args.batch) * p.scheduler.rows / kWarps, stream);
}

}  // namespace tea::portable
