// From options and tensors to the line of a problem, without a framework.
#include <gtest/gtest.h>

#include "frontend/fake_call.h"

namespace tea::frontend {
namespace {

TEST(Describe, FormatsBecomeStrides) {
  FakeCall bhsd({2, 4, 6, 16}, {2, 2, 8, 16}, "bhsd"), sbhd({6, 2, 4, 16}, {8, 2, 2, 16}, "sbhd");
  for (const std::string& line : {bhsd.line(), sbhd.line()}) {
    EXPECT_TRUE(contains(line, "heads_q=4 heads_kv=2 dim_qk=16 dim_v=16 batch=2")) << line;
    EXPECT_TRUE(contains(line, "seqlen_q=6 seqlen_kv=8")) << line;
  }
  EXPECT_TRUE(contains(bhsd.line(), " q=384,16,96")) << bhsd.line();
  EXPECT_TRUE(contains(sbhd.line(), " q=64,128,16")) << sbhd.line();
}

TEST(Describe, RaggedSizesBelongToTheRun) {
  FakeCall t({1, 1, 1, 1}, {1, 1, 1, 1}, "thd");
  t.options.q = t.contiguous({12, 4, 16});
  t.options.k = t.options.v = t.contiguous({20, 4, 16});
  t.options.cu_seqlens_q = t.options.cu_seqlens_kv = t.contiguous({3}, kInt32);
  t.options.max_seqlen_q = 7;
  Description description(t.options);
  EXPECT_EQ(description.problem.q_form, TEA_RAGGED);
  EXPECT_EQ(description.problem.seqlen_q, 0);
  EXPECT_EQ(description.run.batch, 2);
  EXPECT_EQ(description.run.tokens_q, 12);
  EXPECT_EQ(description.run.max_q, 7);
  EXPECT_EQ(description.run.max_kv, 20);
}

TEST(Describe, ErrorsNameTheArgument) {
  FakeCall heads({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
  heads.options.sink = heads.contiguous({3}, TEA_FP32);
  EXPECT_EQ(heads.line(), "sink is of shape [3]; needs float32 [4]");
  FakeCall format({2, 4, 6, 16}, {2, 4, 8, 16}, "hbsd");
  EXPECT_TRUE(contains(format.line(), "format is \"hbsd\"; needs bhsd, bshd, sbhd or thd"));
  FakeCall dtype({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
  dtype.options.k.type = TEA_FP16;
  EXPECT_EQ(dtype.line(), "k.dtype is float16; needs bfloat16 as q");
}

}  // namespace
}  // namespace tea::frontend
