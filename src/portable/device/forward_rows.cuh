// What the kernels of the forward pass and their merge share: which query a row of a tile is, and
// how its results are stored.
#pragma once
#include "portable/device/scores.cuh"
#include "portable/forward_table.h"

namespace tea::portable {

// The query that a row of a tile is.
struct Query {
  int64_t row;
  int head;
};
TEA_DEVICE Query query_of(const Tiling& t, const Tiling::Tile& tile, int local) {
  const int64_t packed = tile.first + local;
  if (t.pack == 1) return {packed, tile.head};
  return {packed / t.pack, tile.head + static_cast<int>(packed % t.pack)};
}

// Rows that a tile of this sequence writes: all of the capacity where padding is there to be
// cleared.
TEA_DEVICE int64_t written_rows(const AttentionArguments& args, const SequencePair& seq) {
  return args.queries.form == TEA_RAGGED ? seq.q.length : args.queries.max_seqlen;
}

// LSE, MAX and SUM_EXP of one row. `max` and `total` as in result_of().
TEA_DEVICE void store_per_row(const AttentionArguments& args, const SequencePair& seq,
                              const Query& q, const RowResult& result, float max, float total) {
  const int64_t at = first_per_row(args, seq.q, seq.batch, q.head) + q.row * args.statistics.seq;
  const bool valid = q.row < seq.q.length;
  // The largest of scores among which there is a NaN is NaN; fmaxf passes it over.
  const bool spoiled = total != total && max < -kMinusInfinity;
  if (args.statistics.lse) args.statistics.lse[at] = valid ? result.lse : kMinusInfinity;
  if (args.statistics.max)
    args.statistics.max[at] = valid ? (spoiled ? total : max) : kMinusInfinity;
  if (args.statistics.sum_exp) args.statistics.sum_exp[at] = valid ? result.sum_exp : 0;
}

// By what values are multiplied besides RowResult's factor.
TEA_DEVICE float value_factor(const AttentionArguments& args, bool fp8) {
  return fp8 ? scalar(args.fp8.s_inv) * scalar(args.fp8.v_inv) : args.keep_factor;
}
// Padding and rows with nothing to attend are zero, whatever the accumulator holds.
TEA_DEVICE float finished(float o, float factor) { return factor == 0 ? 0.0f : o * factor; }
// Two neighbours, packed: one choice for both.
template <int kDtype>
TEA_DEVICE uint32_t finished_pair(const float* o, float factor) {
  return factor == 0 ? 0 : pack<kDtype>(o[0] * factor, o[1] * factor);
}

}  // namespace tea::portable
