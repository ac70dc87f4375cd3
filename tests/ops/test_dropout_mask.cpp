// The keep mask, against Philox written a second time and the cell rule of the interface.
#include <array>
#include <cmath>

#include "buffer.h"
#include "ops/dropout_mask.h"

namespace tea {
namespace {

// Philox4x32-10 with products in 128 bits, checked below against published answers.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const unsigned __int128 a = static_cast<unsigned __int128>(0xD2511F53u) * c[0];
    const unsigned __int128 b = static_cast<unsigned __int128>(0xCD9E8D57u) * c[2];
    c = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
         static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
    k = {k[0] + 0x9E3779B9u, k[1] + 0xBB67AE85u};
  }
  return c;
}

TEST(DropoutMask, PhiloxGivesThePublishedAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xFFFFFFFF;
  EXPECT_EQ(philox({ones, ones, ones, ones}, {ones, ones}),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

// A cell is rows {i, i + 8} x columns {j, j + 1, j + 8, j + 9}, with i % 16 < 8, j % 16 < 8, j
// even.
bool keeps(uint64_t seed, uint64_t offset, uint32_t stream, int64_t row, int64_t col, float p) {
  const int64_t i = row / 16 * 8 + row % 8, j = col / 16 * 4 + col % 8 / 2;
  const uint64_t key = seed ^ ((offset >> 32) << 32);
  const auto words = philox(
      {static_cast<uint32_t>(i), static_cast<uint32_t>(j), stream, static_cast<uint32_t>(offset)},
      {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)});
  uint16_t halves[8];
  for (int n = 0; n < 8; ++n) halves[n] = static_cast<uint16_t>(words[n / 2] >> (n % 2 ? 16 : 0));
  const int64_t n = row % 16 / 8 * 4 + col % 16 / 8 * 2 + col % 2;
  return halves[n] >= std::lround(p * 65536);
}

struct Setting {
  int64_t state[2] = {static_cast<int64_t>(0xFEDCBA9876543210u), (int64_t{5} << 32) + 77};
  int64_t batch = 2, heads = 3, rows = 21, cols = 37;
};

tea_dropout_mask arguments(const Setting& s, Buffer& keep, float p) {
  tea_dropout_mask a{};
  a.struct_size = sizeof a;
  a.dropout = p;
  a.keep = static_cast<uint8_t*>(keep.data());
  a.rng_state = s.state;
  a.batch = s.batch, a.heads = s.heads, a.rows = s.rows, a.cols = s.cols;
  return a;
}

TEST(DropoutMask, EveryDecision) {
  const Setting s;
  const int64_t origin[4] = {3, 5, 17, 1000001};
  for (bool in_memory : {false, true}) {
    Buffer keep(TEA_E4M3, s.batch * s.heads * s.rows * s.cols);
    tea_dropout_mask a = arguments(s, keep, 0.3f);
    if (in_memory)
      a.origin_device = origin;
    else
      std::memcpy(a.origin, origin, sizeof origin);
    dropout_keep(a, {});
    const auto* byte = static_cast<const uint8_t*>(keep.data());
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t r = 0; r < s.rows; ++r)
          for (int64_t c = 0; c < s.cols; ++c) {
            const auto stream = static_cast<uint32_t>((b + 3) * 4096 + h + 5);
            ASSERT_EQ(*byte++,
                      keeps(static_cast<uint64_t>(s.state[0]), static_cast<uint64_t>(s.state[1]),
                            stream, r + 17, c + 1000001, 0.3f))
                << b << " " << h << " " << r << " " << c;
          }
  }
}

TEST(DropoutMask, AnOriginInMemoryIsClamped) {
  const Setting s;
  const auto bytes_at = [&](int64_t row) {
    const int64_t origin[4] = {0, 0, row, 0};
    Buffer keep(TEA_E4M3, s.batch * s.heads * s.rows * s.cols);
    tea_dropout_mask a = arguments(s, keep, 0.5f);
    a.origin_device = origin;
    dropout_keep(a, {});
    return std::string(static_cast<const char*>(keep.data()), keep.bytes());
  };
  EXPECT_EQ(bytes_at(kMaxOrigin + 1), bytes_at(kMaxOrigin));
  EXPECT_EQ(bytes_at(INT64_MAX), bytes_at(kMaxOrigin));
  EXPECT_EQ(bytes_at(-1), bytes_at(0));
  EXPECT_NE(bytes_at(kMaxOrigin - 1), bytes_at(kMaxOrigin));
}

TEST(DropoutMask, KeepsTheFractionItShould) {
  Setting s;
  s.rows = 512, s.cols = 512;
  const double count = static_cast<double>(s.batch * s.heads * s.rows * s.cols);
  for (float p : {0.0f, 0.1f, 0.5f, 0.9f}) {
    Buffer keep(TEA_E4M3, static_cast<int64_t>(count));
    dropout_keep(arguments(s, keep, p), {});
    double kept = 0;
    for (size_t i = 0; i < keep.bytes(); ++i) kept += static_cast<uint8_t*>(keep.data())[i];
    // Six standard deviations of the binomial, and the 16 bits of the threshold.
    const double q = 1 - static_cast<double>(p);
    EXPECT_NEAR(kept / count, q, 6 * std::sqrt(q * (1 - q) / count) + 1.0 / 131072) << p;
  }
}

TEST(DropoutMask, NamesWhatIsWrong) {
  const Setting s;
  Buffer keep(TEA_E4M3, s.batch * s.heads * s.rows * s.cols);
  const auto error = [&](auto change) {
    tea_dropout_mask a = arguments(s, keep, 0.5f);
    change(a);
    return error_of([&] { dropout_keep(a, {}); });
  };
  const int64_t origin[4] = {};
  EXPECT_EQ(error([](auto& a) { a.dropout = 1; }), "dropout is 1; needs at least 0 and below 1");
  EXPECT_NE(error([](auto& a) { a.dropout = NAN; }), "");
  EXPECT_EQ(error([](auto& a) { a.origin[2] = -1; }),
            "origin[2] is -1; needs 0 or more, at most 2^40");
  EXPECT_EQ(error([](auto& a) { a.origin[1] = kMaxOrigin + 1; }),
            "origin[1] is 1099511627777; needs 0 or more, at most 2^40");
  EXPECT_EQ(error([&](auto& a) { a.origin[3] = 4, a.origin_device = origin; }),
            "origin[3] is 4; needs 0 with origin_device");
  EXPECT_EQ(error([](auto& a) { a.cols = -1; }), "cols is -1; needs 0 or more");
  EXPECT_EQ(error([](auto& a) { a.rng_state = nullptr; }), "rng_state is NULL; needs memory");
  EXPECT_EQ(error([](auto& a) { a.keep = nullptr; }), "keep is NULL; needs memory");
}

}  // namespace
}  // namespace tea
