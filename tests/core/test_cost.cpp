// cost: visible pairs counted by brute force, operations and bytes from their formulas.
#include <gtest/gtest.h>

#include <array>

#include "core/cost.h"
#include "core/error.h"

namespace tea {
namespace {

uint64_t brute(const Problem& p, int64_t q, int64_t kv) {
  uint64_t n = 0;
  const int64_t delta = p.bottom_right ? kv - q : 0;
  for (int64_t i = 0; i < q; ++i)
    for (int64_t j = 0; j < kv; ++j) {
      const int64_t d = j - i - delta;
      const bool left = !p.window_left || d >= -(p.window_left - 1);
      const bool right = !p.window_right || d <= p.window_right - 1;
      n += left && right && (!p.causal || d <= 0);
    }
  return n;
}

TEST(Cost, CountsVisiblePairsOfEveryMask) {
  for (const char* mask : {"", "causal=1", "causal=1 bottom_right=1", "window_left=3",
                           "window_left=2 window_right=4 bottom_right=1", "causal=1 window_left=1"})
    for (int64_t q : {0, 1, 5, 9})
      for (int64_t kv : {0, 1, 6, 9}) {
        Problem p = Problem::parse("dtype=bf16 batch=2 heads_q=4 heads_kv=2 dim_qk=16 dim_v=8 " +
                                   std::string(mask));
        p.seqlen_q = q, p.seqlen_kv = kv;
        const tea_cost c = cost(p, nullptr);
        EXPECT_EQ(c.visible, 8 * brute(p, q, kv)) << p.text();
        EXPECT_EQ(c.forward_flops, 2 * c.visible * 24);
        EXPECT_EQ(c.backward_flops, 0u);
      }
}

TEST(Cost, BytesAreEachTensorOnce) {
  const Problem p = Problem::parse(
      "dtype=bf16 batch=2 seqlen_q=3 seqlen_kv=5 heads_q=4 heads_kv=2 dim_qk=16 dim_v=8 "
      "training=1");
  const tea_cost c = cost(p, nullptr);
  const uint64_t q = 2 * 3 * 4 * 16 * 2, k = 2 * 5 * 2 * 16 * 2, v = 2 * 5 * 2 * 8 * 2,
                 o = 2 * 3 * 4 * 8 * 2, lse = 2 * 4 * 3 * 4;
  EXPECT_EQ(c.forward_bytes, q + k + v + o + lse);
  EXPECT_EQ(c.backward_bytes, 2 * (q + k + v + o) + lse);
  EXPECT_EQ(c.backward_flops, 2 * c.visible * (3 * 16 + 2 * 8));
}

TEST(Cost, ManyHeadsDoNotOverflow) {
  const Problem p = Problem::parse(
      "dtype=bf16 batch=1 seqlen_q=1 seqlen_kv=0 heads_q=8388608 heads_kv=1 "
      "dim_qk=512 dim_v=8");
  EXPECT_EQ(cost(p, nullptr).forward_bytes, uint64_t{8388608} * (512 + 8) * 2);
}

TEST(Cost, LengthsComeFromHostMemory) {
  const Problem p = Problem::parse(
      "dtype=bf16 q_form=ragged kv_form=ragged heads_q=1 heads_kv=1 dim_qk=8 causal=1");
  const std::array<int32_t, 4> cu{0, 3, 3, 7};
  std::array<void*, TEA_TENSOR_COUNT> tensors{};
  tea_run run{};
  run.struct_size = sizeof run, run.tensors = tensors.data(), run.tensor_count = TEA_TENSOR_COUNT;
  run.batch = 3, run.max_q = run.max_kv = 4, run.tokens_q = run.tokens_kv = 7;
  EXPECT_THROW(cost(p, &run), Error);
  tensors[TEA_CU_SEQLENS_Q] = tensors[TEA_CU_SEQLENS_KV] = const_cast<int32_t*>(cu.data());
  EXPECT_EQ(cost(p, &run).visible, 6u + 10u);
}

}  // namespace
}  // namespace tea
