// Soft cap, c * tanh(x / c): of scores in the general kernels, and of products together with their
// softmax in the kernels for a soft cap alone.
#pragma once
#include "hopper/device/softmax.cuh"

namespace tea::hopper {

// c * tanh(x / c) = c - 2c / (1 + e^(2x/c)), to a few ulp of c. A capped score is kept as
// -1 / (1 + 2^s), where s is the score in units of softcap_unit().
TEA_DEVICE float softcap_unit(float cap) { return 2 * kLog2E * reciprocal_fast(cap); }
TEA_DEVICE float softcap_exp(float s) { return -reciprocal_fast(1 + exp2_fast(s)); }

// The same for |s| < 1, which are scores up to a third of the cap: an odd polynomial, with a
// relative error of 3e-8.
TEA_DEVICE float softcap_polynomial(float s) {
  const float square = s * s;
  float p = fmaf(square, -1.47290052e-5f, 3.32435264e-4f);
  p = fmaf(square, p, -6.93783452e-3f);
  return fmaf(s, fmaf(square, p, 0.17328679f), -0.5f);
}

// softcap_exp() of all scores of a thread, where MUFU throughput is the limit: four elements of a
// row share one reciprocal. From 2^30 on tanh is 1; clamped to that, the product of four
// denominators stays in range. may_overflow: some scores exceed the limit.
template <int kCount>
TEA_DEVICE void softcap_exp_all(float (&s)[kCount], bool may_overflow) {
  if (may_overflow)
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = min_nan(s[i], 30);
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const int first = i / 8 * 8 + i / 4 % 2 * 2;
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = 1 + exp2_fast(s[first + k / 2 * 4 + k % 2]);
    const float low = x[0] * x[1], high = x[2] * x[3], all = -reciprocal_fast(low * high);
    const float over_low = all * high, over_high = all * low;
    const float over[4] = {over_low * x[1], over_low * x[0], over_high * x[3], over_high * x[2]};
#pragma unroll
    for (int k = 0; k < 4; ++k) s[first + k / 2 * 4 + k % 2] = over[k];
  }
}

// Caps the scores of a thread. Where all of them are small, as is usual, the polynomial replaces
// the exponentials. `highest` is the maximum of each row after the cap; on the path with
// exponentials it is computed before the cap, where it costs fewer instructions.
template <int kCount>
TEA_DEVICE void softcap_scores(float (&s)[kCount], float (&highest)[2]) {
  uint32_t any[2] = {};  // two independent chains of dependent instructions
#pragma unroll
  for (int i = 0; i < kCount; ++i) any[i % 2] |= __float_as_uint(fmaf(s[i], s[i], 1));
  if ((any[0] | any[1]) < 0x40000000) {  // no s * s + 1 is 2 or more, infinite or NaN
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = softcap_polynomial(s[i]);
    return thread_row_max(s, highest);
  }
  thread_row_max(s, highest);
  softcap_exp_all(s, fmaxf(highest[0], highest[1]) > 30);
#pragma unroll
  for (int r = 0; r < 2; ++r) highest[r] = softcap_exp(highest[r]);
}

// The host's constants for the kernels with a soft cap and no other modification.
struct SoftcapPolynomial {
  float scale;           // from products to units of softcap_unit()
  float limit;           // the polynomial serves products up to this magnitude; negative: none
  float coefficient[3];  // x * polynomial(x^2) is the base-2 logarithm of the capped score's weight
  float unscale;         // from these logarithms to the form of softcap_exp(), except for -0.5
};

// Up to a quarter of the cap the polynomial x * (1 - x^2 / 3 + ...) replaces tanh(x), with a
// relative error of 4e-7. Where a coefficient would leave the range of floats, it serves no
// product.
inline SoftcapPolynomial make_softcap_polynomial(float scale, float cap) {
  const double over = double{scale} / cap, log2 = double{scale} * kLog2E,
               twice = 2.0 * cap * kLog2E;
  const bool in_range = over > 1e-6 && over < 1e6 && twice > 1e-6 && twice < 1e6;
  const auto f = [](double x) { return static_cast<float>(x); };
  if (!in_range) return {f(2 * kLog2E * over), -1, {}, 0};
  return {f(2 * kLog2E * over),
          f(0.25 / over),
          {f(log2 * 0.99999960434), f(log2 * -0.33321908225 * over * over),
           f(log2 * 0.12841613431 * over * over * over * over)},
          f(1 / twice)};
}

// The online softmax of a block of products under a soft cap. The cap is monotonic, so the largest
// product has the largest score. Where all products of a warp are small, the polynomial becomes
// part of the exponent.
struct SoftcapSoftmax {
  bool use_polynomial, may_overflow;
  float factor[2], base[2];

  static TEA_DEVICE float polynomial(const SoftcapPolynomial& c, float x) {
    const float square = x * x;
    return fmaf(fmaf(c.coefficient[2], square, c.coefficient[1]), square, c.coefficient[0]);
  }
  // Products that are not visible are -infinity. For scale_log2 and rescale see
  // OnlineSoftmax::update().
  template <int kCount>
  TEA_DEVICE void update_max(const SoftcapPolynomial& c, OnlineSoftmax& softmax,
                             const float (&s)[kCount], const uint32_t (&visible)[2],
                             float scale_log2, float (&rescale)[2]) {
    float highest[2], lowest[2] = {0, 0};
    thread_row_max(s, highest);
    if ((visible[0] & visible[1]) == ~0u)
#pragma unroll
      for (int i = 0; i < kCount; ++i) lowest[row_slot(i)] = fminf(lowest[row_slot(i)], s[i]);
    else
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (visible[row_slot(i)] >> index_in_row(i) & 1)
          lowest[row_slot(i)] = fminf(lowest[row_slot(i)], s[i]);
    const float top = fmaxf(highest[0], highest[1]), bottom = fminf(lowest[0], lowest[1]);
    use_polynomial = __all_sync(0xffffffff, fmaxf(top, -bottom) <= c.limit);
    may_overflow = false;
    if (use_polynomial) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        highest[r] = fmaf(highest[r] * polynomial(c, highest[r]), c.unscale, -0.5f);
    } else {
      may_overflow = top * c.scale > 30;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        highest[r] = visible[r] ? softcap_exp(highest[r] * c.scale) : kMinusInfinity;
    }
    softmax.update_max(highest, scale_log2, rescale, factor, base);
  }
  // Replaces products by unnormalised P. The polynomial maps -infinity to 0; on the other path the
  // products that are not visible are set to 0.
  template <int kCount>
  TEA_DEVICE void exponentials(const SoftcapPolynomial& c, float (&s)[kCount],
                               const uint32_t (&visible)[2]) {
    if (use_polynomial) {
#pragma unroll
      for (int r = 0; r < 2; ++r) base[r] = fmaf(0.5f, factor[r], base[r]);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        s[i] = exp2_fast(fmaf(s[i], polynomial(c, s[i]), -base[row_slot(i)]));
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= c.scale;
    softcap_exp_all(s, may_overflow);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      s[i] = exp2_fast(fmaf(s[i], factor[row_slot(i)], -base[row_slot(i)]));
    if ((visible[0] & visible[1]) != ~0u)
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (!(visible[row_slot(i)] >> index_in_row(i) & 1)) s[i] = 0;
  }
};

}  // namespace tea::hopper
