// Multi-head latent attention whose V is the first columns of K, in the same memory.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/plan.h"
#include "gpu/parallel.h"
#include "kit/check.h"
#include "kit/mirror.h"
#include "kit/random.h"

namespace tea::kit {
namespace {

constexpr int kGpu = 0;

// O and LSE of a case in which V has the values of K; `in_k`: and its memory.
std::vector<double> forward(const std::string& text, bool in_k) {
  Inputs inputs(Case::parse(text));
  for (const tea_tensor t : {TEA_K, TEA_V})
    inputs.replace(t, [](const Index& at) {
      Random random(static_cast<uint64_t>(at[0]),
                    static_cast<uint64_t>((at[2] << 20) + (at[1] << 12) + at[3]));
      return random.normal();
    });
  inputs.fill(Poison::kNan);
  const Problem& p = inputs.problem();
  const PlanRef plan = planner().plan(p, kGpu, "hopper");
  const uint64_t bytes = workspace_for(p, inputs.run(0), kGpu, "hopper", Direction::kForward);
  Mirror mirror(gpu_of_thread(kGpu), inputs);
  tea_run run = mirror.upload(bytes);
  std::vector<void*> tensors(run.tensors, run.tensors + run.tensor_count);
  if (in_k) tensors[TEA_V] = tensors[TEA_K], tensors[TEA_TABLE_V] = tensors[TEA_TABLE_K];
  run.tensors = tensors.data();
  tea::forward(*plan, &run);
  mirror.fetch();
  std::vector<double> out;
  for (const tea_tensor t : {TEA_O, TEA_LSE})
    each_valid(inputs.place(t), p, inputs.extents(),
               [&](int64_t, const Index& at) { out.push_back(inputs.value(t, at)); });
  return out;
}

TEST(Latent, VInKGivesTheBitsOfSeparateV) {
  const std::string sizes = "dtype=bf16 dim_qk=576 dim_v=512 outputs=lse heads_kv=1 ";
  const std::string lines[] = {
      sizes + "heads_q=70 batch=3 seqlen_q=1 seqlen_kv=900 k=518400,576,576 v=518400,576,576",
      sizes +
          "heads_q=16 q_form=padded kv_form=padded batch=3 seqlen_q=3 seqlen_kv=300 causal=1 "
          "bottom_right=1 k=172800,576,576 v=172800,576,576 | lens_q=3,0,1 lens_kv=300,7,129",
      sizes +
          "heads_q=16 kv_form=paged page_size=64 seqlen_q=1 k=36864,576,576 v=36864,576,576 | "
          "lens_kv=1000,64,1",
  };
  parallel_for(std::size(lines), [&](size_t i) {
    const std::vector<double> separate = forward(lines[i], false);
    EXPECT_GT(separate.size(), 0u);
    EXPECT_EQ(forward(lines[i], true), separate) << lines[i];
  });
}

// The kernels for V in K, one for each type, in the matrix of sanitized.cpp.
TEST(Sanitized, KernelsForVInK) {
  const std::vector<std::string> engines = engines_of(kGpu);
  if (std::find(engines.begin(), engines.end(), "hopper") == engines.end()) return;
  for (const std::string type : {"dtype=bf16 ", "dtype=fp16 "}) {
    const std::string line = type +
                             "dim_qk=576 dim_v=512 outputs=lse heads_q=16 heads_kv=1 batch=1 "
                             "seqlen_q=1 seqlen_kv=200 k=115200,576,576 v=115200,576,576";
    const std::vector<double> separate = forward(line, false);
    EXPECT_GT(separate.size(), 0u);
    EXPECT_EQ(forward(line, true), separate) << line;
  }
}

}  // namespace
}  // namespace tea::kit
