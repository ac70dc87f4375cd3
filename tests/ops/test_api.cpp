// The C boundary: every function reaches its operation, and every error becomes a status and a
// text.
#include <string>

#include "buffer.h"
#include "te_attention_ops.h"

namespace tea {
namespace {

// Calls with no arguments at all: refused with a text that says which struct is needed.
#define EXPECT_NEEDS(function, name)                      \
  EXPECT_EQ(function(nullptr, -1, nullptr), TEA_INVALID); \
  EXPECT_EQ(std::string(tea_error()), "args is NULL; needs " #name)

TEST(OpsApi, NoArguments) {
  EXPECT_NEEDS(tea_kv_cache_append, tea_kv_append);
  EXPECT_NEEDS(tea_thd_to_bshd, tea_thd_convert);
  EXPECT_NEEDS(tea_bshd_to_thd, tea_thd_convert);
  EXPECT_NEEDS(tea_cu_seqlens_fill, tea_cu_seqlens);
  EXPECT_NEEDS(tea_dropout_keep, tea_dropout_mask);
  EXPECT_NEEDS(tea_merge_parts, tea_merge);
  EXPECT_NEEDS(tea_cp_read_half, tea_cp_half);
  EXPECT_NEEDS(tea_cp_lse_correct, tea_cp_lse);
  EXPECT_NEEDS(tea_cp_lse_read, tea_cp_lse);
  EXPECT_NEEDS(tea_cp_out_correct, tea_cp_out);
  EXPECT_NEEDS(tea_cp_grad_correct, tea_cp_grad);
  EXPECT_NEEDS(tea_cp_partition_indices, tea_cp_partition);
  EXPECT_NEEDS(tea_cp_to_rank_order, tea_cp_order);
  EXPECT_NEEDS(tea_cp_to_sequence_order, tea_cp_order);
  EXPECT_NEEDS(tea_cp_copy_valid, tea_cp_valid);
  EXPECT_NEEDS(tea_flash_prepare_forward, tea_flash_prepare);
  EXPECT_NEEDS(tea_flash_prepare_backward, tea_flash_prepare);
  EXPECT_NEEDS(tea_scaled_softmax_forward, tea_scaled_softmax);
  EXPECT_NEEDS(tea_scaled_softmax_backward, tea_scaled_softmax);
  EXPECT_NEEDS(tea_fp8_quantize, tea_fp8_cast);
  EXPECT_NEEDS(tea_fp8_quantize_current, tea_fp8_cast);
  EXPECT_NEEDS(tea_fp8_dequantize, tea_fp8_cast);
  EXPECT_NEEDS(tea_fp8_quantize_joint, tea_fp8_joint_cast);
  EXPECT_NEEDS(tea_fp8_quantize_joint_current, tea_fp8_joint_cast);
  EXPECT_NEEDS(tea_fp8_dequantize_joint, tea_fp8_joint_cast);
  EXPECT_NEEDS(tea_fp8_update_scales, tea_fp8_scales);
}

TEST(OpsApi, RandomState) {
  int64_t state[2] = {};
  const int64_t seed = 8, offset = 9;
  EXPECT_EQ(tea_rng_fill(state, 3, 4, -1, nullptr), TEA_OK);
  EXPECT_EQ(state[0], 3);
  EXPECT_EQ(tea_rng_advance(state, 16, -1, nullptr), TEA_OK);
  EXPECT_EQ(state[1], 20);
  EXPECT_EQ(tea_rng_fill_captured(state, &seed, &offset, 2, -1, nullptr), TEA_OK);
  EXPECT_EQ(state[0], 8);
  EXPECT_EQ(state[1], 11);
  EXPECT_EQ(tea_rng_fill(nullptr, 3, 4, -1, nullptr), TEA_INVALID);
  EXPECT_EQ(std::string(tea_error()), "rng_state is NULL; needs memory");
}

TEST(OpsApi, FillsAndAmax) {
  float x[2] = {};
  float amax = 0;
  EXPECT_EQ(tea_fill(x, TEA_FP32, 2, 1.5, -1, nullptr), TEA_OK);
  EXPECT_EQ(x[1], 1.5f);
  EXPECT_EQ(tea_amax(x, TEA_FP32, 2, &amax, -1, nullptr), TEA_OK);
  EXPECT_EQ(amax, 1.5f);
  EXPECT_EQ(tea_fill_bytes(x, 0, sizeof x, -1, nullptr), TEA_OK);
  EXPECT_EQ(x[0], 0);
}

TEST(OpsApi, OneStructGoesAllTheWay) {
  // softmax of two equal scores, and its gradient
  float x[2] = {4, 4}, y[2] = {}, dy[2] = {1, 0}, dx[2] = {};
  tea_scaled_softmax a{};
  a.struct_size = sizeof a;
  a.dtype = TEA_FP32, a.scale = 1, a.input = x, a.output = y;
  a.batch = a.heads = a.rows = 1, a.cols = 2;
  EXPECT_EQ(tea_scaled_softmax_forward(&a, -1, nullptr), TEA_OK);
  EXPECT_EQ(y[0], 0.5f);
  a.input = y, a.dout = dy, a.output = dx;
  EXPECT_EQ(tea_scaled_softmax_backward(&a, -1, nullptr), TEA_OK);
  EXPECT_EQ(dx[0], 0.25f);
  EXPECT_EQ(dx[1], -0.25f);
}

TEST(OpsApi, OnlyDevicesThatThisBuildHas) {
  tea_fp8_cast a{};
  a.struct_size = sizeof a;
  a.input_dtype = TEA_FP32, a.output_dtype = TEA_E4M3;
  EXPECT_EQ(tea_fp8_quantize(&a, -1, nullptr), TEA_OK);
  EXPECT_EQ(tea_fp8_quantize(&a, -2, nullptr), TEA_INVALID);
  float x = 7;
  EXPECT_NE(tea_fill(&x, TEA_FP32, 1, 0, 1 << 20, nullptr), TEA_OK);
  EXPECT_EQ(x, 7);
  EXPECT_NE(std::string(tea_error()).find("device is 1048576"), std::string::npos);
}

}  // namespace
}  // namespace tea
