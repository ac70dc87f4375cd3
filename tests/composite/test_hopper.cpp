// The engines that run forward on Hopper kernels and backward on another engine.
#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "composite/either.h"
#include "composite/hopper.h"
#include "core/registry.h"
#include "kit/answer.h"
#include "portable/engine.h"

namespace tea::composite {
namespace {

constexpr const char* kSizes =
    "dtype=bf16 batch=1 seqlen_q=64 seqlen_kv=64 heads_q=2 heads_kv=2 dim_qk=64 ";

Attempt attempt(const Engine& engine, const std::string& more) {
  return engine.attempt(Problem::parse(kSizes + more).normalised(), kit::kH200);
}

TEST(CompositeHopper, TrainsOnEveryOptionOfThePortableEngine) {
  EXPECT_TRUE(std::holds_alternative<std::unique_ptr<Executable>>(
      attempt(kHopper, "training=1 dropout=0.1 alibi=standard window_left=9")));
}

TEST(CompositeHopper, NeedsTheWorkspaceOfTheEngineOfEachDirection) {
  const Problem p = Problem::parse(std::string(kSizes) + "causal=1 training=1");
  const Geometry size = default_geometry(p);
  EXPECT_EQ(hopper_workspace(p, size, Direction::kForward),
            hopper::workspace(p, size, Direction::kForward));
  EXPECT_EQ(hopper_workspace(p, size, Direction::kBackward),
            std::max(hopper::workspace(p, size, Direction::kBackward),
                     portable::workspace(p, size, Direction::kBackward)));
}

struct Counter final : Executable {
  int& runs;
  explicit Counter(int& count) : runs(count) {}
  void forward(const tea::Run&) const override { ++runs; }
  void backward(const tea::Run&) const override { ++runs; }
  bool accumulates(Direction d) const override { return d == Direction::kBackward; }
};

TEST(CompositeHopper, LeavesRunsThatAccumulateToTheFirstEngine) {
  int first = 0, second = 0;
  const Problem p = Problem::parse(kSizes);
  const Either both(p, std::make_unique<Counter>(first), std::make_unique<Counter>(second),
                    [](const Problem&, const tea::Run&, Direction) { return false; });
  EXPECT_FALSE(both.accumulates(Direction::kForward));
  EXPECT_TRUE(both.accumulates(Direction::kBackward));
  tea::Run run{};
  both.backward(run);
  EXPECT_EQ(second, 1);
  run.accumulate = TEA_ACCUMULATE_KEYS;
  both.backward(run);
  EXPECT_EQ(first, 1);
}

// The faster engine comes first, and each refusal has a reason.
TEST(CompositeHopper, WithCudnnComesBeforeThePortableBackward) {
  std::vector<std::string_view> names;
  for (const Engine& e : engines()) names.push_back(e.name);
  const auto with_cudnn = std::ranges::find(names, "hopper-cudnn");
  if (with_cudnn == names.end()) GTEST_SKIP() << "built without cuDNN's headers";
  EXPECT_LT(with_cudnn, std::ranges::find(names, "hopper"));
  const Attempt refused = attempt(engines()[static_cast<size_t>(with_cudnn - names.begin())],
                                  "training=1 window_left=9");
  const auto* refusal = std::get_if<Refusal>(&refused);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->why.find("backward is by cudnn, which refuses: it has options"), 0u);
}

}  // namespace
}  // namespace tea::composite
