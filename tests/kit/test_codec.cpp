// The kit's encoders against the library's, over every code and every place between two codes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kit/codec.h"
#include "math/load_store.h"

namespace tea::kit {
namespace {

constexpr int32_t kSmall[] = {TEA_FP16, TEA_BF16, TEA_E4M3, TEA_E5M2};

uint64_t codes(int32_t dtype) { return uint64_t{1} << 8 * bytes_of(dtype); }

uint64_t library_encode(int32_t dtype, double x) {
  uint64_t bits = 0;
  store_real(&bits, dtype, 0, x);
  return bits;
}

TEST(Codec, DecodesEveryCodeAsTheLibraryDoes) {
  for (const int32_t dtype : kSmall)
    for (uint64_t code = 0; code < codes(dtype); ++code) {
      const double mine = decode(dtype, code), theirs = load_real(&code, dtype, 0);
      EXPECT_EQ(std::isnan(mine), std::isnan(theirs)) << dtype << " " << code;
      if (!std::isnan(mine)) {
        EXPECT_EQ(mine, theirs) << dtype << " " << code;
        EXPECT_EQ(std::signbit(mine), std::signbit(theirs)) << dtype << " " << code;
      }
    }
}

// Between two adjacent codes: the midpoint rounds to the even one, other values to the nearer one.
TEST(Codec, RoundsToNearestEvenBetweenAllAdjacentCodes) {
  for (const int32_t dtype : kSmall)
    for (uint64_t code = 0; code + 1 < codes(dtype) / 2; ++code) {
      const double low = decode(dtype, code), high = decode(dtype, code + 1);
      if (!std::isfinite(low) || !std::isfinite(high)) continue;
      const double middle = (low + high) / 2;
      EXPECT_EQ(encode(dtype, low), code);
      EXPECT_EQ(encode(dtype, middle), code + (code & 1)) << dtype << " " << code;
      for (const double x : {low, middle, std::nextafter(middle, 0), std::nextafter(middle, 1e300)})
        for (const double signed_x : {x, -x})
          EXPECT_EQ(encode(dtype, signed_x), library_encode(dtype, signed_x)) << dtype << " " << x;
    }
}

TEST(Codec, KeepsTheSpecialValues) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const int32_t dtype : kSmall) {
    EXPECT_TRUE(std::isnan(decode(dtype, encode(dtype, NAN))));
    EXPECT_TRUE(std::isnan(decode(dtype, 0xFFFF & (codes(dtype) - 1)))) << "the poison is a NaN";
    const bool fp8 = bytes_of(dtype) == 1;
    const double over = decode(dtype, encode(dtype, kInfinity));
    EXPECT_EQ(over, fp8 ? largest_of(dtype) : kInfinity);
    EXPECT_EQ(decode(dtype, encode(dtype, -1e300)), -over);
    EXPECT_EQ(encode(dtype, smallest_of(dtype) / 2), 0u) << "half the smallest is a tie with zero";
    EXPECT_EQ(encode(dtype, smallest_of(dtype) * 0.75), 1u);
  }
  EXPECT_EQ(largest_of(TEA_E4M3), 448);
  EXPECT_EQ(largest_of(TEA_E5M2), 57344);
  EXPECT_EQ(largest_of(TEA_FP16), 65504);
}

TEST(Codec, LoadsWhatItStores) {
  for (const int32_t dtype : {TEA_FP16, TEA_BF16, TEA_FP32, TEA_FP64, TEA_E4M3, TEA_E5M2}) {
    uint8_t memory[64] = {};
    store(memory, dtype, 3, -1.5);
    EXPECT_EQ(load(memory, dtype, 3), -1.5) << dtype;
    EXPECT_EQ(load(memory, dtype, 2), 0) << dtype;
    EXPECT_EQ(load(memory, dtype, 4), 0) << dtype;
  }
}

}  // namespace
}  // namespace tea::kit
