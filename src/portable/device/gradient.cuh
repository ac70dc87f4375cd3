// From scores in accumulators to probabilities and to the gradients of scores; and what rows, heads
// and FP8 bring to that. Accumulators are those of scores.cuh.
#pragma once
#include "portable/backward_passes.h"
#include "portable/device/scores.cuh"

namespace tea::portable {

// The rows of a sequence that see some key.
TEA_DEVICE Columns seeing_rows(const Item& item) {
  if (item.kv.length == 0) return {0, 0};
  return {max(-item.band.hi, int64_t{0}), min(item.q.length, item.kv.length - item.band.lo)};
}
// Those that see some key of [begin, end).
TEA_DEVICE Columns seeing_rows(const Item& item, int64_t begin, int64_t end) {
  const Columns all = seeing_rows(item);
  return {max(begin - item.band.hi, all.begin), min(end - item.band.lo, all.end)};
}
// The keys that some row of [begin, end) sees.
TEA_DEVICE Columns seen_keys(const Item& item, int64_t begin, int64_t end) {
  return {visible_columns(item.band, begin, item.kv.length).begin,
          visible_columns(item.band, end - 1, item.kv.length).end};
}

// The entry of RowSums for row 0 of a head of a sequence.
TEA_DEVICE int64_t first_entry(const BackwardWork& work, const Item& item, int64_t head) {
  const bool ragged = work.w.queries.form == TEA_RAGGED;
  return head * work.sums.rows + (ragged ? item.q.start : item.b * work.w.queries.capacity);
}

// 16 dimensions of a row's sums of dQ, from `column` on, a multiple of 16. A whole block of 16 rows
// keeps them side by side, so that what a warp adds at once lies in 512 bytes in sequence; the rows
// that a sequence has beyond whole blocks lie in order. The rows of a block have its memory
// together in either way.
TEA_DEVICE bool in_whole_block(int row, int length) { return row / 16 * 16 + 16 <= length; }
TEA_DEVICE int dq_step(int row, int length) { return in_whole_block(row, length) ? 256 : 16; }
TEA_DEVICE int64_t dq_sum(const RowSums& sums, int64_t first_entry, int row, int length,
                          int column) {
  if (!in_whole_block(row, length)) return (first_entry + row) * sums.width + column;
  return (first_entry + row / 16 * 16) * sums.width + row % 16 * 16 + column * 16;
}

// What to multiply by, and where: 1 but for the scale and the scalars of FP8.
struct Factors {
  Scaling scores;
  float dprob;       // dO . V
  float p, ds;       // an operand of the second product, before its cast
  float before;      // dS, before its largest is recorded
  float dq, dk, dv;  // the sums of the second product
};
TEA_DEVICE Factors factors_of(const Work& w) {
  const Scales& s = w.scales;
  if (!is_fp8(w.q.dtype)) return {{1, w.scale}, 1, 1, 1, 1, w.scale, w.scale, w.keep_factor};
  const float q = scalar(s.q_inv), k = scalar(s.k_inv), dout = scalar(s.dout_inv),
              dp = scalar(s.dp_inv);
  return {{q * k, w.scale}, dout * scalar(s.v_inv), scalar(s.s), scalar(s.dp), w.scale, dp * k,
          dp * q,           scalar(s.s_inv) * dout};
}

struct Head {
  int64_t number;
  float slope;  // of ALiBi
  Dropping dropping;
};
TEA_DEVICE Head head_of(const Work& w, const Item& item, int64_t number) {
  return {number, slope_of(w, item.b, number), dropping_of(w, item.b, number)};
}

// exp(score - LSE), which is at most 1; where both are huge, so is what rounding leaves of their
// difference.
TEA_DEVICE float probability(float score, float scale_log2, float lse2) {
  return exp2_fast(smaller(fmaf(score, scale_log2, -lse2), 0.0f));
}

// 16 rows of scores and 8 kTiles columns, of which the first is at (row, column) of a sequence, on
// their way through the general rules. An element's sign says whether dropout keeps it.
template <int kTiles>
struct Strip {
  const Work& w;
  const Item& item;
  const Head& head;
  int64_t row, column;

  TEA_DEVICE void windows(Window (&window)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      window[r] = window_of(item, row + row_of(2 * r), column, 8 * kTiles);
  }

  // x: q.k, then the probability. `bend`: the slope of the soft cap.
  TEA_DEVICE void weigh(float (&x)[kTiles][4], float (&bend)[kTiles][4], const Scaling& scaling,
                        const float (&lse2)[2]) const {
    Window window[2];
    RowTerms terms[2];
    windows(window);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      terms[r] = terms_of(w, item, head.number, row + row_of(2 * r), head.slope);
    transform(x, w, item, scaling, terms, window, column, bend);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool seen = window[half_of(i)].holds(column_of(n, i));
        x[n][i] = seen ? probability(x[n][i], kLog2E, lse2[half_of(i)]) : 0.0f;
      }
    if (w.rng)
      decide(x, head.dropping, row + item.origin_row, column + item.origin_col,
             [](float p, bool keeps) { return keeps ? p : -p; });
  }
  static TEA_DEVICE bool kept(float p) { return __float_as_int(p) >= 0; }

  // The probability as it meets dO. The factor of what dropout keeps may be 65536, more than half
  // precision holds, so the sums take it; in fp8 the cast does, since its scale is for the product.
  TEA_DEVICE float operand(float p, float factor) const {
    const float x = kept(p) ? p : 0.0f;
    return is_fp8(w.q.dtype) ? cast_fp8(x * w.keep_factor * factor, w.q.dtype) : x;
  }

  // p, which may have been multiplied by the slope of the soft cap, becomes the gradient of the
  // score.
  TEA_DEVICE void slope(float (&p)[kTiles][4], const float (&dp)[kTiles][4], float factor,
                        const float (&delta)[2]) const {
    Window window[2];
    windows(window);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool seen = window[half_of(i)].holds(column_of(n, i));
        const float dprob = kept(p[n][i]) ? dp[n][i] * factor * w.keep_factor : 0.0f;
        p[n][i] = seen ? fabsf(p[n][i]) * (dprob - delta[half_of(i)]) : 0.0f;
      }
  }
  // It as it meets Q and K. `largest`: so far, of FP8.
  TEA_DEVICE float slope_operand(float ds, const Factors& f, float* largest) const {
    if (!is_fp8(w.q.dtype)) return ds;
    const float whole = ds * f.before;
    *largest = fmaxf(*largest, fabsf(whole));
    return cast_fp8(whole * f.ds, w.dp_dtype);
  }
};

// kRows rows of a head into a tile, from row `first` and head dimension `begin` on: rows that are
// not in `valid` and dimensions from `dim` on as zeros. kAny: of any type and alignment; else as
// copy_eight takes them. Copies may still be under way afterwards.
template <bool kAny, int kRows, int kThreads, int kDtype, int kDim>
TEA_DEVICE void load_rows(const Tile<kDtype, kDim>& tile, const Rows& rows, int64_t head_element,
                          int first, const Columns& valid, int begin, int dim) {
  constexpr int kEighths = kDim / 8;
  static_assert(kRows * kEighths % kThreads == 0);
  const int thread = afresh(static_cast<int>(threadIdx.x));
  const int low = static_cast<int>(valid.begin), high = static_cast<int>(valid.end);
  const auto each = [&](int n, auto&& load) {
    const int row = n / kEighths, column = n % kEighths * 8;
    const bool inside = first + row >= low && first + row < high && begin + column < dim;
    load(row, column, head_element + (first + row) * rows.seq + begin + column, inside);
  };
  if (!kAny || (rows.dtype == kDtype && rows.wide)) {
    const char* const data = static_cast<const char*>(rows.data);
#pragma unroll
    for (int i = 0; i < kRows * kEighths / kThreads; ++i)
      each(i * kThreads + thread, [&](int row, int column, int64_t element, bool inside) {
        copy_eight(tile, row, column, inside ? data + element * kElementBytes<kDtype> : data,
                   inside);
      });
  } else {
#pragma unroll 1
    for (int n = thread; n < kRows * kEighths; n += kThreads)
      each(n, [&](int row, int column, int64_t element, bool inside) {
#pragma unroll 1
        for (int j = 0; j < 8; ++j)
          store_one(tile, row, column + j,
                    inside ? load_float(rows.data, rows.dtype, element + j) : 0.0f);
      });
  }
}

// What becomes of the sums of a second product: rows of a tensor.
struct Result {
  const Rows& rows;
  int64_t head_element;
  int begin, dim;  // head dimensions
  float factor, scale;
  float* amax;
};
// kRows x kWidth sums in shared memory to rows from `first` on, of which the tensor has `count`;
// rows that are not in `valid` as zeros.
template <int kRows, int kWidth, int kThreads>
TEA_DEVICE void store_sums(const float (*sums)[kWidth], const Result& to, int first, int64_t count,
                           const Columns& valid) {
  float largest = 0;
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < kRows * kWidth; n += kThreads) {
    const int row = first + n / kWidth, column = to.begin + n % kWidth;
    if (row >= count || column >= to.dim) continue;
    const bool any = row >= valid.begin && row < valid.end;
    const float value = any ? sums[n / kWidth][n % kWidth] * to.factor : 0.0f;
    largest = fmaxf(largest, fabsf(value));
    store_float(to.rows.data, to.rows.dtype, to.head_element + row * to.rows.seq + column,
                value * to.scale);
  }
  raise_by_warp(to.amax, largest);
}

}  // namespace tea::portable
