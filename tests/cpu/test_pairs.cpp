// The words of src/cpu/dots.h and decode_pairs.h: products of tiles by pairs, and how codes become
// pairs of bf16 numbers, against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/flash_common.h"
#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>

// Only what is between this and pop_options may use the instructions; the tests run everywhere.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx2,fma,f16c")
#pragma GCC target("prefer-vector-width=512")
#include "cpu/avx512_words.h"

namespace tea::cpu {
namespace {
constexpr int kBytes = 64, kTall = 6, kStrip = 4;
// Each of these needs the one before.
// clang-format off
#include "cpu/simd.h"
#include "cpu/tile.h"
#include "cpu/flash_kernel.h"
#include "cpu/decode_kernel.h"
#include "cpu/amx_vectors.h"
#include "cpu/packed_tiles.h"
#include "cpu/dots.h"
#include "cpu/decode_pairs.h"
// clang-format on

void product(const Product<1>& all) { all(); }
template <int32_t T>
void row_of(const char* from, uint64_t kept, uint16_t* to) {
  __m512i out[2];
  Reader<T>().row(from, kept, out);
  for (int i = 0; i < 2; ++i) _mm512_storeu_si512(to + 32 * i, out[i]);
}
template <int32_t T>
void pairs_of_rows(const char* a, uint64_t kept_a, const char* b, uint64_t kept_b, uint16_t* to) {
  __m512i out[4];
  Reader<T>().pairs(a, kept_a, b, kept_b, out);
  for (int i = 0; i < 4; ++i) _mm512_storeu_si512(to + 32 * i, out[i]);
}
}  // namespace
}  // namespace tea::cpu
#pragma GCC pop_options

namespace tea::cpu {
namespace {

class Pairs : public testing::Test {
 protected:
  void SetUp() override {
    if (!kAvx512Bf16.available()) GTEST_SKIP() << "this processor lacks the instructions";
  }
};

// C of 1 to 3 by 1 to 9 tiles, over three tiles of k.
TEST_F(Pairs, Multiply) {
  constexpr int kSteps = 3, kWide = 9, kLd = 16 * kWide + 2;
  struct alignas(64) {
    uint16_t a[3][kSteps][16][32], b[kWide][kSteps][16][16][2];
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
    for (int columns = 1; columns <= kWide; ++columns)
      for (const bool add : {false, true}) {
        std::vector<float> c(48 * kLd, 5);
        product(Product<1>{rows, columns, kSteps,
                           Tiles{from.a, kSteps * kTileBytes, kTileBytes, 64},
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

// Element d of 64 codes as bf16, if it is among the first `kept`.
template <int32_t T>
uint16_t element(const char* from, int d, int kept) {
  return d < kept ? bf16_encode(static_cast<float>(load_real(from, T, d))) : uint16_t{0};
}

// All codes of a type, 64 at a time from `first` on.
template <int32_t T>
void expect_codes(uint32_t first) {
  char a[128], b[128];
  for (uint32_t i = 0; i < 64; ++i) {
    const auto code = static_cast<uint16_t>(first + i), other = static_cast<uint16_t>(~code);
    std::memcpy(a + i * kElementBytes<T>, &code, kElementBytes<T>);
    std::memcpy(b + i * kElementBytes<T>, &other, kElementBytes<T>);
  }
  for (const int kept : {64, 40, 24, 8}) {
    const uint64_t mask = kept == 64 ? ~uint64_t{0} : (uint64_t{1} << kept) - 1;
    uint16_t row[64], pairs[128], single[128];
    row_of<T>(a, mask, row);
    pairs_of_rows<T>(a, mask, b, mask, pairs);
    pairs_of_rows<T>(a, mask, b, 0, single);
    for (int d = 0; d < 64; ++d) {
      const uint16_t want = element<T>(a, d, kept);
      EXPECT_EQ(row[place_in_row<T>(d)], want) << first + d;
      EXPECT_EQ(pairs[2 * place_in_pairs<T>(d)], want) << first + d;
      EXPECT_EQ(pairs[2 * place_in_pairs<T>(d) + 1], element<T>(b, d, kept)) << first + d;
      EXPECT_EQ(single[2 * place_in_pairs<T>(d)], want) << first + d;
      EXPECT_EQ(single[2 * place_in_pairs<T>(d) + 1], 0) << first + d;
    }
  }
}

TEST_F(Pairs, ReadEveryCode) {
  for (uint32_t first = 0; first < 256; first += 64)
    expect_codes<TEA_E4M3>(first), expect_codes<TEA_E5M2>(first);
  for (uint32_t first = 0x3F80; first < 0x4F80; first += 64) expect_codes<TEA_BF16>(first);
}

}  // namespace
}  // namespace tea::cpu
#endif
