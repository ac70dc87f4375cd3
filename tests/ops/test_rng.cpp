// The random state: plain, captured and advanced.
#include "buffer.h"
#include "ops/rng.h"

namespace tea {
namespace {

TEST(Rng, FillsSeedAndOffset) {
  int64_t state[3] = {-1, -1, -1};
  fill_rng(state, 0xFFFFFFFFFFFFFFFFu, 42, {});
  EXPECT_EQ(static_cast<uint64_t>(state[0]), 0xFFFFFFFFFFFFFFFFu);
  EXPECT_EQ(state[1], 42);
  EXPECT_EQ(state[2], -1);
}

TEST(Rng, CapturedReadsTheGeneratorWhenItRuns) {
  int64_t state[2];
  int64_t seed = 5, offset = 100;
  const CapturedRng source = {&seed, &offset, 7};
  fill_rng_captured(state, source, {});
  EXPECT_EQ(state[0], 5);
  EXPECT_EQ(state[1], 107);
  seed = 6, offset = int64_t{1} << 40;
  fill_rng_captured(state, source, {});
  EXPECT_EQ(state[0], 6);
  EXPECT_EQ(state[1], (int64_t{1} << 40) + 7);
}

TEST(Rng, CapturedSeedAloneCountsFromZero) {
  int64_t state[2];
  const int64_t seed = -5;
  fill_rng_captured(state, {&seed, nullptr, 48}, {});
  EXPECT_EQ(state[0], -5);
  EXPECT_EQ(state[1], 48);
}

TEST(Rng, AdvanceWrapsAround) {
  int64_t state[2] = {1, -1};
  advance_rng(state, 16, {});
  EXPECT_EQ(state[0], 1);
  EXPECT_EQ(state[1], 15);
}

TEST(Rng, NamesWhatIsWrong) {
  int64_t state[2];
  const int64_t value = 0;
  EXPECT_EQ(error_of([] { fill_rng(nullptr, 0, 0, {}); }), "rng_state is NULL; needs memory");
  EXPECT_EQ(error_of([] { advance_rng(nullptr, 0, {}); }), "rng_state is NULL; needs memory");
  EXPECT_EQ(error_of([&] {
              fill_rng_captured(state, {nullptr, &value, 0}, {});
            }),
            "seed is NULL; needs memory");
  EXPECT_EQ(error_of([&] {
              fill_rng_captured(nullptr, {&value, &value, 0}, {});
            }),
            "rng_state is NULL; needs memory");
}

}  // namespace
}  // namespace tea
