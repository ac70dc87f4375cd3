// Online softmax (Milakov and Gimelshein, 2018), and the results of a row.
#pragma once
#include "portable/device/accumulator.cuh"

namespace tea::portable {

// The state of the thread's two rows of an accumulator: the maximum score so far, or less by at
// most the threshold of update(), and the thread's share of the sum of exp(scale * (score -
// row_max)). A row without a visible key keeps row_max = -infinity and row_sum = 0.
struct OnlineSoftmax {
  float row_max[2], row_sum[2];

  TEA_DEVICE void start() {
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = kMinusInfinity, row_sum[r] = 0;
  }

  // Updates the maximum only.
  template <int kTiles>
  TEA_DEVICE void update_max(const float (&s)[kTiles][4]) {
    float highest[2] = {kMinusInfinity, kMinusInfinity};
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) highest[row_slot(i)] = fmaxf(highest[row_slot(i)], s[n][i]);
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = fmaxf(row_max[r], quad_max(highest[r]));
  }

  // From this magnitude on, the rounding of the product of scale and maximum could overflow an
  // exponential. The scale is then replaced by a power of two, whose products are exact. Scores of
  // that magnitude are more than 8 apart if they differ at all.
  static constexpr float kExactScaleFrom = 1 << 28;
  // The largest threshold of update(): exponentials up to 2^7 fit half precision, also where a
  // maximum near kExactScaleFrom is off by 8.
  static constexpr float kRescaleThreshold = 7;

  // Replaces scores by exp(scale * (score - row_max)) and returns in `rescale` the factors for
  // everything accumulated so far. scale_log2 = scale * log2(e), positive. There is one
  // multiply-add per score: the rounding of the product with the maximum is common to all
  // exponentials of the row, and no larger than the error of scores of that magnitude. kExact: the
  // maximum is subtracted first, so that no exponential exceeds 1.
  //
  // A maximum that would rise by at most `threshold` stays, so that nothing has to be rescaled;
  // with threshold 0 it is the maximum score.
  template <bool kExact, int kTiles>
  TEA_DEVICE void update(float (&s)[kTiles][4], float scale_log2, float threshold,
                         float (&rescale)[2]) {
    const float before[2] = {row_max[0], row_max[1]};
    float finite[2], factor[2], base[2];
    update_max(s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if ((row_max[r] - before[r]) * scale_log2 <= threshold) row_max[r] = before[r];
      finite[r] = row_max[r] == kMinusInfinity ? 0.0f : row_max[r];  // -infinity - -infinity is NaN
      rescale[r] = exp2_fast((before[r] - finite[r]) * scale_log2);
      row_sum[r] *= rescale[r];
      const float power = __uint_as_float(__float_as_uint(scale_log2) & 0x7F800000);
      factor[r] = fabsf(finite[r]) * scale_log2 < kExactScaleFrom ? scale_log2 : power;
      base[r] = finite[r] * factor[r];
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = row_slot(i);
        s[n][i] = exp2_fast(kExact ? (s[n][i] - finite[r]) * scale_log2
                                   : fmaf(s[n][i], factor[r], -base[r]));
        row_sum[r] += s[n][i];
      }
  }
};

// The unnormalised results of a row over some keys.
struct PartialRow {
  float row_max, row_sum;
  TEA_DEVICE bool is_empty() const { return row_max == kMinusInfinity && row_sum == 0; }
};

// Adds the results over further keys to those of a row so far. The operations are the same wherever
// results are merged, and results without a visible key change no bit.
class RowMerge {
 public:
  TEA_DEVICE RowMerge(PartialRow before, PartialRow further)
      : keeps_(further.is_empty()),
        takes_(before.is_empty()),
        max_(fmaxf(before.row_max, further.row_max)),
        before_(exp2_fast((before.row_max - max_) * kLog2E)),
        further_(exp2_fast((further.row_max - max_) * kLog2E)) {}
  TEA_DEVICE float row_max() const { return max_; }
  // Of a sum of exponentials, or of an element of O.
  TEA_DEVICE float operator()(float before, float further) const {
    if (keeps_) return before;
    return takes_ ? further : fmaf(further, further_, __fmul_rn(before, before_));
  }

 private:
  bool keeps_, takes_;
  float max_, before_, further_;
};

// The results of a row; `factor` normalises the accumulated O.
struct RowResult {
  float factor, lse, sum_exp;
};
// row_max: the maximum score times its scale; row_sum: the sum of exponentials relative to it;
// sink: one more logit without a value vector, -infinity if there is none.
TEA_DEVICE RowResult normalize_row(float row_max, float row_sum, float sink) {
  const bool is_empty = row_max == kMinusInfinity && row_sum == 0;
  if (is_empty) return {0, sink, 0};
  const float own = row_max + log2_fast(row_sum) * kLn2;
  if (sink == kMinusInfinity) return {1 / row_sum, own, row_sum};
  const float high = fmaxf(own, sink), low = fminf(own, sink);
  // The argument of log1pf is at most 1, for which it is accurate to the last bit.
  const float lse = own != own ? own : high + log1pf(expf(low - high));
  const float sum_exp = row_sum + expf(sink - row_max);
  return {sum_exp < -kMinusInfinity ? 1 / sum_exp : expf(row_max - lse), lse, sum_exp};
}

}  // namespace tea::portable
