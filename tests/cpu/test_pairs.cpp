// The words of src/cpu/dots.h and decode_pairs.h: products of tiles by pairs, and how codes become
// pairs of bf16 numbers, against plain loops.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu/flash_common.h"
#if defined(__x86_64__)
// Only what is between this and pop_options may use the instructions; the tests run everywhere.
#include "cpu/avx512_bf16_target.h"

namespace tea::cpu {
namespace {
constexpr int kBytes = 64, kTall = 6, kStrip = 4;
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
#include "cpu/tile_products.h"

class Pairs : public testing::Test {
 protected:
  void SetUp() override {
    if (!kAvx512Bf16.available()) GTEST_SKIP() << "this processor lacks the instructions";
  }
};

TEST_F(Pairs, Multiply) { expect_products<9>(product); }

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
