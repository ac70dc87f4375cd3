// Split keys: combines the results of the splits of a row. A warp adds them in order, first split
// first, so that equal inputs give equal bits.
#include "portable/forward/launch.h"
#include "portable/forward/row_results.cuh"
#include "portable/grid.h"

namespace tea::portable {
namespace {

constexpr int kWarps = 4;
constexpr int kPerLane = 4, kColumns = 32 * kPerLane;  // columns of O that a warp adds at a time
// Splits whose results are loaded together: one after the other, their latencies would add up.
constexpr int kSplitsAtOnce = 8;
static_assert(kMostDim % kColumns == 0);

// The lane's column i of the kColumns from `column` on.
TEA_DEVICE int lane_column(int column, int i) { return column + 32 * i + lane(); }

// One row of a tile. `first` is its index in p.splits for the first split, `own` that in p.earlier.
struct SplitRow {
  const KernelParams& p;
  const SequencePair& seq;
  const QueryIndex at;
  const int64_t first, own;

  TEA_DEVICE bool valid() const { return at.row < seq.q.length; }

  // Columns beyond the last one repeat it, so that no load has a condition.
  TEA_DEVICE PartialRow load(const SplitResults& from, int64_t row, int column,
                             float (&o)[kPerLane]) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      o[i] = from.o[row * p.args.dim_v + min(lane_column(column, i), p.args.dim_v - 1)];
    return {from.row_max[row], from.row_sum[row]};
  }
  // Columns of O over all splits so far, and the row's statistics.
  TEA_DEVICE PartialRow add_splits(int column, float (&o)[kPerLane]) const {
    constexpr PartialRow kEmpty = {kMinusInfinity, 0};
    const int splits = valid() ? p.scheduler.splits : 0;
    PartialRow total = kEmpty;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) o[i] = 0;
    if (p.has_earlier) total = load(p.earlier, own, column, o);
#pragma unroll 1
    for (int n = 0; n < splits; n += kSplitsAtOnce) {
      PartialRow split[kSplitsAtOnce];
      float further[kSplitsAtOnce][kPerLane];
#pragma unroll
      for (int j = 0; j < kSplitsAtOnce; ++j)
        split[j] =
            load(p.splits, first + min(n + j, splits - 1) * p.scheduler.rows, column, further[j]);
      __syncwarp();  // otherwise ptxas moves loads between the additions, to save registers
#pragma unroll
      for (int j = 0; j < kSplitsAtOnce; ++j) {
        // An empty split changes no bit, and needs no branch, which would delay the loads.
        const PartialRow next = n + j < splits ? split[j] : kEmpty;
        const RowMerge merge(total, next);
        total = {merge.row_max(), merge(total.row_sum, next.row_sum)};
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) o[i] = merge(o[i], further[j][i]);
      }
    }
    return total;
  }

  TEA_DEVICE void write(const PartialRow& total, int column, const float (&o)[kPerLane]) const {
    const AttentionArguments& args = p.args;
    const RowResult result =
        normalize_row(total.row_max, total.row_sum, valid() ? sink_of(args, at.head) : 0.0f);
    const float factor =
        valid() ? result.factor * value_factor(args, false, at.head / p.heads_per_kv) : 0.0f;
    if (column == 0 && lane() == 0)
      write_statistics(args, seq, at, result, total.row_max, total.row_sum);
    const int64_t to =
        first_element(args.o, args.queries, seq.q, seq.batch, at.head) + at.row * args.o.seq;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (lane_column(column, i) < args.dim_v)
        store_float(args.o.data, args.o.dtype, to + lane_column(column, i),
                    normalized(o[i], factor));
  }
  TEA_DEVICE void write_earlier(int column, const float (&o)[kPerLane]) const {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (lane_column(column, i) < p.args.dim_v)
        p.earlier.o[own * p.args.dim_v + lane_column(column, i)] = o[i];
  }

  TEA_DEVICE void run() const {
    PartialRow total;
#pragma unroll 1
    for (int column = 0; column < p.args.dim_v; column += kColumns) {
      float o[kPerLane];
      total = add_splits(column, o);
      if (p.is_last)
        write(total, column, o);
      else
        write_earlier(column, o);
    }
    if (p.is_last) return;
    __syncwarp();  // every lane has read the earlier statistics
    if (lane() == 0) p.earlier.row_max[own] = total.row_max, p.earlier.row_sum[own] = total.row_sum;
  }
};

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
  SplitRow{p, seq, at, tile.number * s.splits * s.rows + local, tile.number * s.rows + local}.run();
}

}  // namespace

void combine_splits(KernelParams& p, cudaStream_t stream) {
  launch_grids({"forward, combining splits", {}, 32 * kWarps}, combine_kernel, p, p.args,
               p.scheduler.tiles(p.args.batch) * p.scheduler.rows / kWarps, stream);
}

}  // namespace tea::portable
