// Which backward kernels serve a problem on the portable engine.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "portable/backward/config.h"

namespace tea::portable {
namespace {

constexpr int kShared = 227 * 1024;  // of a CTA on sm_90

// The kernels of a problem whose tensors all begin at multiples of 16 bytes, except for one.
struct Selected {
  bool plain_dkv, plain_dq;
};
Selected select(const std::string& options, tea_tensor shifted = TEA_LSE) {
  const Problem p = Problem::parse(
      "dtype=bf16 training=1 heads_q=2 heads_kv=2 dim_qk=128 batch=1 seqlen_q=9 seqlen_kv=9 " +
      options);
  alignas(16) std::array<float, 8> memory{};
  Run run{};
  run.size = default_geometry(p);
  for (int t = 0; t < TEA_TENSOR_COUNT; ++t) run.tensor[t] = memory.data();
  run.tensor[shifted] = memory.data() + 1;
  const BackwardSelection s = select_backward(make_arguments(p, run), kShared);
  return {!kBackwardTiles[s.main].general, !kDqTiles[s.dq].general};
}

TEST(BackwardConfig, ScoreModificationsNeedTheGeneralKernels) {
  EXPECT_TRUE(select("").plain_dkv);
  EXPECT_TRUE(select("").plain_dq);
  EXPECT_FALSE(select("softcap=30").plain_dkv);
  EXPECT_FALSE(select("softcap=30").plain_dq);
}

// The plain kernels store dK and dV in chunks of 16 bytes or in fp32; more would cost the loop of
// head dimension 128 its registers. That of dQ stores any type.
TEST(BackwardConfig, UnalignedDkOrDvOf16BitsNeedsTheGeneralKernel) {
  EXPECT_FALSE(select("", TEA_DK).plain_dkv);
  EXPECT_FALSE(select("", TEA_DV).plain_dkv);
  for (const tea_tensor shifted : {TEA_DQ, TEA_DK, TEA_DV})
    EXPECT_TRUE(select("", shifted).plain_dq) << shifted;
  EXPECT_TRUE(select("", TEA_DQ).plain_dkv);
}

TEST(BackwardConfig, ResultsInFp32NeedNoAlignment) {
  for (const tea_tensor shifted : {TEA_LSE, TEA_DQ, TEA_DK, TEA_DV}) {
    const Selected s = select("dqkv_dtype=fp32", shifted);
    EXPECT_TRUE(s.plain_dkv) << shifted;
    EXPECT_TRUE(s.plain_dq) << shifted;
  }
}

TEST(BackwardConfig, UnalignedInputsNeedTheGeneralKernels) {
  for (const tea_tensor shifted : {TEA_Q, TEA_K, TEA_V, TEA_DOUT}) {
    EXPECT_FALSE(select("", shifted).plain_dkv) << shifted;
    EXPECT_FALSE(select("", shifted).plain_dq) << shifted;
  }
}

}  // namespace
}  // namespace tea::portable
