// Split keys: combines the results of the splits of a row. A warp adds them in order, first split
// first, so that equal inputs give equal bits.
#include "portable/forward/grid.h"
#include "portable/forward/launch.h"
#include "portable/forward/row_results.cuh"

namespace tea::portable {
namespace {

constexpr int kWarps = 4, kMaxDimV = 512;

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
  float row_max = kMinusInfinity, row_sum = 0, o[kMaxDimV / 32] = {};
  for (int n = 0; valid && n < s.splits; ++n)
    row_max = fmaxf(row_max, p.splits.row_max[first + n * s.rows]);
  for (int n = 0; valid && n < s.splits; ++n) {
    const int64_t row = first + n * s.rows;
    const float split_max = p.splits.row_max[row];
    const float rescale =
        split_max == kMinusInfinity ? 1.0f : exp2_fast((split_max - row_max) * kLog2E);
    row_sum += p.splits.row_sum[row] * rescale;
#pragma unroll
    for (int i = 0; i < kMaxDimV / 32; ++i)
      if (lane() + 32 * i < p.args.dim_v)
        o[i] += p.splits.o[row * p.args.dim_v + lane() + 32 * i] * rescale;
  }
  const RowResult result = normalize_row(row_max, row_sum, valid ? sink_of(p.args, at.head) : 0.0f);
  const float factor =
      valid ? result.factor * value_factor(p.args, false, at.head / p.heads_per_kv) : 0.0f;
  if (lane() == 0) write_statistics(p.args, seq, at, result, row_max, row_sum);
  const int64_t to =
      first_element(p.args.o, p.args.queries, seq.q, seq.batch, at.head) + at.row * p.args.o.seq;
#pragma unroll
  for (int i = 0; i < kMaxDimV / 32; ++i)
    if (lane() + 32 * i < p.args.dim_v)
      store_float(p.args.o.data, p.args.o.dtype, to + lane() + 32 * i, normalized(o[i], factor));
}

}  // namespace

void combine_splits(KernelParams& p, cudaStream_t stream) {
  launch_grids({"forward, combining splits", {}, 32 * kWarps}, combine_kernel, p,
               p.scheduler.tiles(p.args.batch) * p.scheduler.rows / kWarps, stream);
}

}  // namespace tea::portable
