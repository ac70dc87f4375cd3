// Deterministic problems give the same bits again and again, while other work keeps the GPU busy;
// and what was not asked to be deterministic is at least right each time (kit/check.cpp).
#include <gtest/gtest.h>

#include <mutex>

#include "gpu/parallel.h"
#include "kit/mirror.h"

namespace tea::kit {
namespace {

constexpr int kGpu = 0, kRuns = 12;

using Bytes = std::vector<uint8_t>;

// The outputs of one run, and of the workspace nothing.
Bytes outputs_of(const tea_plan* plan, Mirror& mirror, Inputs& inputs, uint64_t workspace) {
  const tea_run& run = mirror.upload(workspace);
  EXPECT_EQ(tea_forward(plan, &run), TEA_OK) << tea_error();
  if (inputs.problem().training) {
    EXPECT_EQ(tea_backward(plan, &run), TEA_OK) << tea_error();
  }
  mirror.fetch();
  Bytes out = inputs.output_bytes(Written::kForward);
  const Bytes more = inputs.output_bytes(Written::kBackward);
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

void expect_same_bits(const std::string& line) {
  SCOPED_TRACE(line);
  Inputs inputs(Case::parse(line));
  const Problem& problem = inputs.problem();
  ASSERT_TRUE(problem.deterministic);
  uint64_t forward = 0, backward = 0;
  ASSERT_EQ(tea_workspace_bound(&problem, &inputs.run(0), &forward, &backward), TEA_OK);
  tea_plan* plan = nullptr;
  ASSERT_EQ(tea_plan_create(&problem, kGpu, "", &plan), TEA_OK) << tea_error();
  Mirror mirror(gpu_of_thread(kGpu), inputs);
  Bytes first;
  for (int i = 0; i < kRuns; ++i) {
    inputs.fill(i % 2 ? Poison::kLarge : Poison::kNan);
    const Bytes now = outputs_of(plan, mirror, inputs, std::max(forward, backward));
    if (i == 0) first = now;
    EXPECT_EQ(now == first, true) << "run " << i;
  }
  tea_plan_release(plan);
}

TEST(Reruns, GiveTheSameBits) {
  const std::string every = "training=1 deterministic=1 ";
  const std::string lines[] = {
      "dtype=bf16 heads_q=8 heads_kv=2 dim_qk=128 batch=2 seqlen_q=700 seqlen_kv=700 causal=1",
      "dtype=fp16 heads_q=4 heads_kv=4 dim_qk=64 batch=2 seqlen_q=1000 seqlen_kv=300 dropout=0.1",
      "dtype=fp16 heads_q=8 heads_kv=1 dim_qk=64 batch=1 seqlen_q=3 seqlen_kv=5000 "
      "bias=post_scale bias_broadcast=batch+head",
      "dtype=bf16 heads_q=4 heads_kv=2 dim_qk=256 batch=1 seqlen_q=400 seqlen_kv=600 "
      "softmax=learnable alibi=standard",
      "dtype=fp32 heads_q=4 heads_kv=2 dim_qk=64 batch=2 seqlen_q=300 seqlen_kv=300 softcap=30 "
      "bias=pre_scale bias_broadcast=batch",
      "dtype=e4m3 o_dtype=bf16 heads_q=4 heads_kv=4 dim_qk=128 batch=1 seqlen_q=500 "
      "seqlen_kv=500 causal=1 | scales=own",
      "dtype=bf16 q_form=ragged kv_form=ragged heads_q=8 heads_kv=8 dim_qk=64 causal=1 "
      "lse_gradient=1 | lens_q=900,1,64,300 lens_kv=900,1,64,300",
  };
  parallel_for(2 * std::size(lines),
               [&](size_t i) { expect_same_bits(every + lines[i % std::size(lines)]); });
}

}  // namespace
}  // namespace tea::kit
