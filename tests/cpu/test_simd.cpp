// exponential, hyperbolic_tangent and multiply_wide of src/cpu/simd.h against libm in double and
// 64-bit integers, on the vectors of the generic set.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>

namespace tea::cpu {
namespace {
#define TEA_MULTIPLY_EVEN(a, b) (((VQ)(a)&0xFFFFFFFFu) * ((VQ)(b)&0xFFFFFFFFu))
constexpr int kBytes = 16;
#include "cpu/simd.h"

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// |got - exact| in units of the last place of the float nearest to `exact`.
double ulps(float got, double exact) {
  const float near = std::fabs(static_cast<float>(exact));
  const double ulp = std::fmax(static_cast<double>(std::nextafter(near, kInfinity) - near),
                               double{std::numeric_limits<float>::denorm_min()});
  return std::fabs(static_cast<double>(got) - exact) / ulp;
}

struct Worst {
  double ulps = 0;
  float at = 0;
};

// The largest error over every 61st float whose magnitude is in [low, high] and that has the
// given sign.
template <class Got, class Exact>
Worst worst(float low, float high, float sign, Got got, Exact exact) {
  Worst found;
  const uint32_t end = std::bit_cast<uint32_t>(high);
  for (uint32_t bits = std::bit_cast<uint32_t>(low); bits <= end; bits += 61) {
    const float x = std::copysign(std::bit_cast<float>(bits), sign);
    const double error = ulps(got(splat(x))[0], exact(static_cast<double>(x)));
    if (!(error <= found.ulps)) found = {error, x};
  }
  return found;
}

// Prints the error too: docs/kernels/cpu.md quotes it.
void expect_at_most(double bound, Worst found) {
  std::printf("largest error: %.3f ulp at %a\n", found.ulps, static_cast<double>(found.at));
  EXPECT_LE(found.ulps, bound) << "at " << found.at;
}

const auto kOurExp = [](VF x) { return exponential(x); };
const auto kOurTanh = [](VF x) { return hyperbolic_tangent(x); };
const auto kExp = [](double x) { return std::exp(x); };
const auto kTanh = [](double x) { return std::tanh(x); };

TEST(Simd, ExponentialIsWithinTwoUlp) {
  expect_at_most(2, worst(1e-10f, 87.3f, -1, kOurExp, kExp));
  expect_at_most(2, worst(1e-10f, 88.37f, 1, kOurExp, kExp));
}

TEST(Simd, ExponentialKeepsNanVanishesBelowTheNormalNumbersAndStaysFinite) {
  EXPECT_TRUE(std::isnan(exponential(splat(std::nanf("")))[0]));
  EXPECT_EQ(exponential(splat(-kInfinity))[0], 0.0f);
  EXPECT_EQ(exponential(splat(-87.4f))[0], 0.0f);
  EXPECT_EQ(exponential(splat(0.0f))[0], 1.0f);
  EXPECT_TRUE(std::isfinite(exponential(splat(kInfinity))[0]));
}

TEST(Simd, HyperbolicTangentIsWithinTenUlp) {
  for (const float sign : {-1.0f, 1.0f})
    expect_at_most(10, worst(1e-10f, 50.0f, sign, kOurTanh, kTanh));
  EXPECT_TRUE(std::isnan(hyperbolic_tangent(splat(std::nanf("")))[0]));
  EXPECT_EQ(hyperbolic_tangent(splat(kInfinity))[0], 1.0f);
  EXPECT_EQ(hyperbolic_tangent(splat(-kInfinity))[0], -1.0f);
}

TEST(Simd, MultiplyWideGivesAllSixtyFourBits) {
  constexpr uint32_t edges[] = {0, 1, 2, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFEu, 0xFFFFFFFFu};
  constexpr uint32_t factors[] = {0, 1, 0xD2511F53u, 0xCD9E8D57u, 0xFFFFFFFFu};
  uint32_t next = 1;
  for (int round = 0; round < 10000; ++round)
    for (const uint32_t b : factors) {
      VU a;
      for (int i = 0; i < kLanes<uint32_t>; ++i)
        a[i] = round < 7 ? edges[(round + i) % 7] : (next = next * 1664525u + 1013904223u);
      VU low, high;
      multiply_wide(a, b, low, high);
      for (int i = 0; i < kLanes<uint32_t>; ++i)
        ASSERT_EQ(uint64_t{high[i]} << 32 | low[i], uint64_t{a[i]} * b) << a[i] << " * " << b;
    }
}

}  // namespace
}  // namespace tea::cpu
