// The words of src/cpu/amx.h and amx_vectors.h: how operands lie in tiles, their products, and what
// the vectors beside them compute, against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

#include "cpu/flash_common.h"
#if defined(__x86_64__)
// Only what is between this and pop_options may use the instructions; the tests run everywhere.
#include "cpu/amx_target.h"

namespace tea::cpu {
namespace {
constexpr int kBytes = 64, kTall = 6, kStrip = 4;
// Each of these needs the one before.
// clang-format off
#include "cpu/simd.h"
#include "cpu/tile.h"
#include "cpu/amx.h"
#include "cpu/amx_vectors.h"
// clang-format on

void powers_of_two(const float* x, float* y) { store(y, power_of_two(load(x))); }
void pairs(const float* low, const float* high, uint16_t* up, uint16_t* even, uint16_t* joint) {
  _mm512_storeu_si512(up, as_pairs_up(load(low), load(high)));
  _mm512_storeu_si512(even, as_pairs(load(low), load(high)));
  _mm512_storeu_si512(joint, joined(load(low), load(high)));
}
void product(const Product& all) {
  const Configured unit;
  all();
}
}  // namespace
}  // namespace tea::cpu
#pragma GCC pop_options

namespace tea::cpu {
namespace {

class Amx : public testing::Test {
 protected:
  void SetUp() override {
    if (!kAmx.available()) GTEST_SKIP() << "this processor lacks the instructions";
  }
};

TEST_F(Amx, PowerOfTwoIsAsExactAsSaid) {
  double worst = 0;
  const auto at = [](float x) {
    alignas(64) float from[16], to[16];
    std::fill_n(from, 16, x);
    powers_of_two(from, to);
    return to[5];
  };
  for (float x = -126; x <= 20; x += 0x1p-10f * 1.37f) {
    const double exact = std::exp2(static_cast<double>(x));
    worst = std::max(worst, std::fabs(static_cast<double>(at(x)) / exact - 1));
  }
  std::printf("largest relative error: %.3g\n", worst);
  EXPECT_LE(worst, 2e-7);
  EXPECT_NEAR(at(0), 1, 2e-7);
  EXPECT_EQ(at(-INFINITY), 0);
  EXPECT_EQ(at(-1000), 0);
  EXPECT_TRUE(std::isnan(at(NAN)));
}

TEST_F(Amx, RoundsPairsToBf16) {
  for (const uint32_t part : {0u, 1u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu})
    for (const uint32_t odd : {0u, 1u}) {
      alignas(64) float low[16], high[16];
      for (uint32_t i = 0; i < 16; ++i) {
        low[i] = bits_float((0x3F00u + 2 * i + odd) << 16 | part);
        high[i] = bits_float((0x3E00u + 2 * i + odd) << 16 | part);
      }
      uint16_t up[32], even[32], joint[32];
      pairs(low, high, up, even, joint);
      for (int i = 0; i < 16; ++i) {
        EXPECT_EQ(even[2 * i], bf16_encode(low[i]));
        EXPECT_EQ(even[2 * i + 1], bf16_encode(high[i]));
        EXPECT_EQ(joint[i], bf16_encode(low[i]));
        EXPECT_EQ(joint[16 + i], bf16_encode(high[i]));
        EXPECT_EQ(up[2 * i], (float_bits(low[i]) + 0x8000u) >> 16);
        EXPECT_EQ(up[2 * i + 1], (float_bits(high[i]) + 0x8000u) >> 16);
      }
    }
}

// 32 rows of 40 elements, each another number; one row is missing.
struct Rows {
  static constexpr int kDim = 40, kMissing = 5;
  Rows() {
    std::iota(data.begin(), data.end(), uint16_t{1});
    for (int i = 0; i < kDepth; ++i) row[i] = i == kMissing ? nullptr : &data[i * kDim];
  }
  uint16_t at(int i, int element) const {
    return i == kMissing || element >= kDim ? 0 : data[static_cast<size_t>(i * kDim + element)];
  }
  std::vector<uint16_t> data = std::vector<uint16_t>(kDepth * kDim);
  const uint16_t* row[kDepth];
};
struct alignas(64) Packed {
  uint16_t tile[4][512];  // each has 16 rows of 32
  Packed() { std::fill_n(&tile[0][0], 4 * 512, uint16_t{0xFFFF}); }
  std::byte* bytes() { return reinterpret_cast<std::byte*>(tile); }
};

TEST_F(Amx, PacksRows) {
  const Rows rows;
  Packed to;
  pack_rows(rows.row, Rows::kDim, to.bytes());
  for (int t = 0; t < 2; ++t)
    for (int i = 0; i < 16; ++i)
      for (int d = 0; d < 32; ++d) ASSERT_EQ(to.tile[t][i * 32 + d], rows.at(i, t * 32 + d));
  EXPECT_EQ(to.tile[2][0], 0xFFFF);
}

TEST_F(Amx, PacksColumns) {
  const Rows rows;
  Packed to;
  pack_columns(rows.row, Rows::kDim, to.bytes(), 2 * kTileBytes);
  for (int t = 0; t < 2; ++t)
    for (int i = 0; i < 16; ++i)
      for (int d = 0; d < 32; ++d)
        ASSERT_EQ(to.tile[2 * t][(d / 2 * 16 + i) * 2 + d % 2], rows.at(i, t * 32 + d));
  EXPECT_EQ(to.tile[1][0], 0xFFFF);
}

TEST_F(Amx, PacksPairsOfRows) {
  const Rows rows;
  Packed as_b, as_a;
  pack_pairs(rows.row, Rows::kDim, as_b.bytes());
  pack_transposed(rows.row, Rows::kDim, as_a.bytes());
  for (int t = 0; t < 3; ++t)
    for (int i = 0; i < 32; ++i)
      for (int d = 0; d < 16; ++d) {
        ASSERT_EQ(as_b.tile[t][(i / 2 * 16 + d) * 2 + i % 2], rows.at(i, t * 16 + d));
        ASSERT_EQ(as_a.tile[t][d * 32 + i], rows.at(i, t * 16 + d));
      }
  EXPECT_EQ(as_b.tile[3][0], 0xFFFF);
  EXPECT_EQ(as_a.tile[3][0], 0xFFFF);
}

// C of 1 to 3 by 1 to 3 tiles, over three tiles of k.
TEST_F(Amx, Multiplies) {
  constexpr int kSteps = 3, kLd = 50;
  struct alignas(64) {
    uint16_t a[3][kSteps][16][32], b[3][kSteps][16][16][2];
  } from;
  const auto code = [](int64_t n) { return bf16_encode(static_cast<float>(n * 37 % 19 - 9)); };
  uint16_t* all = &from.a[0][0][0][0];
  for (int64_t i = 0; i < int64_t{sizeof from} / 2; ++i) all[i] = code(i);
  const auto exact = [&](int row, int column) {
    double sum = 0;
    for (int k = 0; k < 32 * kSteps; ++k)
      sum += double{bf16_decode(from.a[row / 16][k / 32][row % 16][k % 32])} *
             double{bf16_decode(from.b[column / 16][k / 32][k % 32 / 2][column % 16][k % 2])};
    return sum;
  };
  for (int rows = 1; rows <= 3; ++rows)
    for (int columns = 1; columns <= 3; ++columns)
      for (const bool add : {false, true}) {
        std::vector<float> c(48 * kLd, 5);
        product({rows, columns, kSteps, Tiles{from.a, kSteps * kTileBytes, kTileBytes, 64},
                 Tiles{from.b, kSteps * kTileBytes, kTileBytes, 64}, c.data(), kLd, add});
        for (int i = 0; i < 48; ++i)
          for (int j = 0; j < kLd; ++j) {
            const bool inside = i < 16 * rows && j < 16 * columns;
            const double want = inside ? exact(i, j) + (add ? 5 : 0) : 5;
            ASSERT_EQ(static_cast<double>(c[static_cast<size_t>(i * kLd + j)]), want)
                << i << " " << j;
          }
      }
}

}  // namespace
}  // namespace tea::cpu
#endif
