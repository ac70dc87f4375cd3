// The primitives of src/cpu/amx.h and amx_vectors.h, compared with plain loops: the layout of
// operands in tiles, their products, and the vector code.
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
#include "cpu/amx_vectors.h"
#include "cpu/packed_tiles.h"
#include "cpu/amx.h"
// clang-format on

void powers_of_two(const float* x, float* y) { store(y, power_of_two(load(x))); }
void pairs(const float* low, const float* high, uint16_t* up, uint16_t* even, uint16_t* joint) {
  _mm512_storeu_si512(up, as_pairs_up(load(low), load(high)));
  _mm512_storeu_si512(even, as_pairs(load(low), load(high)));
  _mm512_storeu_si512(joint, joined(load(low), load(high)));
}
template <int T>
void product(const Product<T>& all) {
  const Configured unit;
  all();
}
void terms(const float* x, float (*to)[16]) {
  const Terms<3> all(load(x));
  for (int t = 0; t < 3; ++t) store(to[t], all.term[t]);
}
}  // namespace
}  // namespace tea::cpu
#pragma GCC pop_options

namespace tea::cpu {
namespace {
#include "cpu/tile_products.h"

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
  pack_rows(Bf16Rows{}, rows.row, Rows::kDim, to.bytes());
  for (int t = 0; t < 2; ++t)
    for (int i = 0; i < 16; ++i)
      for (int d = 0; d < 32; ++d) ASSERT_EQ(to.tile[t][i * 32 + d], rows.at(i, t * 32 + d));
  EXPECT_EQ(to.tile[2][0], 0xFFFF);
}

TEST_F(Amx, PacksColumns) {
  const Rows rows;
  Packed to;
  pack_columns(Bf16Rows{}, rows.row, Rows::kDim, to.bytes(), 2 * kTileBytes);
  for (int t = 0; t < 2; ++t)
    for (int i = 0; i < 16; ++i)
      for (int d = 0; d < 32; ++d)
        ASSERT_EQ(to.tile[2 * t][(d / 2 * 16 + i) * 2 + d % 2], rows.at(i, t * 32 + d));
  EXPECT_EQ(to.tile[1][0], 0xFFFF);
}

TEST_F(Amx, PacksPairsOfRows) {
  const Rows rows;
  Packed as_b, as_a;
  pack_pairs(Bf16Rows{}, rows.row, Rows::kDim, as_b.bytes());
  pack_transposed(Bf16Rows{}, rows.row, Rows::kDim, as_a.bytes());
  for (int t = 0; t < 3; ++t)
    for (int i = 0; i < 32; ++i)
      for (int d = 0; d < 16; ++d) {
        ASSERT_EQ(as_b.tile[t][(i / 2 * 16 + d) * 2 + i % 2], rows.at(i, t * 16 + d));
        ASSERT_EQ(as_a.tile[t][d * 32 + i], rows.at(i, t * 16 + d));
      }
  EXPECT_EQ(as_b.tile[3][0], 0xFFFF);
  EXPECT_EQ(as_a.tile[3][0], 0xFFFF);
}

TEST_F(Amx, Multiplies) { expect_products<3>(product<1>); }

// Numbers of both signs whose 24 bits are all in use, and a few whose terms are special.
std::vector<float> full_numbers(size_t count) {
  std::vector<float> out = {0.0f, 1.0f, -1.0f, 0x1.FFFFFEp0f, 0x1.010101p-60f, -0x1.FEFEFEp20f};
  uint32_t state = 7;
  while (out.size() < count) {
    state = state * 1664525u + 1013904223u;
    out.push_back(bits_float((state & 0x80FFFFFFu) | 0x3F000000u));
  }
  return out;
}

TEST_F(Amx, ThreeTermsAreTheNumber) {
  const std::vector<float> x = full_numbers(1600);
  for (size_t i = 0; i < x.size(); i += 16) {
    float to[3][16];
    terms(&x[i], to);
    for (size_t j = 0; j < 16; ++j) {
      EXPECT_EQ(double{to[0][j]} + double{to[1][j]} + double{to[2][j]}, double{x[i + j]});
      for (const auto& term : to) EXPECT_EQ(float_bits(term[j]) & 0xFFFFu, 0u) << x[i + j];
      EXPECT_LE(std::fabs(to[1][j]), std::fabs(x[i + j]) * 0x1p-8f);
      EXPECT_LE(std::fabs(to[2][j]), std::fabs(x[i + j]) * 0x1p-16f);
    }
  }
}

// C of one and of two by two tiles from three terms, as exact as sums in fp32: packed as the
// kernels pack them, with rows of 40 elements and a row that is missing.
TEST_F(Amx, MultipliesFp32) {
  constexpr int kDim = 40, kSteps = 2, kMissing = 5, kTiles = 2 * kSteps;
  const std::vector<float> numbers = full_numbers(2 * kDepth * kDim);
  const float *a[kDepth], *b[kDepth];
  for (int i = 0; i < kDepth; ++i)
    a[i] = &numbers[static_cast<size_t>(i * kDim)],
    b[i] = i == kMissing ? nullptr : &numbers[static_cast<size_t>((kDepth + i) * kDim)];
  struct alignas(64) {
    std::byte a[3][kTiles][kTileBytes], b[3][kTiles][kTileBytes];
  } to;
  const auto pack = [&]<int t>(Fp32Rows<t> rows) {
    for (int half = 0; half < 2; ++half) {
      pack_rows(rows, a + 16 * half, kDim, to.a[t][half * kSteps]);
      pack_columns(rows, b + 16 * half, kDim, to.b[t][half * kSteps], kTileBytes);
    }
  };
  pack(Fp32Rows<0>{}), pack(Fp32Rows<1>{}), pack(Fp32Rows<2>{});
  for (const int tiles : {1, 2}) {
    std::vector<float> c(32 * 32);
    const auto all = [](const void* from) {
      return Tiles{from, kSteps * kTileBytes, kTileBytes, 64, kTiles * kTileBytes};
    };
    product(Product<3>{tiles, tiles, kSteps, all(to.a), all(to.b), c.data(), 32, false});
    for (int i = 0; i < 16 * tiles; ++i)
      for (int j = 0; j < 16 * tiles; ++j) {
        double sum = 0, size = 0;
        for (int d = 0; b[j] && d < kDim; ++d) {
          sum += double{a[i][d]} * double{b[j][d]};
          size += std::fabs(double{a[i][d]} * double{b[j][d]});
        }
        const double off = double{c[static_cast<size_t>(i * 32 + j)]} - sum;
        EXPECT_LE(std::fabs(off), size * 0x1p-24 * 8) << i << " " << j;
      }
  }
}

// Rows times a factor, in pairs of adjacent rows.
TEST_F(Amx, PacksPairsOfFp32) {
  constexpr int kDim = 24;
  const std::vector<float> numbers = full_numbers(kDepth * kDim);
  const float* row[kDepth];
  for (int i = 0; i < kDepth; ++i) row[i] = &numbers[static_cast<size_t>(i * kDim)];
  Packed as_b[3], as_a[3];
  const auto pack = [&]<int t>(Fp32Rows<t> rows) {
    pack_pairs(rows, row, kDim, as_b[t].bytes());
    pack_transposed(rows, row, kDim, as_a[t].bytes());
  };
  pack(Fp32Rows<0>{0.5f}), pack(Fp32Rows<1>{0.5f}), pack(Fp32Rows<2>{0.5f});
  for (int i = 0; i < kDepth; ++i)
    for (int d = 0; d < 32; ++d) {
      double b = 0, a = 0;
      for (int t = 0; t < 3; ++t) {
        b += double{bf16_decode(as_b[t].tile[d / 16][(i / 2 * 16 + d % 16) * 2 + i % 2])};
        a += double{bf16_decode(as_a[t].tile[d / 16][d % 16 * 32 + i])};
      }
      const double want = d < kDim ? double{row[i][d]} / 2 : 0;
      ASSERT_EQ(b, want) << i << " " << d;
      ASSERT_EQ(a, want) << i << " " << d;
    }
}

}  // namespace
}  // namespace tea::cpu
#endif
