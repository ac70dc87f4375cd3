// Online softmax (Milakov and Gimelshein, 2018) in powers of two: the scale of the scores times
// log2(e) is folded into one multiply-add per element.
#pragma once
#include "hopper/device/accumulator.cuh"

namespace tea::hopper {

// The affine map from a score in registers to its natural-logarithm value: factor * score + offset,
// with factor > 0.
struct ScoreUnit {
  float factor, offset;
};

// The state of the thread's two rows: the maximum score so far, not yet scaled, and the thread's
// share of the sum of 2^(scale * (score - max)). A row without a visible key keeps
// row_max = -infinity and row_sum = 0.
struct OnlineSoftmax {
  float row_max[2], row_sum[2];

  // From this magnitude on, the rounding of the product of scale and maximum could overflow an
  // exponential. The scale is then replaced by a power of two, whose products are exact. Scores of
  // that magnitude are more than 8 apart if they differ at all, and their own rounding error is as
  // large as the error that this introduces.
  static constexpr float kExactScaleFrom = 1 << 28;

  TEA_DEVICE void start() {
    for (int r = 0; r < 2; ++r) {
      row_max[r] = kMinusInfinity;
      row_sum[r] = 0;
    }
  }
  // Replaces scores by 2^(scale * (score - max)), where masked scores are -infinity, and returns in
  // `rescale` the factors for everything accumulated so far. `highest` is the maximum of the
  // thread's scores in each row. scale_log2 = scale * log2(e) > 0.
  template <int kCount>
  TEA_DEVICE void update(float (&s)[kCount], const float (&highest)[2], float scale_log2,
                         float (&rescale)[2]) {
    float factor[2], base[2];
    update_max(highest, scale_log2, rescale, factor, base);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      s[i] = exp2_fast(fmaf(s[i], factor[row_slot(i)], -base[row_slot(i)]));
    thread_row_sum(s, row_sum);
  }
  // The part of update() before the exponentials, which are 2^(factor * score - base), and before
  // their sum.
  TEA_DEVICE void update_max(const float (&highest)[2], float scale_log2, float (&rescale)[2],
                             float (&factor)[2], float (&base)[2]) {
    const float power = __uint_as_float(__float_as_uint(scale_log2) & 0x7F800000);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float now = fmaxf(row_max[r], quad_max(highest[r]));
      const float finite = now == kMinusInfinity ? 0.0f : now;  // -infinity - -infinity is NaN
      rescale[r] = exp2_fast((row_max[r] - finite) * scale_log2);
      factor[r] = fabsf(finite) * scale_log2 < kExactScaleFrom ? scale_log2 : power;
      base[r] = finite * factor[r];
      row_max[r] = now;
      row_sum[r] *= rescale[r];
    }
  }

  // The results of a row: the factor that normalises O, and the statistics to be written.
  struct RowResult {
    float factor, lse, max, sum_exp;
  };
  struct Result {
    RowResult row[2];
  };
  // Of a row's maximum and its complete sum.
  static TEA_DEVICE RowResult row_result(float row_max, float total, const ScoreUnit& unit) {
    const float own = fmaf(row_max, unit.factor, unit.offset);
    return {total == 0 ? 0 : reciprocal_fast(total), fmaf(log2_fast(total), kLn2, own),
            total == total ? own : total, total};
  }
  // `sink` is one more logit, without a value vector; -infinity if there is none. It is a natural
  // logarithm, because multiplying the lowest float, which many use as a mask, by log2(e)
  // overflows. Both rows are computed together, because each is a chain of dependent instructions
  // with long latency.
  TEA_DEVICE Result finalize(const ScoreUnit& unit, float sink = kMinusInfinity) const {
    const float total[2] = {quad_sum(row_sum[0]), quad_sum(row_sum[1])};
    Result result;
#pragma unroll
    for (int r = 0; r < 2; ++r) result.row[r] = row_result(row_max[r], total[r], unit);
    if (sink != kMinusInfinity)
#pragma unroll
      for (int r = 0; r < 2; ++r) add_sink(result.row[r], sink);
    return result;
  }
  static TEA_DEVICE void add_sink(RowResult& row, float sink) {
    const float own_sum = row.sum_exp, own_max = row.max;
    if (own_sum == 0) return void(row.lse = sink);  // exactly the sink, without rounding
    const auto power = [](float x) { return exp2_fast(x * kLog2E); };
    const float high = fmaxf(own_max, sink), rescale = power(own_max - high);
    const float total = fmaf(own_sum, rescale, power(sink - high));
    row = {rescale * reciprocal_fast(total), fmaf(log2_fast(total), kLn2, high), own_max,
           own_sum + power(sink - own_max)};
  }
};

}  // namespace tea::hopper
