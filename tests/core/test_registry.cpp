// engines: the table of this build.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "core/registry.h"

namespace tea {
namespace {

TEST(Registry, NamesAreUniqueAndTheReferenceComesLast) {
  std::set<std::string_view> names;
  for (const Engine& e : engines()) EXPECT_TRUE(names.insert(e.name).second) << e.name;
  EXPECT_EQ(engines().back().name, "reference");
}

// Where this build has it: the better choice first, and nothing without its reason.
TEST(Registry, HopperWithCudnnComesBeforeHopperAndSaysWhyNot) {
  std::vector<std::string_view> names;
  for (const Engine& e : engines()) names.push_back(e.name);
  const auto pair = std::ranges::find(names, "hopper-cudnn");
  if (pair == names.end()) GTEST_SKIP() << "built without cuDNN's headers";
  EXPECT_LT(pair, std::ranges::find(names, "hopper"));
  const Problem p = Problem::parse(
      "dtype=bf16 training=1 window_left=9 batch=1 seqlen_q=64 seqlen_kv=64 heads_q=2 heads_kv=2 "
      "dim_qk=64");
  const Engine& engine = engines()[static_cast<size_t>(pair - names.begin())];
  const Attempt attempt = engine.attempt(p.normalised(), Device{0, 90, 132, 227 << 10});
  const auto* refusal = std::get_if<Refusal>(&attempt);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->why.find("backward is by cudnn, which refuses: it has options"), 0u);
}

// The promise of the design: there is always an engine, and it never needs memory beyond linear.
TEST(Registry, TheReferenceAcceptsWhatNoOtherDoes) {
  const Problem p = Problem::parse(
      "dtype=fp64 batch=1 seqlen_q=3 seqlen_kv=5 heads_q=3 heads_kv=1 dim_qk=512 dim_v=8 "
      "training=1 "
      "bias=pre_scale alibi=slopes softmax=learnable softcap=3 dropout=0.5 window_left=2 "
      "window_right=3 bottom_right=1 lse_gradient=1 outputs=lse+max+sum_exp deterministic=1");
  p.check();
  EXPECT_TRUE(std::holds_alternative<std::unique_ptr<Executable>>(
      engines().back().attempt(p.normalised(), Device{})));
}

}  // namespace
}  // namespace tea
