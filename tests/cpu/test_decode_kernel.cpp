// The words of src/cpu/decode_kernel.h on the vectors of the generic set: elements of every type
// against the formats of src/math, sums of lanes, and the cast to fp8.
#include <gtest/gtest.h>

#include <bit>

#include "cpu/flash_common.h"

namespace tea::cpu {
namespace {
#define TEA_MULTIPLY_EVEN(a, b) (((VQ)(a)&0xFFFFFFFFu) * ((VQ)(b)&0xFFFFFFFFu))
#define TEA_WIDEN_FP16(from, to) \
  for (int lane = 0; lane < 8; ++lane) (to)[lane] = fp16_decode((from)[lane])
constexpr int kBytes = 16, kTall = 4, kStrip = 2;
// Each of these needs the one before.
// clang-format off
#include "cpu/simd.h"
#include "cpu/tile.h"
#include "cpu/row_sums.h"
#include "cpu/flash_tile.h"
#include "cpu/flash_kernel.h"
#include "cpu/flash_kernel_backward.h"
#include "cpu/decode_elements.h"
#include "cpu/decode_rows.h"
#include "cpu/decode_kernel.h"
// clang-format on

template <int32_t T, class Code>
void expect_every_code() {
  for (uint32_t code = 0; code < 1u << 8 * sizeof(Code); ++code) {
    Code codes[kVector] = {};
    codes[1] = static_cast<Code>(code);
    const float got = widen<T>(reinterpret_cast<const char*>(codes))[1] * unit_of(T);
    const auto want = static_cast<float>(load_real(codes, T, 1));
    if (std::isnan(want))
      EXPECT_TRUE(std::isnan(got)) << T << " " << code;
    else
      EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << T << " " << code;
  }
}

TEST(DecodeKernel, ReadsEveryCode) {
  expect_every_code<TEA_E4M3, uint8_t>();
  expect_every_code<TEA_E5M2, uint8_t>();
  expect_every_code<TEA_FP16, uint16_t>();
  expect_every_code<TEA_BF16, uint16_t>();
}

TEST(DecodeKernel, ZeroesWhatLiesBeyondARow) {
  const float row[2 * kVector] = {1, 2, 3, 4, 5, 6, 7, 8};
  const VF last = last_elements<TEA_FP32>(reinterpret_cast<const char*>(row), 4, 6);
  EXPECT_EQ(last[0], 5);
  EXPECT_EQ(last[1], 6);
  EXPECT_EQ(last[2], 0);
  EXPECT_EQ(last[3], 0);
}

TEST(DecodeKernel, SumsLanes) {
  VF v[kVector];
  for (int i = 0; i < kVector; ++i)
    for (int lane = 0; lane < kVector; ++lane)
      v[i][lane] = static_cast<float>(1 << (3 * i + lane % 3)) + static_cast<float>(lane);
  float want[kVector] = {};
  for (int i = 0; i < kVector; ++i)
    for (int lane = 0; lane < kVector; ++lane) want[i] += v[i][lane];
  const VF got = sums_of_lanes(v);
  for (int i = 0; i < kVector; ++i) EXPECT_EQ(got[i], want[i]) << i;
}

TEST(DecodeKernel, CastsToFp8LikeTheFormats) {
  for (const int32_t type : {TEA_E4M3, TEA_E5M2})
    for (uint32_t bits = 0; bits <= 0x7F800000u; bits += 997) {
      const auto x = std::bit_cast<float>(bits);
      ASSERT_EQ(double{rounded_to_fp8(splat(x), type)[0]},
                cast_to_fp8(static_cast<double>(x), type))
          << x;
    }
  for (const int32_t type : {TEA_E4M3, TEA_E5M2})
    EXPECT_TRUE(std::isnan(rounded_to_fp8(splat(NAN), type)[0]));
}

}  // namespace
}  // namespace tea::cpu
