// Softmax of a row that arrives in tiles (Milakov and Gimelshein, 2018), in powers of two: the
// scale of the scores times log2(e) is folded into one multiply-add per element.
#pragma once
#include "hopper/device/tile.cuh"

namespace tea::hopper {

// What makes natural logarithms of scores: factor * score + offset; factor > 0.
struct Unit {
  float factor, offset;
};

// For the thread's two rows: the largest score so far, not yet scaled, and the thread's share of
// the sum of 2^(scale * (score - top)). A row with nothing to attend keeps top = -infinity, sum =
// 0.
struct OnlineSoftmax {
  float top[2], sum[2];

  // From here on a product with the top, rounded, could take exponentials out of range; the factor
  // then is a power of two, whose products are exact. Scores that differ at all differ by more than
  // 8 there, and their own rounding is as large.
  static constexpr float kFar = 1 << 28;

  TEA_DEVICE void start() {
    for (int r = 0; r < 2; ++r) {
      top[r] = kMinusInfinity;
      sum[r] = 0;
    }
  }
  // Turns scores into 2^(scale * (score - top)), masked scores being -infinity, and gives the
  // factor by which what was accumulated before must shrink. highest: the largest of the thread's
  // scores in each row. scale_log2 = scale * log2(e), positive.
  template <int kCount>
  TEA_DEVICE void update(float (&s)[kCount], const float (&highest)[2], float scale_log2,
                         float (&shrink)[2]) {
    float factor[2], base[2];
    raise(highest, scale_log2, shrink, factor, base);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      s[i] = exp2_fast(fmaf(s[i], factor[half_of(i)], -base[half_of(i)]));
    thread_row_sum(s, sum);
  }
  // What of it precedes the weights, which are 2^(factor * score - base), and their sum.
  TEA_DEVICE void raise(const float (&highest)[2], float scale_log2, float (&shrink)[2],
                        float (&factor)[2], float (&base)[2]) {
    const float power = __uint_as_float(__float_as_uint(scale_log2) & 0x7F800000);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float now = fmaxf(top[r], quad_max(highest[r]));
      const float finite = now == kMinusInfinity ? 0.0f : now;  // else minus itself is NaN
      shrink[r] = exp2_fast((top[r] - finite) * scale_log2);
      factor[r] = fabsf(finite) * scale_log2 < kFar ? scale_log2 : power;
      base[r] = finite * factor[r];
      top[r] = now;
      sum[r] *= shrink[r];
    }
  }

  // What becomes of a row, once, at the end: what to multiply the output by, and what is reported.
  // sink: one more score with no value behind it; -infinity: none. In natural logarithms, since the
  // lowest float, with which many mask, has none to the base 2.
  struct End {
    float factor, lse, max, sum_exp;
  };
  struct Ends {
    End row[2];
  };
  // Of both rows at once: each is a chain of waits, and a tile waits for it.
  TEA_DEVICE Ends finish(const Unit& unit, float sink = kMinusInfinity) const {
    const float seen[2] = {quad_sum(sum[0]), quad_sum(sum[1])};
    Ends end;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float own = fmaf(top[r], unit.factor, unit.offset);
      end.row[r] = {seen[r] == 0 ? 0 : reciprocal_fast(seen[r]),
                    fmaf(log2_fast(seen[r]), kLn2, own), seen[r] == seen[r] ? own : seen[r],
                    seen[r]};
    }
    if (sink != kMinusInfinity)
#pragma unroll
      for (int r = 0; r < 2; ++r) add_sink(end.row[r], sink);
    return end;
  }
  static TEA_DEVICE void add_sink(End& end, float sink) {
    const float seen = end.sum_exp, own = end.max;
    if (seen == 0) return void(end.lse = sink);  // nothing but the sink, to its last bit
    const auto power = [](float x) { return exp2_fast(x * kLog2E); };
    const float high = fmaxf(own, sink), shrink = power(own - high);
    const float total = fmaf(seen, shrink, power(sink - high));
    end = {shrink * reciprocal_fast(total), fmaf(log2_fast(total), kLn2, high), own,
           seen + power(sink - own)};
  }
};

}  // namespace tea::hopper
