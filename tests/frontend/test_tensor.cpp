// The checks of tensors that all front ends share.
#include <gtest/gtest.h>

#include <stdexcept>

#include "frontend/tensor.h"

namespace tea::frontend {
namespace {

constexpr int64_t kSize[] = {2, 3, 1}, kContiguous[] = {3, 1, 7}, kTransposed[] = {1, 2, 1};

Tensor tensor(const int64_t* stride, int32_t type = TEA_FP32, int device = -1) {
  static float memory[6];
  return {memory, type, device, 3, kSize, stride};
}

template <class Action>
std::string error_of(Action&& action) {
  try {
    action();
  } catch (const std::runtime_error& e) {
    return e.what();
  }
  return "none";
}

TEST(FrontendTensor, IsContiguousWhateverTheStridesOfDimensionsOfOne) {
  EXPECT_TRUE(tensor(kContiguous).is_contiguous());
  EXPECT_FALSE(tensor(kTransposed).is_contiguous());
  EXPECT_EQ(tensor(kContiguous).elements(), 6);
}

// Caught by a random case: an empty tensor was refused because of the strides of its other
// dimensions.
TEST(FrontendTensor, IsContiguousIfItIsEmpty) {
  constexpr int64_t kEmpty[] = {0, 3, 1};
  Tensor empty = tensor(kTransposed);
  empty.size = kEmpty;
  EXPECT_TRUE(empty.is_contiguous());
}

TEST(FrontendTensor, ErrorsNameTheArgumentTheValueSeenAndTheValueNeeded) {
  EXPECT_EQ(error_of([] {
              require_shape("sink", tensor(kContiguous), {1, {4}}, "float32 ");
            }),
            "sink is of shape [2, 3, 1]; needs float32 [4]");
  EXPECT_EQ(error_of([] { require_memory("sink", tensor(kContiguous, kInt64), TEA_FP32, -1); }),
            "sink.dtype is int64; needs float32");
  EXPECT_EQ(
      error_of([] { require_memory("sink", tensor(kContiguous, TEA_FP32, 1), TEA_FP32, -1); }),
      "sink is on cuda:1; needs cpu as the other tensors");
  EXPECT_EQ(error_of([] { require_memory("sink", tensor(kTransposed), TEA_FP32, -1); }),
            "sink is not contiguous; needs a contiguous tensor (call .contiguous())");
}

TEST(FrontendTensor, NamesEveryTypeOfTheCApi) {
  for (int32_t type = TEA_DTYPE_DEFAULT + 1; type <= TEA_FP64; ++type)
    EXPECT_EQ(dtype_named("dtype", type_text(type)), type);
  EXPECT_EQ(error_of([] { dtype_named("o_dtype", "int32"); }),
            "o_dtype is \"int32\"; needs a floating-point dtype, as in \"float8_e4m3fn\"");
}

}  // namespace
}  // namespace tea::frontend
