// Graphs need a GPU, where tests/gpu runs them; here: a refusal instead of a crash without one.
#include <gtest/gtest.h>

#include "cudnn/graph.h"

namespace tea::cudnn {
namespace {

TEST(CudnnGraph, IsRefusedWhereThereIsNoLibraryOrNoSuchDevice) {
  const Problem p =
      Problem::parse("dtype=bf16 heads_q=2 heads_kv=2 dim_qk=64 batch=1 seqlen_q=64 seqlen_kv=64");
  const GraphKey key{example_of(p), Direction::kForward, false, false};
  const auto made = build(p, default_geometry(p), key, {4096, 90, 132, 227 * 1024});
  const auto* refusal = std::get_if<Refusal>(&made);
  ASSERT_TRUE(refusal);
  EXPECT_EQ(refusal->why.find("cuDNN"), 0u) << refusal->why;
}

// A first run may be captured, whichever gradients it asks for: nothing can be built there.
TEST(CudnnGraph, IsPlannedForEveryChoiceOfGradients) {
  const auto count = [](const std::string& more, Passes passes = Passes::kBoth) {
    const Problem p = Problem::parse("dtype=bf16 heads_q=2 heads_kv=2 dim_qk=64 batch=1 " + more);
    return graphs_of(p, example_of(p), passes).size();
  };
  EXPECT_EQ(count("bias=post_scale softmax=learnable"), 1u);
  EXPECT_EQ(count("training=1"), 2u);
  EXPECT_EQ(count("training=1", Passes::kBackward), 1u);
  EXPECT_EQ(count("training=1 bias=post_scale"), 3u);
  EXPECT_EQ(count("training=1 softmax=off_by_one"), 3u);
  EXPECT_EQ(count("training=1 bias=post_scale softmax=learnable"), 5u);
}

}  // namespace
}  // namespace tea::cudnn
