// Graphs run on a GPU, where tests/gpu compares what they compute. Here: a refusal instead of a
// crash without one, and what the frontend says to the description of every feature, in both
// directions.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include "cudnn/graph.h"
#include "cudnn/library.h"

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

// With the cuDNN of the tests' Python, if it is there: the process loads it, as PyTorch would.
class CudnnDescription : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    static void* const kept = dlopen(TE_ATTENTION_CUDNN_LIBRARY, RTLD_NOW | RTLD_GLOBAL);
    if (!kept && !library().symbols) GTEST_SKIP() << "no cuDNN at " << TE_ATTENTION_CUDNN_LIBRARY;
  }
};

// The reason against the graphs of a problem; empty: none.
std::string objections(const std::string& what, int sm) {
  const Problem p = Problem::parse(what).normalised();
  std::string said;
  for (const GraphKey& key : graphs_of(p, example_of(p), Passes::kBoth))
    if (const std::string one = objection(p, default_geometry(p), key, sm); !one.empty())
      said += (key.direction == Direction::kForward ? "forward: " : "backward: ") + one + "\n";
  return said;
}

TEST_P(CudnnDescription, IsWhatTheFrontendTakes) {
  EXPECT_EQ(objections(GetParam(), 90), "");
  EXPECT_EQ(objections(GetParam(), 100), "");
}

#define HEADS "training=1 heads_q=4 heads_kv=2 "
#define SIZES "batch=2 seqlen_q=256 seqlen_kv=256 "
INSTANTIATE_TEST_SUITE_P(
    Features, CudnnDescription,
    testing::Values(
        "dtype=bf16 dim_qk=64 causal=1 " HEADS SIZES,
        "dtype=fp16 dim_qk=128 causal=1 window_left=9 " HEADS SIZES,
        "dtype=bf16 dim_qk=64 window_left=9 window_right=5 " HEADS SIZES,
        "dtype=bf16 dim_qk=64 causal=1 bottom_right=1 batch=2 seqlen_q=100 seqlen_kv=200 " HEADS,
        "dtype=bf16 dim_qk=192 dim_v=128 causal=1 " HEADS SIZES,
        "dtype=bf16 dim_qk=64 bias=post_scale " HEADS SIZES,
        "dtype=bf16 dim_qk=64 bias=post_scale bias_broadcast=batch+head heads_q=4 "
        "heads_kv=4 " SIZES,
        "dtype=bf16 dim_qk=64 alibi=standard causal=1 " HEADS SIZES,
        "dtype=bf16 dim_qk=64 softmax=learnable " HEADS SIZES,
        "dtype=bf16 dim_qk=64 softmax=off_by_one causal=1 " HEADS SIZES,
        "dtype=bf16 dim_qk=64 dropout=0.1 " HEADS SIZES,
        "dtype=bf16 dim_qk=64 deterministic=1 " HEADS SIZES,
        "dtype=bf16 dim_qk=64 outputs=max " HEADS SIZES,
        "dtype=bf16 dim_qk=64 q=65536,64,16384 k=32768,64,16384 v=32768,64,16384 " HEADS SIZES,
        "dtype=bf16 dim_qk=64 q_form=padded kv_form=padded causal=1 " HEADS SIZES,
        "dtype=bf16 dim_qk=64 q_form=ragged kv_form=ragged gaps=1 causal=1 " HEADS,
        "dtype=bf16 dim_qk=64 q_form=ragged kv_form=padded seqlen_kv=256 " HEADS,
        "dtype=bf16 dim_qk=64 kv_form=paged page_size=16 seqlen_q=1 heads_q=4 heads_kv=2",
        "dtype=bf16 dim_qk=64 q_form=ragged kv_form=paged page_size=64 heads_q=4 heads_kv=2",
        "dtype=e4m3 dim_qk=128 causal=1 " HEADS SIZES,
        "dtype=e4m3 dim_qk=128 dout_dtype=e5m2 dqkv_dtype=e5m2 " HEADS SIZES));

// Current scaling is described in full, and refused by GPU: only Blackwell has it.
TEST_F(CudnnDescription, OfCurrentScalingIsTakenOnBlackwell) {
  const std::string current =
      "dtype=e4m3 o_dtype=bf16 dout_dtype=e5m2 dqkv_dtype=bf16 dim_qk=128 " HEADS SIZES;
  EXPECT_EQ(objections(current, 100), "");
  EXPECT_NE(objections(current, 90).find("forward: cuDNN says: "), std::string::npos);
  EXPECT_NE(objections(current, 90).find("only supported on Blackwell"), std::string::npos);
}

// A refusal is what cuDNN said, in a line for each graph.
TEST_F(CudnnDescription, IsRefusedInWords) {
  EXPECT_EQ(objections("dtype=bf16 dim_qk=64 causal=1 bottom_right=1 heads_q=4 heads_kv=4 batch=2 "
                       "seqlen_q=200 seqlen_kv=100",
                       90)
                .find("forward: cuDNN says: Bottom right causal mask does not support"),
            0u);
  EXPECT_NE(objections("dtype=bf16 dim_qk=512 " HEADS SIZES, 90).find("backward: cuDNN says: "),
            std::string::npos);
}

}  // namespace
}  // namespace tea::cudnn
