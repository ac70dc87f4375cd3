// Options of a call become fields of the problem, or are refused.
#include <gtest/gtest.h>

#include "frontend/fake_call.h"

namespace tea::frontend {
namespace {

TEST(DescribeOptions, OptionsBecomeFields) {
  FakeCall t({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
  t.options.mask = "causal_bottom_right", t.options.window_left = 3, t.options.softcap = 20;
  t.options.sink = t.contiguous({4}, TEA_FP32);
  t.options.bias = t.contiguous({1, 4, 6, 8}, TEA_FP32);
  t.options.max_logit = true;
  const std::string line = t.line();
  for (const char* part : {"causal=1 bottom_right=1 window_left=4", "bias=post_scale",
                           "bias_dtype=fp32", "softmax=learnable", "softcap=20", "lse+max"})
    EXPECT_TRUE(contains(line, part)) << part << " in " << line;
}

TEST(DescribeOptions, SinksHaveTheTypeOfTheRowStatistics) {
  FakeCall t({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
  for (Tensor* x : {&t.options.q, &t.options.k, &t.options.v}) x->type = TEA_FP64;
  EXPECT_EQ(Description(t.options).statistic_type(), TEA_FP64);
  t.options.sink = t.contiguous({4}, TEA_FP32);
  EXPECT_EQ(t.line(), "sink.dtype is float32; needs float64");
}

// Those that options.def translates: fields as they are, and tensors of one dimension.
TEST(DescribeOptions, TheTableTranslatesPlainOnes) {
  FakeCall t({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
  t.options.training = t.options.deterministic = t.options.batch_invariant = true;
  t.options.dropout = 0.5, t.options.softcap = 3;
  t.options.rng_state = t.contiguous({2}, kInt64);
  const std::string line = t.line();
  for (const char* part :
       {"training=1", "deterministic=1", "batch_invariant=1", "dropout=0.5", "softcap=3"})
    EXPECT_TRUE(contains(line, part)) << part << " in " << line;
  Description description(t.options);
  description.finish();
  EXPECT_EQ(description.run.tensors[TEA_RNG_STATE], t.options.rng_state->data);
  t.options.rng_state = t.contiguous({1}, kInt64);
  EXPECT_EQ(t.line(), "rng_state is of shape [1]; needs seed and offset, int64 [2]");
  t.options.rng_state = t.contiguous({2}, kInt32);
  EXPECT_EQ(t.line(), "rng_state.dtype is int32; needs int64");
}

TEST(DescribeOptions, WrongOnesAreNamed) {
  const auto error = [](auto&& change) {
    FakeCall t({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
    change(t);
    return t.line();
  };
  EXPECT_EQ(error([](FakeCall& t) { t.options.mask = "lower"; }),
            "mask is \"lower\"; needs none, causal, bottom_right or causal_bottom_right");
  EXPECT_EQ(error([](FakeCall& t) { t.options.window_left = -2; }),
            "window is -2; needs from 0 to 2^62, or -1 for no bound");
  EXPECT_EQ(error([](FakeCall& t) { t.options.pre_scale_bias = true; }),
            "bias_type is \"pre_scale\"; needs a bias");
  EXPECT_EQ(error([](FakeCall& t) { t.options.origin = t.contiguous({3}, kInt64); }),
            "origin is of shape [3]; needs batch, head, row, column: int64 [4]");
  EXPECT_EQ(error([](FakeCall& t) {
              t.options.page_table_v = t.contiguous({2, 1}, kInt32);
            }),
            "page_table_v is a tensor; needs None without a page_table");
}

}  // namespace
}  // namespace tea::frontend
