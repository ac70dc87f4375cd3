// The dropout of cuDNN, which is not ours: how often it keeps, and what it depends on. That O and
// the gradients are those of one mask is tested with the other lines of tests/problems.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kit/check.h"

namespace tea::kit {
namespace {

constexpr int kGpu = 0;

std::string line(const std::string& more, int rows = 500, int keys = 128) {
  return "dtype=bf16 training=1 heads_q=4 heads_kv=4 dim_qk=128 batch=2 seqlen_q=" +
         std::to_string(rows) + " seqlen_kv=" + std::to_string(keys) + " " + more;
}

std::vector<char> kept(const std::string& more) {
  return kept_by(Case::parse(line(more)), "cudnn", kGpu);
}

bool runs_here() {
  const std::vector<std::string> engines = engines_of(kGpu);
  return std::ranges::count(engines, "cudnn");
}

TEST(CudnnDropout, KeepsAsOftenAsItIsAskedTo) {
  if (!runs_here()) GTEST_SKIP() << "cuDNN was not found";
  for (const double p : {0.1, 0.5, 0.9}) {
    const std::vector<char> mask = kept("dropout=" + std::to_string(p) + " | seed=1");
    const auto n = static_cast<double>(mask.size());
    const auto count = static_cast<double>(std::ranges::count(mask, 1));
    EXPECT_NEAR(count / n, 1 - p, 5 * std::sqrt(p * (1 - p) / n));
  }
}

// The mask where a word of rng_state is another one: 0 is the seed, 1 the offset.
std::vector<char> kept_with(size_t word, int64_t more) {
  return kept_by(Case::parse(line("dropout=0.5 | seed=1")), "cudnn", kGpu, [=](Inputs& inputs) {
    int64_t words[2];
    uint8_t* const state = inputs.memory(TEA_RNG_STATE);
    std::memcpy(words, state, sizeof words);
    words[word] += more;
    std::memcpy(state, words, sizeof words);
  });
}

TEST(CudnnDropout, IsAFunctionOfSeedAndOffset) {
  if (!runs_here()) GTEST_SKIP() << "cuDNN was not found";
  const std::vector<char> first = kept("dropout=0.5 | seed=1");
  EXPECT_EQ(kept("dropout=0.5 | seed=1"), first);
  const std::vector<char> seed = kept_with(0, 1), offset = kept_with(1, 4);
  EXPECT_NE(seed, first);
  EXPECT_NE(offset, first);
  EXPECT_NE(offset, seed);
  EXPECT_EQ(kept_with(1, 4), offset);
  EXPECT_EQ(kept_with(1, 0), first);
  // heads and rows differ among themselves
  const auto head = [&first](int64_t h) {
    return std::vector<char>(first.begin() + h * 500 * 128, first.begin() + (h + 1) * 500 * 128);
  };
  EXPECT_NE(head(0), head(1));
  EXPECT_NE(head(0), head(4));
}

TEST(CudnnDropout, IsOneMaskForBothDirections) {
  if (!runs_here()) GTEST_SKIP() << "cuDNN was not found";
  for (const char* more : {"dropout=0.1 | seed=3", "dropout=0.5 causal=1 | seed=4",
                           "dropout=0.9 q_form=padded kv_form=padded | seed=5"}) {
    for (const int keys : {128, 1000}) {
      const Report report = check(Case::parse(line(more, 130, keys)), "cudnn", {.device = kGpu});
      EXPECT_TRUE(report.ok()) << report.text();
    }
  }
}

}  // namespace
}  // namespace tea::kit
