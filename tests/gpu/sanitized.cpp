// The fixed matrix that compute-sanitizer watches: small shapes that between them run every kernel,
// each tensor in an allocation of its own, compared with the oracle too. test_gpu.py runs it under
// each tool.
#include <gtest/gtest.h>

#include "kit/check.h"

namespace tea::kit {
namespace {

constexpr int kGpu = 0;

// Every type and class of head dimensions, plain and with what makes scores general.
std::vector<std::string> kernels() {
  const std::string types[] = {"dtype=bf16", "dtype=fp16", "dtype=fp32",
                               "dtype=e4m3 o_dtype=bf16 dqkv_dtype=bf16",
                               "dtype=e5m2 o_dtype=fp16 dqkv_dtype=bf16"};
  const std::string dims[] = {"dim_qk=64", "dim_qk=128", "dim_qk=192 dim_v=128", "dim_qk=256",
                              "dim_qk=512"};
  const std::string scores[] = {
      "causal=1", "softcap=20 dropout=0.2 bias=post_scale bias_broadcast=batch alignment=4"};
  std::vector<std::string> out;
  for (const std::string& type : types)
    for (const std::string& dim : dims)
      for (const std::string& score : scores)
        for (const bool deterministic : {false, true}) {
          if (deterministic && dim != dims[0] && dim != dims[4]) continue;  // one kernel for all
          out.push_back(type +
                        " training=1 heads_q=1 heads_kv=1 batch=1 seqlen_q=35 seqlen_kv=70 " + dim +
                        " " + score + (deterministic ? " deterministic=1" : "") + " | seed=3");
        }
  return out;
}

// Forms, splits of the keys, and the passes beside the main ones.
constexpr const char* kForms[] = {
    "dtype=bf16 training=1 q_form=ragged kv_form=ragged gaps=1 causal=1 heads_q=2 heads_kv=2 "
    "dim_qk=64 | lens_q=3,0,70 lens_kv=80,5,70 gap=2 tail=3",
    "dtype=fp16 training=1 q_form=padded kv_form=padded heads_q=3 heads_kv=1 dim_qk=40 batch=2 "
    "seqlen_q=20 seqlen_kv=70 softmax=learnable outputs=lse+max+sum_exp | lens_q=20,3 lens_kv=1,70",
    "dtype=fp16 q_form=ragged kv_form=paged page_size=16 causal=1 bottom_right=1 heads_q=8 "
    "heads_kv=1 dim_qk=128 outputs=lse | lens_q=1,2 lens_kv=300,40 spare_pages=1",
    "dtype=bf16 heads_q=4 heads_kv=4 dim_qk=128 batch=1 seqlen_q=1 seqlen_kv=3000",
    "dtype=fp32 heads_q=4 heads_kv=1 dim_qk=64 batch=1 seqlen_q=2 seqlen_kv=2000 outputs=lse",
    "dtype=e4m3 o_dtype=bf16 heads_q=4 heads_kv=1 dim_qk=64 batch=1 seqlen_q=2 seqlen_kv=1500",
    "dtype=bf16 training=1 heads_q=2 heads_kv=2 dim_qk=32 batch=2 seqlen_q=40 seqlen_kv=50 "
    "bias=pre_scale bias_broadcast=head+row lse_gradient=1",
    "dtype=fp16 training=1 heads_q=2 heads_kv=2 dim_qk=32 batch=2 seqlen_q=40 seqlen_kv=50 "
    "bias=post_scale alibi=slopes",
    "dtype=e4m3 training=1 heads_q=2 heads_kv=2 dim_qk=64 batch=1 seqlen_q=70 seqlen_kv=50 "
    "softmax=off_by_one | scales=own",
};

// By every engine of the GPU that takes a line on; the one for any GPU takes all, and again with as
// little shared memory as smaller GPUs have, where it may choose other kernels.
TEST(Sanitized, EveryKernelRuns) {
  std::vector<std::string> lines = kernels();
  lines.insert(lines.end(), std::begin(kForms), std::end(kForms));
  std::vector<std::pair<std::string, int>> runs = {{"portable", 99 << 10}};
  for (const std::string& engine : engines_of(kGpu)) runs.emplace_back(engine, 0);
  for (const std::string& line : lines)
    for (const auto& [engine, shared_bytes] : runs) {
      const Report report =
          check(Case::parse(line), engine,
                {.device = kGpu, .around = Around::kAllocations, .shared_bytes = shared_bytes});
      EXPECT_TRUE(report.ok() || (report.refused && engine != "portable")) << report.text();
    }
}

}  // namespace
}  // namespace tea::kit
