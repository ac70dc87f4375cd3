// Shapes of models, too large for the oracle of the host, against the oracle of the GPU.
#include <gtest/gtest.h>

#include "kit/check.h"
#include "kit/oracle_gpu.h"

namespace tea::kit {
namespace {

constexpr const char* kLarge[] = {
    "dtype=bf16 training=1 causal=1 heads_q=8 heads_kv=2 dim_qk=128 batch=1 seqlen_q=4096 "
    "seqlen_kv=4096 | seed=1",
    "dtype=fp16 training=1 heads_q=4 heads_kv=4 dim_qk=64 batch=2 seqlen_q=3000 seqlen_kv=2999 "
    "dropout=0.1 outputs=lse+max+sum_exp | seed=2",
    "dtype=bf16 training=1 causal=1 bottom_right=1 window_left=1025 softmax=learnable heads_q=4 "
    "heads_kv=1 dim_qk=256 batch=1 seqlen_q=2048 seqlen_kv=4096 | seed=3",
    "dtype=fp32 training=1 causal=1 alibi=standard softcap=30 heads_q=4 heads_kv=2 dim_qk=64 "
    "batch=1 seqlen_q=2048 seqlen_kv=2048 | seed=4",
    "dtype=fp16 training=1 q_form=ragged kv_form=ragged causal=1 heads_q=4 heads_kv=4 dim_qk=192 "
    "dim_v=128 | lens_q=4097,1,0,700,2048 lens_kv=4097,1,0,700,2048 seed=5",
    "dtype=bf16 q_form=ragged kv_form=paged page_size=64 causal=1 bottom_right=1 heads_q=16 "
    "heads_kv=2 dim_qk=128 outputs=lse | lens_q=1,1,4,1 lens_kv=20000,777,16384,64 seed=6",
    "dtype=bf16 heads_q=8 heads_kv=8 dim_qk=128 batch=1 seqlen_q=1 seqlen_kv=60000 | seed=7",
    // Gradients of self-attention without options, where one engine may go forward and another
    // back: parts of tiles, groups, layouts, values at the ends, an origin that moves the mask.
    "dtype=bf16 training=1 causal=1 heads_q=8 heads_kv=8 dim_qk=64 batch=2 seqlen_q=2048 "
    "seqlen_kv=2048 | seed=9",
    "dtype=fp16 training=1 heads_q=8 heads_kv=8 dim_qk=256 batch=1 seqlen_q=2048 seqlen_kv=2048 | "
    "seed=10 values=outliers",
    "dtype=bf16 training=1 causal=1 heads_q=8 heads_kv=8 dim_qk=192 dim_v=128 batch=1 "
    "seqlen_q=2500 seqlen_kv=2500 | seed=11",
    "dtype=bf16 training=1 causal=1 heads_q=8 heads_kv=2 dim_qk=128 batch=1 seqlen_q=2057 "
    "seqlen_kv=2057 outputs=lse+max | seed=12 layout=odd",
    "dtype=fp16 training=1 heads_q=8 heads_kv=8 dim_qk=128 batch=1 seqlen_q=2050 seqlen_kv=2050 | "
    "seed=13 layout=packed3 values=maxfinite",
    "dtype=bf16 training=1 causal=1 heads_q=8 heads_kv=8 dim_qk=128 batch=1 seqlen_q=2060 "
    "seqlen_kv=2060 | seed=15 origin=1,2,64,0",
    // No mask hides what is past the last half of a tile of keys: cudnn-frontend#628.
    "dtype=bf16 training=1 heads_q=8 heads_kv=8 dim_qk=64 batch=1 seqlen_q=2112 seqlen_kv=2112 | "
    "seed=628 values=negative",
    "dtype=bf16 training=1 heads_q=8 heads_kv=8 dim_qk=128 batch=1 seqlen_q=2112 seqlen_kv=2112 | "
    "seed=628 values=negative",
    "dtype=bf16 training=1 causal=1 heads_q=2 heads_kv=1 dim_qk=512 batch=1 seqlen_q=2048 "
    "seqlen_kv=2048 | seed=8 values=outliers",
};

class Large : public testing::TestWithParam<const char*> {};

TEST_P(Large, AgreesWithTheOracle) {
  const Report report =
      check(Case::parse(GetParam()), "", {.device = 0, .solve = oracle::solve_on_gpu});
  std::printf("  by %s\n", report.engine.c_str());
  for (const Closeness& c : report.tensors)
    std::printf("  %-8s worst error %7.3f of 2 bounds over %lld elements\n", c.tensor.c_str(),
                c.ratio, static_cast<long long>(c.elements));
  EXPECT_TRUE(report.ok()) << report.text();
}

INSTANTIATE_TEST_SUITE_P(Shapes, Large, testing::ValuesIn(kLarge),
                         [](const auto& test) { return "Line" + std::to_string(test.index); });

}  // namespace
}  // namespace tea::kit
