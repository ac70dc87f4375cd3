// Score modifications of packed rows: bias, scale, soft cap and ALiBi, in the order of
// docs/semantics.md. In contrast to the forward kernels the rows of a thread may belong to
// different heads, and a bias is read from global memory.
#pragma once
#include "hopper/decode/scheduler.cuh"
#include "hopper/forward/score_mod.cuh"

namespace tea::hopper::decode {

// The values of one of the thread's rows.
struct ScoreModRow {
  int64_t alibi_distance;  // of the thread's first element
  int64_t bias;            // the index of its bias
  float slope;             // of ALiBi
};
// query, head: of the row; key: the first one of the block.
TEA_DEVICE ScoreModRow score_mod_row(const AttentionArguments& a, const WorkItem& item, int query,
                                     int head, int key, float slope) {
  bool valid;
  const SequenceBounds& b = item.bounds;
  const tea_bias_strides& stride = a.bias.stride;
  const int64_t column = int64_t{b.skipped_keys} + key + accumulator_column(0);
  const int64_t row = query + origin_of(a, item.batch, 2, &valid),
                global_column = column + origin_of(a, item.batch, 3, &valid);
  return {row + b.diagonal + shift_of(a, item.batch, &valid) - global_column,
          item.batch * stride.batch + head * stride.head + query * stride.row + column * stride.col,
          slope};
}

// s = factor * s + bias, of visible elements; kStored: the type of the bias.
template <Type kStored, int kCount>
TEA_DEVICE void add_packed_bias(float (&s)[kCount], const AttentionArguments& a, float factor,
                                const ScoreModRow (&rows)[2], const uint32_t (&visible)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    s[i] *= factor;
    if (!(visible[row_slot(i)] >> index_in_row(i) & 1)) continue;
    const int64_t at = rows[row_slot(i)].bias + (i / 4 * 8 + i % 2) * a.bias.stride.col;
    if constexpr (kStored == Type::kFp32)
      s[i] += static_cast<const float*>(a.bias.data)[at];
    else
      s[i] += to_float<kStored>(static_cast<const uint16_t*>(a.bias.data)[at]);
  }
}

// softcap_scores() with a path for each row: the two paths round differently, and in a
// batch-invariant problem, which this kernel also serves, a row's bits must not depend on the other
// row of the thread.
template <int kCount>
TEA_DEVICE void softcap_scores_by_row(float (&s)[kCount], float (&highest)[2]) {
  uint32_t any[2] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) any[row_slot(i)] |= __float_as_uint(fmaf(s[i], s[i], 1));
  const bool is_small[2] = {any[0] < 0x40000000, any[1] < 0x40000000};  // see softcap_scores()
  float by_exp[kCount], highest_product[2];
  if (!is_small[0] || !is_small[1]) {
    thread_row_max(s, highest_product);
#pragma unroll
    for (int i = 0; i < kCount; ++i) by_exp[i] = s[i];
    softcap_exp_all(by_exp, fmaxf(highest_product[0], highest_product[1]) > 30);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    s[i] = is_small[row_slot(i)] ? softcap_polynomial(s[i]) : by_exp[i];
  thread_row_max(s, highest);
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (!is_small[r]) highest[r] = softcap_exp(highest_product[r]);
}

// Turns products of Q and K into scores in units of score_unit(). Where softcap_is_last(),
// `highest` is set to the maximum of the thread's visible scores in each row.
template <Type kType, int kCount>
TEA_DEVICE void modify_packed_scores(float (&s)[kCount], const AttentionArguments& a,
                                     const ScoreModRow (&rows)[2], const uint32_t (&visible)[2],
                                     float (&highest)[2]) {
  const auto for_each = [&](auto&& change) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = change(s[i], i);
  };
  const auto scale_and_add_bias = [&](float factor) {
    if (a.bias.dtype == TEA_FP32)
      add_packed_bias<Type::kFp32>(s, a, factor, rows, visible);
    else
      add_packed_bias<kType>(s, a, factor, rows, visible);
  };
  if (a.bias.kind == TEA_BIAS_PRE_SCALE) scale_and_add_bias(1);
  float factor = a.scale;  // by which scores remain to be multiplied
  if (a.softcap > 0) {
    factor *= softcap_unit(a.softcap);
    for_each([&](float x, int i) {  // a score that is not visible may be NaN
      return visible[row_slot(i)] >> index_in_row(i) & 1 ? x * factor : kMinusInfinity;
    });
    softcap_scores_by_row(s, highest);
    if (softcap_is_last(a)) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (!visible[r]) highest[r] = kMinusInfinity;
      return;
    }
    for_each([&](float x, int) { return fmaf(2 * a.softcap, x, a.softcap); });
    factor = 1;
  }
  if (a.bias.kind == TEA_BIAS_POST_SCALE)
    scale_and_add_bias(factor);
  else if (factor != 1)
    for_each([&](float x, int) { return x * factor; });
  if (a.alibi)
    for_each([&](float x, int i) {
      const ScoreModRow& row = rows[row_slot(i)];
      const auto distance = static_cast<float>(row.alibi_distance - (i / 4 * 8 + i % 2));
      return fmaf(-row.slope, fabsf(distance), x);
    });
}

}  // namespace tea::hopper::decode
