// The table of tensors: tensor_info, tensor_table, and the arithmetic of shapes.
#include <gtest/gtest.h>

#include <array>
#include <set>

#include "core/error.h"
#include "core/tensors.h"

namespace tea {
namespace {

TEST(Tensors, TheTableIsIndexedByTheEnumAndNamesAreUnique) {
  std::set<std::string_view> names;
  for (const TensorInfo& info : tensor_table()) {
    EXPECT_EQ(&tensor_info(info.index), &info);
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(TEA_TENSOR_COUNT));
}

TEST(Shape, ElementsSpanAndOffset) {
  const Shape s{3, {2, 3, 4}, {100, 10, 2}};
  EXPECT_EQ(s.elements(), 24);
  EXPECT_EQ(s.span(), 100 + 20 + 6 + 1);
  EXPECT_EQ(s.offset(0), 0);
  EXPECT_EQ(s.offset(23), 126);
  EXPECT_EQ(s.offset(5), 12);
  EXPECT_EQ((Shape{2, {0, 4}, {4, 1}}).span(), 0);
  EXPECT_EQ((Shape{3, {INT64_MAX, INT64_MAX, 0}, {0, 0, 1}}).elements(), 0);
  EXPECT_EQ((Shape{3, {INT64_MAX, 2, 2}, {0, 0, 1}}).elements(), INT64_MAX);
}

TEST(Tensors, UseFollowsTheProblem) {
  const auto use = [](const char* text, tea_tensor t, Direction d) {
    return tensor_info(t).use(Problem::parse(text), d);
  };
  using enum Direction;
  using enum Use;
  EXPECT_EQ(use("", TEA_LSE, kForward), kUnused);
  EXPECT_EQ(use("outputs=lse", TEA_LSE, kForward), kRequired);
  EXPECT_EQ(use("training=1", TEA_LSE, kForward), kRequired);
  EXPECT_EQ(use("training=1", TEA_LSE, kBackward), kRequired);
  EXPECT_EQ(use("dropout=0.5", TEA_RNG_STATE, kForward), kUnused);
  EXPECT_EQ(use("dropout=0.5 training=1", TEA_RNG_STATE, kForward), kRequired);
  EXPECT_EQ(use("kv_form=paged", TEA_TABLE_K, kForward), kRequired);
  EXPECT_EQ(use("kv_form=paged", TEA_TABLE_V, kForward), kOptional);
  EXPECT_EQ(use("q_form=ragged", TEA_OFFSETS_Q, kForward), kUnused);
  EXPECT_EQ(use("q_form=ragged gaps=1", TEA_OFFSETS_Q, kForward), kRequired);
  EXPECT_EQ(use("softmax=off_by_one", TEA_SINK, kForward), kUnused);
  EXPECT_EQ(use("softmax=learnable", TEA_SINK, kForward), kRequired);
  EXPECT_EQ(use("softmax=learnable training=1", TEA_SINK, kBackward), kOptional);
  EXPECT_EQ(use("dtype=e4m3 o_dtype=bf16", TEA_O_SCALE, kForward), kUnused);
  EXPECT_EQ(use("dtype=e4m3", TEA_O_SCALE, kForward), kOptional);
  EXPECT_EQ(use("dtype=bf16", TEA_S_SCALE, kForward), kUnused);
}

}  // namespace
}  // namespace tea
