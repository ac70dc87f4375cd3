// plan_reference: what the definition promises and a comparison with the oracle would not say. (The
// comparisons themselves: tests/problems and tests/kit.)
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "core/plan.h"
#include "cpu/reference.h"

namespace tea {
namespace {

TEST(Reference, RefusesDevices) {
  const Attempt attempt = cpu::plan_reference(Problem{}, Device{0, 90});
  EXPECT_EQ(std::get<Refusal>(attempt).why, "device is a GPU; it runs on the host");
}

// FP8 scales come from the largest value of the step before. What is cast is exp(x - max), at most
// 1, so that is what S.amax must describe. The largest *normalised* P of uniform attention over n
// keys is 1/n: a scale of 448 n would saturate every exponential.
TEST(Reference, DelayedScalingOfPNeverSaturates) {
  constexpr size_t keys = 512, dim = 16;
  Problem p =
      Problem::parse("dtype=e4m3 o_dtype=fp32 heads_q=1 heads_kv=1 dim_qk=16 batch=1 seqlen_q=1");
  p.seqlen_kv = keys;
  alignas(16) std::array<uint8_t, dim> q{};
  alignas(16) std::array<uint8_t, keys * dim> k{}, v;
  alignas(16) std::array<float, dim> o{};
  v.fill(0x38);  // 1.0
  float s_amax = 0, s_scale = 1, s_scale_inv = 1;
  std::array<void*, TEA_TENSOR_COUNT> tensors{q.data(), k.data(), v.data(), o.data()};
  tensors[TEA_S_AMAX] = &s_amax, tensors[TEA_S_SCALE] = &s_scale;
  tensors[TEA_S_SCALE_INV] = &s_scale_inv;
  tea_run run{};
  run.struct_size = sizeof run, run.tensors = tensors.data(), run.tensor_count = TEA_TENSOR_COUNT;
  const PlanRef plan = planner().plan(p, kHost, "reference");
  for (int step = 0; step < 3; ++step) {
    forward(*plan, &run);
    EXPECT_EQ(s_amax, 1);
    EXPECT_EQ(o[0], 1);
    s_scale = 448 / s_amax, s_scale_inv = 1 / s_scale, s_amax = 0;
  }
}

}  // namespace
}  // namespace tea
