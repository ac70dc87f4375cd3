// Soft caps of the forward pass, c * tanh(x / c): of scores in the general kernels; of products,
// and the softmax of what it makes of them, where nothing else bends scores.
#pragma once
#include "hopper/device/softmax.cuh"

namespace tea::hopper {

// c * tanh(x / c) = c - 2c / (1 + e^(2x/c)), to a few units of c. Of this, a score keeps
// -1 / (1 + 2^s), of s in units of cap_unit().
TEA_DEVICE float cap_unit(float cap) { return 2 * kLog2E * reciprocal_fast(cap); }
TEA_DEVICE float capped(float s) { return -reciprocal_fast(1 + exp2_fast(s)); }

// The same of |s| < 1, scores up to a third of the cap: an odd polynomial, to 3e-8 of its value.
TEA_DEVICE float capped_near(float s) {
  const float square = s * s;
  float p = fmaf(square, -1.47290052e-5f, 3.32435264e-4f);
  p = fmaf(square, p, -6.93783452e-3f);
  return fmaf(s, fmaf(square, p, 0.17328679f), -0.5f);
}

// The same where exponentials are what there is too few of: four elements of a row share a
// division. Up to 2^30 each, where tanh is 1, their product is in range. large: some are beyond.
template <int kCount>
TEA_DEVICE void cap_far(float (&s)[kCount], bool large) {
  if (large)
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = min_or_nan(s[i], 30);
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

// Where all scores of a thread are near zero, as they are under a cap that seldom bites, no
// exponential is needed. highest: the largest of each row, likewise capped; where divisions are
// shared they are known for less before the cap than after it.
template <int kCount>
TEA_DEVICE void cap_scores(float (&s)[kCount], float (&highest)[2]) {
  uint32_t any[2] = {};  // chains of waits
#pragma unroll
  for (int i = 0; i < kCount; ++i) any[i % 2] |= __float_as_uint(fmaf(s[i], s[i], 1));
  if ((any[0] | any[1]) < 0x40000000) {  // none is 2 or more, nor infinite, nor no number
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] = capped_near(s[i]);
    return thread_row_max(s, highest);
  }
  thread_row_max(s, highest);
  cap_far(s, fmaxf(highest[0], highest[1]) > 30);
#pragma unroll
  for (int r = 0; r < 2; ++r) highest[r] = capped(highest[r]);
}

// What a kernel for a soft cap alone is told.
struct Cap {
  float scale;    // of products, to units of cap_unit()
  float limit;    // of products that are near zero; negative: none is
  float bend[3];  // a polynomial of their square, times which they are logarithms to the base 2
  float unscale;  // makes what capped() gives of these, but for the half
};

// Up to a quarter of the cap, x * (1 - x^2 / 3 + ...) for tanh(x), to 4e-7 of its value. Where the
// coefficients leave the range of floats, no product is near.
inline Cap cap_of(float scale, float cap) {
  const double over = double{scale} / cap, log2 = double{scale} * kLog2E,
               twice = 2.0 * cap * kLog2E;
  const bool ranges = over > 1e-6 && over < 1e6 && twice > 1e-6 && twice < 1e6;
  const auto f = [](double x) { return static_cast<float>(x); };
  if (!ranges) return {f(2 * kLog2E * over), -1, {}, 0};
  return {f(2 * kLog2E * over),
          f(0.25 / over),
          {f(log2 * 0.99999960434), f(log2 * -0.33321908225 * over * over),
           f(log2 * 0.12841613431 * over * over * over * over)},
          f(1 / twice)};
}

// The softmax of a block of products under a cap. It rises, so the largest product gives the
// largest score. Where all products of a warp are near zero, capping them is a part of their
// exponent.
struct CappedBlock {
  bool near, large;
  float factor[2], base[2];

  static TEA_DEVICE float bent(const Cap& c, float x) {
    const float square = x * x;
    return fmaf(fmaf(c.bend[2], square, c.bend[1]), square, c.bend[0]);
  }
  // What is not `seen` is minus infinity. scale_log2, shrink: those of OnlineSoftmax::update().
  template <int kCount>
  TEA_DEVICE void raise(const Cap& c, OnlineSoftmax& softmax, const float (&s)[kCount],
                        const uint32_t (&seen)[2], float scale_log2, float (&shrink)[2]) {
    float highest[2], lowest[2] = {0, 0};
    thread_row_max(s, highest);
    if ((seen[0] & seen[1]) == ~0u)
#pragma unroll
      for (int i = 0; i < kCount; ++i) lowest[half_of(i)] = fminf(lowest[half_of(i)], s[i]);
    else
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (seen[half_of(i)] >> number_in_row(i) & 1)
          lowest[half_of(i)] = fminf(lowest[half_of(i)], s[i]);
    const float top = fmaxf(highest[0], highest[1]), bottom = fminf(lowest[0], lowest[1]);
    near = __all_sync(0xffffffff, fmaxf(top, -bottom) <= c.limit);
    large = false;
    if (near) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        highest[r] = fmaf(highest[r] * bent(c, highest[r]), c.unscale, -0.5f);
    } else {
      large = top * c.scale > 30;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        highest[r] = seen[r] ? capped(highest[r] * c.scale) : kMinusInfinity;
    }
    softmax.raise(highest, scale_log2, shrink, factor, base);
  }
  // Weights of products; those of minus infinity are 0 where products are near zero, and else those
  // of what is not seen have to become so.
  template <int kCount>
  TEA_DEVICE void exponentials(const Cap& c, float (&s)[kCount], const uint32_t (&seen)[2]) {
    if (near) {
#pragma unroll
      for (int r = 0; r < 2; ++r) base[r] = fmaf(0.5f, factor[r], base[r]);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        s[i] = exp2_fast(fmaf(s[i], bent(c, s[i]), -base[half_of(i)]));
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[i] *= c.scale;
    cap_far(s, large);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      s[i] = exp2_fast(fmaf(s[i], factor[half_of(i)], -base[half_of(i)]));
    if ((seen[0] & seen[1]) != ~0u)
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (!(seen[half_of(i)] >> number_in_row(i) & 1)) s[i] = 0;
  }
};

}  // namespace tea::hopper
