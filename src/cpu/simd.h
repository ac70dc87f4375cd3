// Primitives of the tiled kernels: vectors of float and double, by the compiler's vector
// extension. Included once per instruction set, inside its namespace and under its target options,
// with kBytes the width of a vector register.
#pragma once

typedef float VF __attribute__((vector_size(kBytes)));
typedef double VD __attribute__((vector_size(kBytes)));
typedef int32_t VI __attribute__((vector_size(kBytes)));
typedef int64_t VL __attribute__((vector_size(kBytes)));
typedef uint32_t VU __attribute__((vector_size(kBytes)));
typedef uint64_t VQ __attribute__((vector_size(kBytes)));

#define TEA_PRIMITIVE static inline __attribute__((always_inline))

// The vector of a type, the vector of integers as wide as it, and how many fit.
template <class Real>
struct Wide;
template <>
struct Wide<float> {
  using V = VF;
  using I = VI;
};
template <>
struct Wide<double> {
  using V = VD;
  using I = VL;
};
template <class Real>
using V = typename Wide<Real>::V;
template <class Real>
using I = typename Wide<Real>::I;
template <class Real>
inline constexpr int kLanes = kBytes / static_cast<int>(sizeof(Real));

template <class Real>
TEA_PRIMITIVE V<Real> load(const Real* p) {
  V<Real> v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class Real>
TEA_PRIMITIVE void store(Real* p, V<Real> v) {
  __builtin_memcpy(p, &v, sizeof v);
}
template <class Real>
TEA_PRIMITIVE V<Real> splat(Real x) {
  return x - V<Real>{};  // x - 0 keeps NaN and the sign of zero
}
template <class Vec>
TEA_PRIMITIVE Vec larger(Vec a, Vec b) {
  return a > b ? a : b;
}
// NaN if a is.
template <class Vec>
TEA_PRIMITIVE Vec at_least(Vec a, Vec low) {
  return a < low ? low : a;
}
template <class Vec>
TEA_PRIMITIVE Vec at_most(Vec a, Vec high) {
  return a > high ? high : a;
}

// exp with a relative error below 2 ulp of float: n = round(x / ln 2), a polynomial for the rest in
// [-ln2/2, ln2/2], and n added to the exponent. Below -87.3 the result is 0, above 88.37, where n
// would leave the exponent, it stays finite; NaN stays NaN.
TEA_PRIMITIVE VF exponential(VF x) {
#ifdef TEA_TIMES_POWER  // a set that rounds, and scales by powers of two whatever they are
  const VF clamped = at_most(x, splat(88.37f));
  const VF n = TEA_ROUND(clamped * 1.44269504f);
#else
  const VF clamped = at_most(at_least(x, splat(-87.4f)), splat(88.37f));
  const VF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VF shifted = clamped * 1.44269504f + magic;
  const VF n = shifted - magic;
#endif
  const VF r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  VF p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#ifdef TEA_TIMES_POWER
  const VF scaled = TEA_TIMES_POWER(p, n);
#else
  const VI exponent = ((VI)shifted - (VI)magic + 127) << 23;
  const VF scaled = p * (VF)exponent;
#endif
  return x < splat(-87.3f) ? VF{} : scaled;
}
TEA_PRIMITIVE VD exponential(VD x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_exp(x[i]);
  return x;
}

// tanh through exp; near zero by its series, where 1 - 2 / (...) would cancel.
TEA_PRIMITIVE VF hyperbolic_tangent(VF x) {
  const VF y = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f), s = x * x;
  const VF series =
      x + x * s * (-0.333333333f + s * (0.133333333f + s * (-0.0539682540f + s * 0.0218694885f)));
  return (s < splat(0.0324f)) ? series : y;
}
TEA_PRIMITIVE VD hyperbolic_tangent(VD x) {
  for (int i = 0; i < kLanes<double>; ++i) x[i] = __builtin_tanh(x[i]);
  return x;
}

// Products of the even 32-bit lanes as 64-bit lanes.
TEA_PRIMITIVE VQ multiply_even(VU a, uint32_t b) { return TEA_MULTIPLY_EVEN(a, VU{} + b); }

// The full products of 32-bit lanes with b.
TEA_PRIMITIVE void multiply_wide(VU a, uint32_t b, VU& low, VU& high) {
  const VQ even = multiply_even(a, b), odd = multiply_even((VU)((VQ)a >> 32), b);
  const VQ half = VQ{} + 0xFFFFFFFFu;
  low = (VU)((even & half) | (odd << 32));
  high = (VU)((even >> 32) | (odd & ~half));
}
