// Masks and score modifications of an accumulator (device/accumulator.cuh), in the order of
// docs/semantics.md: bias, scale, soft cap, bias, ALiBi, mask.
#pragma once
#include "portable/arguments.cuh"
#include "portable/device/accumulator.cuh"
#include "portable/device/load_store.cuh"

namespace tea::portable {

// The visible columns of one row, counted from the first column of a tile `width` columns wide.
struct VisibleRange {
  int begin, end;
  TEA_DEVICE bool contains(int column) const { return column >= begin && column < end; }
};
TEA_DEVICE VisibleRange visible_range(const SequencePair& seq, int64_t row, int64_t first_column,
                                      int width) {
  if (row >= seq.q.length) return {0, 0};
  const Columns c = visible_columns(seq.band, row, seq.kv.length);
  const auto within = [&](int64_t x) {
    return static_cast<int>(min(max(x - first_column, int64_t{0}), int64_t{width}));
  };
  return {within(c.begin), within(c.end)};
}

// The score modifications' values of one row.
struct ScoreModRow {
  int64_t row;   // in the sequence
  int64_t bias;  // index of the bias of column 0
  float slope;   // of ALiBi
};
TEA_DEVICE ScoreModRow score_mod_row(const AttentionArguments& args, const SequencePair& seq,
                                     int64_t head, int64_t row, float slope) {
  const tea_bias_strides& s = args.bias.stride;
  return {row, seq.batch * s.batch + head * s.head + row * s.row, slope};
}

// x += factor * bias where the column is visible to the row: only there is the bias known to exist.
template <int kDtype, int kTiles>
TEA_DEVICE void add_bias_of_type(float (&s)[kTiles][4], const AttentionArguments& args,
                                 float factor, const ScoreModRow (&rows)[2],
                                 const VisibleRange (&visible)[2], int64_t first_column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t step = opaque(args.bias.stride.col);
    const int64_t first = rows[r].bias + (first_column + accumulator_column(0, 0)) * step;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (visible[r].contains(accumulator_column(n, i)))
          s[n][2 * r + i] +=
              factor * load_float(args.bias.data, kDtype, first + (8 * n + i) * step);
  }
}
template <int kTiles>
TEA_DEVICE void add_bias(float (&s)[kTiles][4], const AttentionArguments& args, float factor,
                         const ScoreModRow (&rows)[2], const VisibleRange (&visible)[2],
                         int64_t first_column) {
  if (args.bias.dtype == TEA_FP16)
    add_bias_of_type<TEA_FP16>(s, args, factor, rows, visible, first_column);
  else if (args.bias.dtype == TEA_BF16)
    add_bias_of_type<TEA_BF16>(s, args, factor, rows, visible, first_column);
  else
    add_bias_of_type<TEA_FP32>(s, args, factor, rows, visible, first_column);
}
// x -= slope * |row + diagonal - column|. The distance to the tile's first column is rounded to a
// float beyond 2^24, as every distance would be.
template <int kTiles>
TEA_DEVICE void add_alibi(float (&s)[kTiles][4], const SequencePair& seq,
                          const ScoreModRow (&rows)[2], int64_t first_column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t ahead =
        rows[r].row + seq.origin_row + seq.diagonal - first_column - seq.origin_col;
    const float distance = static_cast<float>(ahead - accumulator_column(0, 0));
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        s[n][2 * r + i] -= rows[r].slope * fabsf(distance - static_cast<float>(8 * n + i));
  }
}

// The factors of Q K^T: `dequantize` is 1 except for FP8, where the product of codes times it is
// the product of the values; `softmax` is Problem's scale.
struct ScoreScale {
  float dequantize, softmax;
};

// Turns products of Q and K into scores: applies every modification to the visible elements, and
// sets all others to minus infinity. `cap_slope`, unless null, receives the derivative of the soft
// cap.
template <int kTiles>
TEA_DEVICE void modify_scores(float (&s)[kTiles][4], const AttentionArguments& args,
                              const SequencePair& seq, const ScoreScale& scale,
                              const ScoreModRow (&rows)[2], const VisibleRange (&visible)[2],
                              int64_t first_column, float (*cap_slope)[4] = nullptr) {
  const auto for_each = [&](auto&& change) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) change(s[n][i], row_slot(i), accumulator_column(n, i));
  };
  for_each([&](float& x, int, int) { x *= scale.dequantize * scale.softmax; });
#pragma unroll 1  // one copy of add_bias() serves both kinds of bias
  for (int kind = TEA_BIAS_PRE_SCALE; kind <= TEA_BIAS_POST_SCALE; ++kind) {
    const bool before = kind == TEA_BIAS_PRE_SCALE;
    if (args.bias.kind == kind)
      add_bias(s, args, before ? scale.softmax : 1.0f, rows, visible, first_column);
    if (!before) break;
    if (args.softcap > 0) for_each([&](float& x, int, int) { x = softcap(x, args.softcap); });
    if (cap_slope) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          cap_slope[n][i] = args.softcap > 0 ? softcap_slope(s[n][i], args.softcap) : 1.0f;
    }
  }
  if (args.alibi) add_alibi(s, seq, rows, first_column);
  for_each([&](float& x, int r, int c) { x = visible[r].contains(c) ? x : kMinusInfinity; });
}

}  // namespace tea::portable
