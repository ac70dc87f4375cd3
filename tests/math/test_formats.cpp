// formats.h: every code decodes and encodes to itself; encoding is nearest-even against a search
// over all codes.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "math/formats.h"

namespace tea {
namespace {

template <class Code>
struct Format {
  const char* name;
  float (*decode)(Code);
  Code (*encode)(float);
  bool saturates;
};
const Format<uint8_t> kSmall[] = {
    {"e4m3", [](uint8_t c) { return fp8_decode(c, kE4M3); },
     [](float x) { return fp8_encode(x, kE4M3); }, true},
    {"e5m2", [](uint8_t c) { return fp8_decode(c, kE5M2); },
     [](float x) { return fp8_encode(x, kE5M2); }, true},
};
const Format<uint16_t> kWide[] = {{"bf16", bf16_decode, bf16_encode, false},
                                  {"fp16", fp16_decode, fp16_encode, false}};

template <class Code>
void codes_round_trip(const Format<Code>& f) {
  for (uint32_t code = 0; code <= std::numeric_limits<Code>::max(); ++code) {
    const float x = f.decode(static_cast<Code>(code));
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(f.decode(f.encode(x)))) << f.name << " " << code;
    } else if (std::isinf(x) && f.saturates) {
      EXPECT_TRUE(std::isfinite(f.decode(f.encode(x)))) << f.name;
    } else {
      EXPECT_EQ(f.encode(x), code) << f.name;
    }
  }
}

TEST(Formats, EveryCodeRoundTrips) {
  for (const auto& f : kSmall) codes_round_trip(f);
  for (const auto& f : kWide) codes_round_trip(f);
}

// Between two adjacent codes: below the midpoint down, above it up, on it to the even code.
template <class Code>
void rounds_to_nearest_even(const Format<Code>& f, uint32_t last_finite) {
  for (uint32_t code = 0; code < last_finite; ++code) {
    const float low = f.decode(static_cast<Code>(code)),
                high = f.decode(static_cast<Code>(code + 1));
    const auto middle = static_cast<float>((double{low} + high) / 2);
    const uint32_t even = code & 1 ? code + 1 : code;
    ASSERT_EQ(f.encode(middle), even) << f.name << " " << code;
    ASSERT_EQ(f.encode(std::nextafter(middle, -1.0f)), code) << f.name << " " << code;
    ASSERT_EQ(f.encode(std::nextafter(middle, std::numeric_limits<float>::infinity())), code + 1)
        << f.name << " " << code;
    ASSERT_EQ(f.encode(-middle), even | Code(1) << (8 * sizeof(Code) - 1)) << f.name;
  }
}

TEST(Formats, EncodingRoundsToNearestEven) {
  rounds_to_nearest_even(kSmall[0], 0x7E);
  rounds_to_nearest_even(kSmall[1], 0x7B);
  rounds_to_nearest_even(kWide[0], 0x7F7F);
  rounds_to_nearest_even(kWide[1], 0x7BFF);
}

TEST(Formats, Fp8SaturatesAndWiderTypesOverflow) {
  for (const float x : {1e6f, 3e38f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(fp8_decode(fp8_encode(x, kE4M3), kE4M3), 448);
    EXPECT_EQ(fp8_decode(fp8_encode(-x, kE5M2), kE5M2), -57344);
    EXPECT_TRUE(std::isinf(fp16_decode(fp16_encode(x))));
  }
  EXPECT_EQ(fp16_decode(fp16_encode(65519.0f)), 65504);
  EXPECT_TRUE(std::isinf(fp16_decode(fp16_encode(65520.0f))));
  EXPECT_TRUE(std::isinf(bf16_decode(bf16_encode(std::numeric_limits<float>::max()))));
}

}  // namespace
}  // namespace tea
