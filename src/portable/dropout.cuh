// Dropout of the elements of an accumulator.
#pragma once
#include "portable/arguments.cuh"
#include "portable/device/accumulator.cuh"

namespace tea::portable {

// The random numbers of one head of a sequence.
struct DropoutState {
  RngState rng;
  uint32_t stream, threshold;
};
TEA_DEVICE DropoutState dropout_state(const AttentionArguments& args, int64_t b, int64_t head) {
  return {rng_of(args), dropout_stream(b + origin_of(args, b, 0), head + origin_of(args, b, 1)),
          args.dropout_threshold};
}

// p = change(p, whether dropout keeps it), for each element. (row, column): the global position of
// element (0, 0). Where both are multiples of 16, one Philox call serves two tiles; otherwise each
// element needs a call.
template <int kTiles, class Change>
TEA_DEVICE void for_each_dropout(float (&p)[kTiles][4], const DropoutState& d, int64_t row,
                                 int64_t column, Change&& change) {
  if (((row | column) & 15) == 0) {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const Philox4 cell =
          dropout_cell(d.rng, d.stream, row + lane() / 4, column + 8 * n + lane() % 4 * 2);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = p[n + i / 2 % 2][i / 4 * 2 + i % 2];
        x = change(x, dropout_uniform(cell, i / 4 * 8, i / 2 % 2 * 8 + i % 2) >= d.threshold);
      }
    }
    return;
  }
#pragma unroll 1
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool keeps = dropout_keeps(d.rng, d.stream, row + accumulator_row(i),
                                       column + accumulator_column(n, i), d.threshold);
#pragma unroll
      for (int m = 0; m < kTiles; ++m)  // an index that is not constant would put p into memory
        if (m == n) p[m][i] = change(p[m][i], keeps);
    }
}
// Multiplies each element that dropout keeps by `factor`, all others by zero.
template <int kTiles>
TEA_DEVICE void apply_dropout(float (&p)[kTiles][4], const DropoutState& d, int64_t row,
                              int64_t column, float factor) {
  for_each_dropout(p, d, row, column,
                   [factor](float x, bool keeps) { return keeps ? x * factor : 0.0f; });
}

}  // namespace tea::portable
