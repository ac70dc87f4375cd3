// FP8 on cuDNN by default: its place among the engines, and what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "composite/portable.h"
#include "core/registry.h"
#include "kit/answer.h"
#include "portable/engine.h"

namespace tea::composite {
namespace {

const Engine* found() {
  for (const Engine& e : engines())
    if (e.name == "portable-cudnn") return &e;
  return nullptr;
}

Problem fp8(const std::string& more = "") {
  Problem p = Problem::parse("dtype=e4m3 batch=1 heads_q=16 heads_kv=16 causal=1 " + more);
  if (!p.seqlen_q) p.seqlen_q = 16384;
  if (!p.seqlen_kv) p.seqlen_kv = 16384;
  if (!p.dim_qk) p.dim_qk = 128;
  return p.normalised();
}

std::string why(const Problem& p) {
  const Attempt attempt = found()->attempt(p, kit::kH200);
  const auto* refusal = std::get_if<Refusal>(&attempt);
  return refusal ? refusal->why : "";
}

// The faster engine comes first, and runs without being named.
TEST(CompositePortable, WithCudnnComesBeforePortable) {
  std::vector<std::string_view> names;
  for (const Engine& e : engines()) names.push_back(e.name);
  EXPECT_LT(std::ranges::find(names, "portable-cudnn"), std::ranges::find(names, "portable"));
  ASSERT_TRUE(found());
  EXPECT_FALSE(found()->only_by_name);
}

TEST(CompositePortable, RefusesWhatWasNotMeasured) {
  Problem half = fp8();
  half.dtype = TEA_BF16;
  EXPECT_EQ(why(half), "dtype is bf16; needs e4m3 or e5m2");
  for (const char* more : {"window_left=9", "bias=post_scale", "deterministic=1", "outputs=max",
                           "seqlen_q=8192", "kv_form=padded"})
    EXPECT_EQ(why(fp8(more)),
              "it has options, or seqlen_q differs from seqlen_kv; needs dense self-attention")
        << more;
  EXPECT_EQ(
      why(fp8("seqlen_q=256 seqlen_kv=256")),
      "dim_qk is 128, dim_v 128, seqlen_q 256, batch 1 and heads_q 16; cuDNN was not measured "
      "to be faster there");
  // The backward pass of other head dimensions is not cuDNN's.
  EXPECT_EQ(why(fp8("dim_qk=64 training=1")).find("dim_qk is 64"), 0u);
}

TEST(CompositePortable, NeedsTheWorkspaceOfTheLargerEngine) {
  const Problem p = fp8("training=1"), other = fp8("training=1 window_left=9");
  for (const Direction d : {Direction::kForward, Direction::kBackward}) {
    const uint64_t own = portable::workspace(p, default_geometry(p), d);
    EXPECT_GE(portable_cudnn_workspace(p, default_geometry(p), d), own);
    EXPECT_EQ(portable_cudnn_workspace(other, default_geometry(other), d),
              portable::workspace(other, default_geometry(other), d));
  }
}

}  // namespace
}  // namespace tea::composite
