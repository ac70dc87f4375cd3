// How the results of a row are written, by the epilogue and by the kernel that combines splits.
#pragma once
#include "portable/arguments.cuh"
#include "portable/device/load_store.cuh"
#include "portable/forward/softmax.cuh"
#include "portable/forward/work_tile.cuh"

namespace tea::portable {

// Rows that the tiles of a sequence write: also those past its end, which are zero, except in a
// ragged buffer.
TEA_DEVICE int64_t rows_to_write(const AttentionArguments& args, const SequencePair& seq) {
  return args.queries.form == TEA_RAGGED ? seq.q.length : args.queries.max_seqlen;
}

// Writes LSE, MAX and SUM_EXP of one row. row_max and row_sum as in normalize_row().
TEA_DEVICE void write_statistics(const AttentionArguments& args, const SequencePair& seq,
                                 const QueryIndex& q, const RowResult& result, float row_max,
                                 float row_sum) {
  const int64_t at = first_statistic(args, seq.q, seq.batch, q.head) + q.row * args.statistics.seq;
  const bool valid = q.row < seq.q.length;
  // The maximum of scores one of which is NaN is NaN, but fmaxf() ignores NaN.
  const bool has_nan = row_sum != row_sum && row_max < -kMinusInfinity;
  if (args.statistics.lse) args.statistics.lse[at] = valid ? result.lse : kMinusInfinity;
  if (args.statistics.max)
    args.statistics.max[at] = valid ? (has_nan ? row_sum : row_max) : kMinusInfinity;
  if (args.statistics.sum_exp) args.statistics.sum_exp[at] = valid ? result.sum_exp : 0;
}

// The factor of O in addition to RowResult's. fp8: P has been rounded, and dropped, before.
TEA_DEVICE float value_factor(const AttentionArguments& args, bool fp8, int kv_head) {
  return kv_scale(args, args.fp8.v_inv, kv_head) *
         (fp8 ? scalar_or_1(args.fp8.s_inv) : args.keep_factor);
}
// Rows past the end and rows that attend to no key are zero, whatever the accumulator holds.
TEA_DEVICE float normalized(float o, float factor) { return factor == 0 ? 0.0f : o * factor; }
// The same for two adjacent elements, rounded and packed, with one comparison.
template <int kDtype>
TEA_DEVICE uint32_t normalized_pair(const float* o, float factor) {
  return factor == 0 ? 0 : pack<kDtype>(o[0] * factor, o[1] * factor);
}

}  // namespace tea::portable
