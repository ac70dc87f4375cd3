// The translation into a Problem: what each option becomes, and why work is refused.
#include <gtest/gtest.h>

#include "core/error.h"
#include "nvte/memory_order.h"
#include "nvte/problem.h"

namespace tea::nvte {
namespace {

Work work(NVTE_QKV_Layout layout = NVTE_BSHD_BSHD_BSHD, NVTE_Mask_Type mask = NVTE_NO_MASK) {
  Work w{};
  w.options.layout = layout, w.options.mask = mask;
  w.sizes = {.batch = 2,
             .heads_q = 4,
             .heads_kv = 4,
             .max_q = 6,
             .max_kv = 6,
             .dim_qk = 8,
             .dim_v = 8,
             .tokens_q = 20,
             .tokens_kv = 20,
             .k = {5, 3, 2},
             .v = {7, 3, 2}};
  const NVTEDType h = kNVTEFloat16;
  w.types = {h, h, h, h, h};
  return w;
}

TEST(NvteProblem, FormsFollowTheLayoutAndThePadding) {
  for (int i = 0; i < test::kLayouts; ++i)
    for (const NVTE_Mask_Type mask : {NVTE_NO_MASK, NVTE_PADDING_MASK}) {
      const auto layout = static_cast<NVTE_QKV_Layout>(i);
      const test::Order order = test::order_of(layout);
      const int plain = mask == NVTE_PADDING_MASK ? TEA_PADDED : TEA_DENSE;
      const Problem p = problem_of(work(layout, mask));
      EXPECT_EQ(p.q_form, order.ragged_q() ? TEA_RAGGED : plain) << i;
      EXPECT_EQ(p.kv_form, order.paged ? TEA_PAGED : order.ragged_kv() ? TEA_RAGGED : plain) << i;
      const tea_run run = run_of(work(layout, mask));
      const bool varies = order.paged || order.ragged_q() || order.ragged_kv();
      EXPECT_EQ(p.batch, varies ? 0 : 2);
      EXPECT_EQ(run.batch, varies ? 2 : 0);
      EXPECT_EQ(run.tokens_q, order.ragged_q() ? 20 : 0);
      EXPECT_EQ(run.tokens_kv, order.ragged_kv() ? 20 : 0);
      EXPECT_EQ(run.pages_k, order.paged ? 5 : 0);
      EXPECT_EQ(run.pages_v, order.paged ? 7 : 0);
    }
}

TEST(NvteProblem, MasksTakeTheirDiagonalFromTheirTypeOthersFromTheFlag) {
  const struct {
    NVTE_Mask_Type type;
    int causal, corner_without_flag, corner_with_flag;
  } rows[] = {{NVTE_NO_MASK, 0, 0, 1},
              {NVTE_PADDING_MASK, 0, 0, 1},
              {NVTE_CAUSAL_MASK, 1, 0, 0},
              {NVTE_PADDING_CAUSAL_MASK, 1, 0, 0},
              {NVTE_CAUSAL_BOTTOM_RIGHT_MASK, 1, 1, 1},
              {NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK, 1, 1, 1}};
  for (const auto& row : rows)
    for (const bool flag : {false, true}) {
      Work w = work(NVTE_BSHD_BSHD_BSHD, row.type);
      w.options.bottom_right = flag;
      const Problem p = problem_of(w);
      EXPECT_EQ(p.causal, row.causal);
      EXPECT_EQ(p.bottom_right, flag ? row.corner_with_flag : row.corner_without_flag);
    }
}

TEST(NvteProblem, WindowsAreBoundsPlusOne) {
  Work w = work();
  w.options.window_left = 0, w.options.window_right = 5;
  Problem p = problem_of(w);
  EXPECT_EQ(p.window_left, 1);
  EXPECT_EQ(p.window_right, 6);
  w.options.window_left = -1, w.options.window_right = INT64_MAX;
  p = problem_of(w);
  EXPECT_EQ(p.window_left, 0);
  EXPECT_EQ(p.window_right, 0);
  // A causal mask stays causal whatever the right bound says.
  w = work(NVTE_BSHD_BSHD_BSHD, NVTE_CAUSAL_MASK);
  w.options.window_right = 3;
  EXPECT_EQ(problem_of(w).normalised(),
            problem_of(work(NVTE_BSHD_BSHD_BSHD, NVTE_CAUSAL_MASK)).normalised());
}

TEST(NvteProblem, BiasesAndSoftmaxes) {
  Work w = work();
  const struct {
    NVTE_Bias_Type type;
    int bias, alibi;
  } rows[] = {{NVTE_NO_BIAS, TEA_BIAS_NONE, TEA_ALIBI_NONE},
              {NVTE_PRE_SCALE_BIAS, TEA_BIAS_PRE_SCALE, TEA_ALIBI_NONE},
              {NVTE_POST_SCALE_BIAS, TEA_BIAS_POST_SCALE, TEA_ALIBI_NONE},
              {NVTE_ALIBI, TEA_BIAS_NONE, TEA_ALIBI_STANDARD}};
  for (const auto& row : rows) {
    w.options.bias = row.type;
    EXPECT_EQ(problem_of(w).bias, row.bias);
    EXPECT_EQ(problem_of(w).alibi, row.alibi);
  }
  w.options.softmax = NVTE_LEARNABLE_SOFTMAX;
  EXPECT_EQ(problem_of(w).softmax, TEA_SOFTMAX_LEARNABLE);
}

// The label of a 16-bit call's bias is not to be trusted.
TEST(NvteProblem, OnlyFp8TakesTheTypeOfTheBiasFromItsLabel) {
  Work w = work();
  w.options.bias = NVTE_POST_SCALE_BIAS;
  w.types.bias = kNVTEFloat32;
  EXPECT_EQ(problem_of(w).bias_type(), TEA_FP16);
  w.types.q = kNVTEFloat8E4M3;
  w.types.bias = kNVTEBFloat16;
  EXPECT_EQ(problem_of(w).bias_type(), TEA_BF16);
}

TEST(NvteProblem, DropoutIsOffWithoutTraining) {
  Work w = work();
  w.options.dropout = 0.5f;
  EXPECT_EQ(problem_of(w).dropout, 0);
  w.options.training = true;
  EXPECT_EQ(problem_of(w).dropout, 0.5f);
}

TEST(NvteProblem, TypesMapAndOthersAreNone) {
  EXPECT_EQ(dtype_of(kNVTEFloat16), TEA_FP16);
  EXPECT_EQ(dtype_of(kNVTEBFloat16), TEA_BF16);
  EXPECT_EQ(dtype_of(kNVTEFloat32), TEA_FP32);
  EXPECT_EQ(dtype_of(kNVTEFloat8E4M3), TEA_E4M3);
  EXPECT_EQ(dtype_of(kNVTEFloat8E5M2), TEA_E5M2);
  EXPECT_EQ(dtype_of(kNVTEInt32), TEA_DTYPE_DEFAULT);
  EXPECT_EQ(dtype_of(kNVTEFloat4E2M1), TEA_DTYPE_DEFAULT);
}

TEST(NvteProblem, RefusalsSayWhy) {
  EXPECT_EQ(refusal(work()), "");
  EXPECT_EQ(refusal(work(NVTE_THD_THD_THD)), "");
  const struct {
    const char* why;
    NVTE_QKV_Layout layout;
    void (*change)(Work&);
  } rows[] = {
      {"head dim of V is 16; needs that of K, which is 8", NVTE_BSHD_BS2HD,
       [](Work& w) { w.sizes.dim_v = 16; }},
      {"heads of K is 2; needs those of Q", NVTE_BS3HD, [](Work& w) { w.sizes.heads_kv = 2; }},
      {"max_seqlen_kv is 7; needs max_seqlen_q", NVTE_SB3HD, [](Work& w) { w.sizes.max_kv = 7; }},
      {"heads_q is 4; needs a multiple of heads_kv", NVTE_BSHD_BSHD_BSHD,
       [](Work& w) { w.sizes.heads_kv = 3; }},
      {"window_size_left is -2; needs -1", NVTE_BSHD_BSHD_BSHD,
       [](Work& w) { w.options.window_left = -2; }},
      {"return_max_logit is 1; needs 0 for FP8", NVTE_BSHD_BSHD_BSHD,
       [](Work& w) { w.types.q = kNVTEFloat8E4M3, w.options.max_logit = true; }},
      {"q_dtype is 2; needs kNVTEFloat16", NVTE_BSHD_BSHD_BSHD,
       [](Work& w) { w.types.q = kNVTEInt32; }}};
  for (const auto& row : rows) {
    Work w = work(row.layout);
    EXPECT_EQ(refusal(w), "");
    row.change(w);
    const std::string text = refusal(w);
    EXPECT_NE(text.find(row.why), std::string::npos) << text;
    EXPECT_TRUE(text.starts_with(
        "Invalid combination of data type and sequence length for fused attention. "));
  }
}

TEST(NvteProblem, PagesMustCoverTheLongestSequence) {
  Work w = work(NVTE_Paged_KV_BSHD_BSHD_BSHD, NVTE_PADDING_MASK);
  EXPECT_EQ(refusal(w), "");
  w.sizes.k.columns = 1;
  EXPECT_NE(refusal(w).find("page_table_k's second dimension is 1; needs at least 2"),
            std::string::npos);
  w = work(NVTE_Paged_KV_BSHD_BSHD_BSHD, NVTE_PADDING_MASK);
  w.sizes.v.size = 4;
  EXPECT_NE(refusal(w).find("page size of V is 4; needs that of K"), std::string::npos);
}

TEST(NvteProblem, MasksOutsideTheEnumThrow) {
  EXPECT_THROW(mask_of(static_cast<NVTE_Mask_Type>(6)), Error);
  EXPECT_TRUE(mask_of(NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK).padding);
}

}  // namespace
}  // namespace tea::nvte
