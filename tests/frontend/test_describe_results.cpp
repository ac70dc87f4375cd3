// The layouts and types of the results of a call.
#include <gtest/gtest.h>

#include "frontend/fake_call.h"

namespace tea::frontend {
namespace {

std::vector<int64_t> strides_of_o(FakeCall& t) {
  const Layout layout = Description(t.options).o_layout();
  return {layout.stride, layout.stride + layout.rank};
}

TEST(DescribeResults, TheHeadsOfATokenAreAdjacentInO) {
  FakeCall bhsd({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd"), sbhd({6, 2, 4, 16}, {8, 2, 4, 16}, "sbhd");
  EXPECT_EQ(strides_of_o(bhsd), (std::vector<int64_t>{384, 16, 64, 1}));
  EXPECT_EQ(strides_of_o(sbhd), (std::vector<int64_t>{128, 64, 16, 1}));
}

TEST(DescribeResults, RowStatisticsAreByHeadOrByToken) {
  FakeCall t({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
  const Shape dense = Description(t.options).row_statistic_shape();
  EXPECT_EQ(shape_text(dense.rank, dense.size), "[2, 4, 6]");
  t.options.format = "thd";
  t.options.q = t.options.k = t.options.v = t.contiguous({12, 4, 16});
  t.options.cu_seqlens_q = t.options.cu_seqlens_kv = t.contiguous({3}, kInt32);
  const Shape ragged = Description(t.options).row_statistic_shape();
  EXPECT_EQ(shape_text(ragged.rank, ragged.size), "[12, 4]");
}

TEST(DescribeResults, TypesFollowThoseThatTheProblemStates) {
  FakeCall t({2, 4, 6, 16}, {2, 4, 8, 16}, "bhsd");
  Description description(t.options);
  EXPECT_EQ(description.type_of(TEA_DOUT), TEA_BF16);
  description.problem.o_dtype = TEA_FP32;
  EXPECT_EQ(description.type_of(TEA_O), TEA_FP32);
  EXPECT_EQ(description.type_of(TEA_DOUT), TEA_FP32);
  EXPECT_EQ(description.type_of(TEA_DQ), TEA_BF16);
}

}  // namespace
}  // namespace tea::frontend
