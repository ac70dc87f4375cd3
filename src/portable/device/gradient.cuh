// From scores in accumulators to probabilities and to the gradients of scores; and what rows, heads
// and FP8 bring to that. Accumulators are those of scores.cuh.
#pragma once
#include "portable/backward_passes.h"
#include "portable/device/scores.cuh"

namespace tea::portable {

// The rows of a sequence that see some key.
TEA_DEVICE Columns seeing_rows(const SequencePair& seq) {
  if (seq.kv.length == 0) return {0, 0};
  return {max(-seq.band.hi, int64_t{0}), min(seq.q.length, seq.kv.length - seq.band.lo)};
}
// Those that see some key of [begin, end).
TEA_DEVICE Columns seeing_rows(const SequencePair& seq, int64_t begin, int64_t end) {
  const Columns all = seeing_rows(seq);
  return {max(begin - seq.band.hi, all.begin), min(end - seq.band.lo, all.end)};
}
// The keys that some row of [begin, end) sees.
TEA_DEVICE Columns seen_keys(const SequencePair& seq, int64_t begin, int64_t end) {
  return {visible_columns(seq.band, begin, seq.kv.length).begin,
          visible_columns(seq.band, end - 1, seq.kv.length).end};
}

// The entry of RowSums for row 0 of a head of a sequence.
TEA_DEVICE int64_t first_entry(const BackwardArguments& work, const SequencePair& seq,
                               int64_t head) {
  const bool ragged = work.args.queries.form == TEA_RAGGED;
  return head * work.sums.rows + (ragged ? seq.q.start : seq.batch * work.args.queries.max_seqlen);
}

// The sums of dQ of 16 rows, 16 dimensions at a time. A whole block of rows keeps those of all its
// rows side by side, so that what a warp adds at once lies in 512 bytes in sequence; the rows that
// a sequence has beyond whole blocks lie in order. A block's rows have its memory in either way.
struct DqBlock {
  float* sums;
  int row, dims;  // from a row to the next one, from 16 dimensions to the next
  TEA_DEVICE float* at(int in_block, int column) const {
    return sums + in_block * row + column / 16 * dims;
  }
};
// `top`: the first row of the block, a multiple of 16.
TEA_DEVICE DqBlock dq_block(const RowSums& sums, int64_t first_entry, int top, int length) {
  float* const first = sums.dq + (first_entry + top) * sums.width;
  return top + 16 <= length ? DqBlock{first, 16, 256} : DqBlock{first, sums.width, 16};
}

// What to multiply by, and where: 1 but for the scale and the scalars of FP8.
struct Factors {
  Scaling scores;
  float dprob;       // dO . V
  float p, ds;       // an operand of the second product, before its cast
  float before;      // dS, before its largest is recorded
  float dq, dk, dv;  // the sums of the second product
};
// kPlain: neither FP8 nor dropout, which a plain kernel knows when it is compiled.
template <bool kPlain = false>
TEA_DEVICE Factors factors_of(const AttentionArguments& args) {
  const Fp8Scales& s = args.fp8;
  if (kPlain || !is_fp8(args.q.dtype))
    return {{1, args.scale}, 1, 1, 1, 1, args.scale, args.scale, kPlain ? 1.0f : args.keep_factor};
  const float q = scalar(s.q_inv), k = scalar(s.k_inv), dout = scalar(s.dout_inv),
              dp = scalar(s.dp_inv);
  return {{q * k, args.scale},
          dout * scalar(s.v_inv),
          scalar(s.s),
          scalar(s.dp),
          args.scale,
          dp * k,
          dp * q,
          scalar(s.s_inv) * dout};
}

struct Head {
  int64_t number;
  float slope;  // of ALiBi
  Dropping dropping;
};
TEA_DEVICE Head head_of(const AttentionArguments& args, const SequencePair& seq, int64_t number) {
  return {number, slope_of(args, seq.batch, number), dropping_of(args, seq.batch, number)};
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
  const AttentionArguments& args;
  const SequencePair& seq;
  const Head& head;
  int64_t row, column;

  TEA_DEVICE void windows(Window (&window)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) window[r] = window_of(seq, row + row_of(2 * r), column, 8 * kTiles);
  }

  // x: q.k, then the probability. `bend`: the slope of the soft cap.
  TEA_DEVICE void weigh(float (&x)[kTiles][4], float (&bend)[kTiles][4], const Scaling& scaling,
                        const float (&lse2)[2]) const {
    Window window[2];
    RowTerms terms[2];
    windows(window);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      terms[r] = terms_of(args, seq, head.number, row + row_of(2 * r), head.slope);
    transform(x, args, seq, scaling, terms, window, column, bend);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool seen = window[row_slot(i)].holds(column_of(n, i));
        x[n][i] = seen ? probability(x[n][i], kLog2E, lse2[row_slot(i)]) : 0.0f;
      }
    if (args.rng)
      decide(x, head.dropping, row + seq.origin_row, column + seq.origin_col,
             [](float p, bool keeps) { return keeps ? p : -p; });
  }
  static TEA_DEVICE bool kept(float p) { return __float_as_int(p) >= 0; }

  // The probability as it meets dO. The factor of what dropout keeps may be 65536, more than half
  // precision holds, so the sums take it; in fp8 the cast does, since its scale is for the product.
  TEA_DEVICE float operand(float p, float factor) const {
    const float x = kept(p) ? p : 0.0f;
    return is_fp8(args.q.dtype) ? cast_fp8(x * args.keep_factor * factor, args.q.dtype) : x;
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
        const bool seen = window[row_slot(i)].holds(column_of(n, i));
        const float dprob = kept(p[n][i]) ? dp[n][i] * factor * args.keep_factor : 0.0f;
        p[n][i] = seen ? fabsf(p[n][i]) * (dprob - delta[row_slot(i)]) : 0.0f;
      }
  }
  // It as it meets Q and K. `largest`: so far, of FP8.
  TEA_DEVICE float slope_operand(float ds, const Factors& f, float* largest) const {
    if (!is_fp8(args.q.dtype)) return ds;
    const float whole = ds * f.before;
    *largest = fmaxf(*largest, fabsf(whole));
    return cast_fp8(whole * f.ds, args.dp_dtype);
  }
};

// kRows rows of a head into a tile, from row `first` and head dimension `begin` on: rows that are
// not in `valid` and dimensions from `dim` on as zeros. kAny: of any type and alignment; else as
// copy_eight takes them. Copies may still be under way afterwards.
template <bool kAny, int kRows, int kThreads, int kDtype, int kDim>
TEA_DEVICE void load_rows(const Tile<kDtype, kDim>& tile, const StridedTensor& rows,
                          int64_t head_element, int first, const Columns& valid, int begin,
                          int dim) {
  constexpr int kEighths = kDim / 8, kStep = kThreads / kEighths;  // kStep: rows at a time
  static_assert(kThreads % kEighths == 0 && kRows % kStep == 0);
  const int thread = afresh_thread(static_cast<int>(threadIdx.x));
  const int before =
      first - static_cast<int>(valid.begin);  // of the tile's rows after the first valid
  const auto count = static_cast<unsigned>(max(valid.end - valid.begin, int64_t{0}));
  const auto inside = [&](int row, int column) {
    return static_cast<unsigned>(before + row) < (begin + column < dim ? count : 0);
  };
  const auto element = [&](int row, int column) {
    return head_element + (first + row) * rows.seq + begin + column;
  };
  if (!kAny || (rows.dtype == kDtype && rows.is_vectorizable)) {
    // The thread's column stays, its row and the pointer move on. Rows that are not inside are not
    // read, wherever the pointer is.
    const int row = thread / kEighths, column = thread % kEighths * 8;
    const char* from =
        static_cast<const char*>(rows.data) + element(row, column) * kElementBytes<kDtype>;
    const int64_t pitch = kStep * rows.seq * kElementBytes<kDtype>;
#pragma unroll
    for (int i = 0; i < kRows; i += kStep, from += pitch)
      copy_eight(tile, row + i, column, from, inside(row + i, column));
  } else {
#pragma unroll 1
    for (int n = thread; n < kRows * kEighths; n += kThreads) {
      const int row = n / kEighths, column = n % kEighths * 8;
      const bool there = inside(row, column);
#pragma unroll 1
      for (int j = 0; j < 8; ++j)
        store_one(tile, row, column + j,
                  there ? load_float(rows.data, rows.dtype, element(row, column) + j) : 0.0f);
    }
  }
}

// What becomes of the sums of a second product: rows of a tensor.
struct Result {
  const StridedTensor& rows;
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
