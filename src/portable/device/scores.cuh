// Scores as they stand in accumulators, in the order of docs/semantics.md: bias, scale, soft cap,
// bias, ALiBi, mask; then dropout of probabilities.
//
// An accumulator of 16 rows by 8 kTiles columns is float[kTiles][4]: element i of tile n is row
// row_of(i) and column column_of(n, i).
#pragma once
#include "portable/device/arguments.cuh"
#include "portable/device/load_store.cuh"

namespace tea::portable {

__host__ __device__ constexpr int row_slot(int i) { return i / 2; }
TEA_DEVICE int row_of(int i) { return lane() / 4 + 8 * row_slot(i); }
TEA_DEVICE int column_of(int n, int i) { return 8 * n + lane() % 4 * 2 + i % 2; }

// Visible columns of one row, counted from the first column of a tile that is `width` wide.
struct Window {
  int begin, end;
  TEA_DEVICE bool holds(int column) const { return column >= begin && column < end; }
};
TEA_DEVICE Window window_of(const SequencePair& seq, int64_t row, int64_t first_column, int width) {
  if (row >= seq.q.length) return {0, 0};
  const Columns c = visible_columns(seq.band, row, seq.kv.length);
  const auto within = [&](int64_t x) {
    return static_cast<int>(min(max(x - first_column, int64_t{0}), int64_t{width}));
  };
  return {within(c.begin), within(c.end)};
}

// What a row brings to its scores.
struct RowTerms {
  int64_t row;   // in the sequence
  int64_t bias;  // the element of column 0
  float slope;   // of ALiBi
};
TEA_DEVICE RowTerms terms_of(const AttentionArguments& args, const SequencePair& seq, int64_t head,
                             int64_t row, float slope) {
  const tea_bias_strides& s = args.bias.stride;
  return {row, seq.batch * s.batch + head * s.head + row * s.row, slope};
}

// x += factor * bias, where the row sees the column: elsewhere there may be no bias to read.
template <int kDtype, int kTiles>
TEA_DEVICE void add_bias_of(float (&s)[kTiles][4], const AttentionArguments& args, float factor,
                            const RowTerms (&terms)[2], const Window (&window)[2],
                            int64_t first_column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t step = afresh(args.bias.stride.col);
    const int64_t first = terms[r].bias + (first_column + column_of(0, 0)) * step;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (window[r].holds(column_of(n, i)))
          s[n][2 * r + i] +=
              factor * load_float(args.bias.data, kDtype, first + (8 * n + i) * step);
  }
}
template <int kTiles>
TEA_DEVICE void add_bias(float (&s)[kTiles][4], const AttentionArguments& args, float factor,
                         const RowTerms (&terms)[2], const Window (&window)[2],
                         int64_t first_column) {
  if (args.bias.dtype == TEA_FP16)
    add_bias_of<TEA_FP16>(s, args, factor, terms, window, first_column);
  else if (args.bias.dtype == TEA_BF16)
    add_bias_of<TEA_BF16>(s, args, factor, terms, window, first_column);
  else
    add_bias_of<TEA_FP32>(s, args, factor, terms, window, first_column);
}
// x -= slope * |row + delta - column|. The distance to the tile's first column is rounded to a
// float beyond 2^24, as every distance would be.
template <int kTiles>
TEA_DEVICE void add_alibi(float (&s)[kTiles][4], const SequencePair& seq,
                          const RowTerms (&terms)[2], int64_t first_column) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t ahead =
        terms[r].row + seq.origin_row + seq.diagonal - first_column - seq.origin_col;
    const float distance = static_cast<float>(ahead - column_of(0, 0));
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        s[n][2 * r + i] -= terms[r].slope * fabsf(distance - static_cast<float>(8 * n + i));
  }
}

// One score from q.k to what the softmax takes; `scale` includes the factors of fp8, `inner` is
// those alone.
struct Scaling {
  float inner, outer;  // q.k * inner is the product of the decoded values; outer is Problem's scale
};

// Applies everything but the mask to the elements that are visible, and minus infinity to the rest.
// `bend`, where given: the slope of the soft cap.
template <int kTiles>
TEA_DEVICE void transform(float (&s)[kTiles][4], const AttentionArguments& args,
                          const SequencePair& seq, const Scaling& scaling,
                          const RowTerms (&terms)[2], const Window (&window)[2],
                          int64_t first_column, float (*bend)[4] = nullptr) {
  const auto each = [&](auto&& change) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) change(s[n][i], row_slot(i), column_of(n, i));
  };
  each([&](float& x, int, int) { x *= scaling.inner * scaling.outer; });
#pragma unroll 1  // one copy of add_bias() serves both places
  for (int place = TEA_BIAS_PRE_SCALE; place <= TEA_BIAS_POST_SCALE; ++place) {
    const bool before = place == TEA_BIAS_PRE_SCALE;
    if (args.bias.kind == place)
      add_bias(s, args, before ? scaling.outer : 1.0f, terms, window, first_column);
    if (!before) break;
    if (args.softcap > 0) each([&](float& x, int, int) { x = softcap(x, args.softcap); });
    if (bend) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          bend[n][i] = args.softcap > 0 ? softcap_slope(s[n][i], args.softcap) : 1.0f;
    }
  }
  if (args.alibi) add_alibi(s, seq, terms, first_column);
  each([&](float& x, int r, int c) { x = window[r].holds(c) ? x : kMinusInfinity; });
}

// Where dropout stands for the accumulator whose element (0, 0) is at (row, column) of a sequence.
struct Dropping {
  RngState rng;
  uint32_t stream, below;
};
TEA_DEVICE Dropping dropping_of(const AttentionArguments& args, int64_t b, int64_t head) {
  return {rng_of(args), dropout_stream(b + origin_of(args, 0), head + origin_of(args, 1)),
          args.dropout_threshold};
}

// p = change(p, whether it is kept), for each element. row, column: global, of element (0, 0).
// Where both are multiples of 16, two tiles share a cell; else every element asks for its own.
template <int kTiles, class Change>
TEA_DEVICE void decide(float (&p)[kTiles][4], const Dropping& d, int64_t row, int64_t column,
                       Change&& change) {
  if (((row | column) & 15) == 0) {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const Philox4 cell =
          dropout_cell(d.rng, d.stream, row + lane() / 4, column + 8 * n + lane() % 4 * 2);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = p[n + i / 2 % 2][i / 4 * 2 + i % 2];
        x = change(x, dropout_uniform(cell, i / 4 * 8, i / 2 % 2 * 8 + i % 2) >= d.below);
      }
    }
    return;
  }
#pragma unroll 1
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool keeps =
          dropout_keeps(d.rng, d.stream, row + row_of(i), column + column_of(n, i), d.below);
#pragma unroll
      for (int m = 0; m < kTiles; ++m)  // an index that is not constant would put p into memory
        if (m == n) p[m][i] = change(p[m][i], keeps);
    }
}
// Multiplies each element by `kept` or zero.
template <int kTiles>
TEA_DEVICE void drop(float (&p)[kTiles][4], const Dropping& d, int64_t row, int64_t column,
                     float kept) {
  decide(p, d, row, column, [kept](float x, bool keeps) { return keeps ? x * kept : 0.0f; });
}

// Softmax of rows that arrive in tiles (Milakov and Gimelshein, 2018). For the thread's two rows of
// an accumulator: the largest score so far, or less by a little, and the thread's share of the sum
// of exp(scale * (score - top)). A row with nothing to attend keeps top = -infinity, sum = 0.
struct OnlineSoftmax {
  float top[2], sum[2];

  TEA_DEVICE void start() {
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = kMinusInfinity, sum[r] = 0;
  }

  // Only the largest score.
  template <int kTiles>
  TEA_DEVICE void raise_top(const float (&s)[kTiles][4]) {
    float high[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) high[row_slot(i)] = fmaxf(high[row_slot(i)], s[n][i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], quad_max(high[r]));
  }

  // Turns scores into exp(scale * (score - top)) and gives the factor by which what was accumulated
  // before must shrink. scale_log2 = scale * log2(e), positive. One multiply-add per score, in
  // which the product with the top is rounded: all exponentials of the row share that error, which
  // scores of this size have anyway. From kFar on it could take them out of range; there the factor
  // is a power of two, whose product is exact, since scores that differ at all differ by more
  // than 8. Exact: the top is subtracted first, so that no exponential is above 1.
  //
  // A top that would rise by no more than `slack` stays, so that nothing shrinks; exponentials are
  // at most 2^slack then, which half precision holds: with 7 even where a base near kFar is off by
  // 8, since scores there differ by more. With 0 the top is the largest score.
  static constexpr float kFar = 1 << 28, kSlack = 7;
  template <bool kExact, int kTiles>
  TEA_DEVICE void update(float (&s)[kTiles][4], float scale_log2, float slack, float (&shrink)[2]) {
    const float before[2] = {top[0], top[1]};
    float finite[2], factor[2], base[2];
    raise_top(s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if ((top[r] - before[r]) * scale_log2 <= slack) top[r] = before[r];
      finite[r] = top[r] == kMinusInfinity ? 0.0f : top[r];  // else NaN
      shrink[r] = exp2_fast((before[r] - finite[r]) * scale_log2);
      sum[r] *= shrink[r];
      const float power = __uint_as_float(__float_as_uint(scale_log2) & 0x7F800000);
      factor[r] = fabsf(finite[r]) * scale_log2 < kFar ? scale_log2 : power;
      base[r] = finite[r] * factor[r];
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row_slot(i);
        s[n][i] = exp2_fast(kExact ? (s[n][i] - finite[r]) * scale_log2
                                   : fmaf(s[n][i], factor[r], -base[r]));
        sum[r] += s[n][i];
      }
  }
};

// What a row's sums amount to. `max` is the largest score, times its scale; `total` the sum of
// exponentials relative to it.
struct RowResult {
  float factor, lse, sum_exp;  // factor: by which the accumulated values become O
};
TEA_DEVICE RowResult result_of(float max, float total, float sink) {
  const bool nothing = max == kMinusInfinity && total == 0;
  if (nothing) return {0, sink, 0};
  const float own = max + log2_fast(total) * kLn2;
  if (sink == kMinusInfinity) return {1 / total, own, total};
  const float high = fmaxf(own, sink), low = fminf(own, sink);
  // log1p of what is at most 1, in float to its last bit.
  const float lse = own != own ? own : high + log1pf(expf(low - high));
  const float sum_exp = total + expf(sink - max);
  return {sum_exp < -kMinusInfinity ? 1 / sum_exp : expf(max - lse), lse, sum_exp};
}

}  // namespace tea::portable
