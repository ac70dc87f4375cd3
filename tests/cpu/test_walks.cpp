// The loops over keys of amx_forward.h and amx_backward.h, by AMX and by AVX-512's products of
// pairs, against the oracle at sizes that the random cases do not reach.
#include "core/plan.h"
#include "cpu/flash.h"
#include "cpu/fuzz.h"
#include "kit/inputs.h"

namespace tea::cpu {
namespace {

class Walks : public testing::TestWithParam<const InstructionSet*> {
 protected:
  void SetUp() override {
    if (!GetParam()->available())
      GTEST_SKIP() << engine() << ": this processor lacks the instructions";
  }
  static const char* engine() { return GetParam()->engine; }
  // The dtypes that the instruction set multiplies.
  static std::vector<std::string> types() {
    std::vector<std::string> out = {"dtype=bf16 "};
    if (GetParam()->multiplies(TEA_FP32)) out.push_back("dtype=fp32 ");
    return out;
  }
};

// More than one panel of keys, whose edges and masks fall everywhere.
TEST_P(Walks, ManyPanels) {
  kit::say_share("sizes");
  int number = 0;
  for (const char* options :
       {"", "causal=1", "causal=1 bottom_right=1", "window_left=300 window_right=3",
        "causal=1 window_left=270 bias=post_scale alibi=standard softcap=20 softmax=learnable",
        "dropout=0.2 causal=1 lse_gradient=1", "has_scale=1 scale=-0.25", "has_scale=1 scale=0",
        "has_scale=1 scale=2", "has_scale=1 scale=2 outputs=max+sum_exp", "dropout=0.3",
        "softcap=2 dropout=0.4", "bias=pre_scale bias_broadcast=batch+row has_scale=1 scale=-1"})
    for (const char* sizes :
         {"batch=1 seqlen_q=80 seqlen_kv=1200 heads_q=3 heads_kv=1 dim_qk=40 dim_v=72",
          "batch=1 seqlen_q=300 seqlen_kv=270 heads_q=1 heads_kv=1 dim_qk=96 dim_v=32"})
      for (const std::string& type : types()) {
        if (number++ % kit::kEvery) continue;
        const kit::Report report =
            kit::check(kit::Case::parse(type + "training=1 " + std::string(sizes) + " " + options +
                                        " | seed=3 values=randn"),
                       engine());
        EXPECT_TRUE(report.ok()) << report.text();
      }
}

// Rows whose later keys are far above the first ones, so that exponentials which trusted the base
// of the first keys are computed again; a NaN and an infinity among them.
TEST_P(Walks, TrustsABaseOnlyWhileItHolds) {
  kit::say_share("values");
  int number = 0;
  for (const char* values : {"randn", "extreme", "negative"})
    for (const char* scale : {"1", "8"})
      for (const char* dims : {"16", "64 dim_v=512", "256 dim_v=24"})
        for (const std::string& type : types()) {
          if (number++ % kit::kEvery) continue;
          const kit::Report report = kit::check(
              kit::Case::parse(type + "training=1 has_scale=1 scale=" + scale +
                               " batch=1 seqlen_q=128 seqlen_kv=700 heads_q=1 heads_kv=1 dim_qk=" +
                               dims + " | seed=12 values=" + values),
              engine());
          EXPECT_TRUE(report.ok()) << report.text();
        }
}

// Options that shift logits, or the sum, far from the exponentials of the keys.
TEST_P(Walks, FarSinksAndBiases) {
  for (const char* options :
       {"softmax=learnable softcap=30 | sink_mean=50",
        "softmax=learnable softcap=5 | sink_mean=-50",
        "softmax=learnable dropout=0.3 | sink_mean=5", "bias=post_scale | bias_mean=100",
        "bias=post_scale softmax=learnable causal=1 | bias_mean=-100 sink_mean=-50",
        "bias=pre_scale softcap=60 softmax=off_by_one | bias_mean=-100",
        // Here the base is rounded by more than floats have powers of two: O was 0 or NaN.
        "bias=post_scale | bias_mean=-1000000000000", "bias=post_scale | bias_mean=1000000000000",
        "bias=pre_scale causal=1 | bias_mean=-1000000000000000000"})
    for (const std::string& type : types()) {
      const kit::Report report =
          kit::check(kit::Case::parse(type +
                                      "training=1 batch=2 seqlen_q=70 seqlen_kv=300 "
                                      "heads_q=4 heads_kv=2 dim_qk=64 " +
                                      options + " seed=11"),
                     engine());
      EXPECT_TRUE(report.ok()) << report.text();
    }
}

// Each was wrong once.
TEST_P(Walks, Regressions) {
  for (const char* line :
       {// No key to pack, so no memory to pack it in.
        "dtype=bf16 training=1 q_form=ragged kv_form=ragged heads_q=2 heads_kv=2 dim_qk=64 | "
        "lens_q=3 lens_kv=0 max_q=3 max_kv=8 seed=1 values=randn",
        // Lanes without a row read an uninitialised bias.
        "dtype=bf16 bias_dtype=fp32 training=1 deterministic=1 lse_gradient=1 q_form=ragged "
        "kv_form=ragged gaps=1 heads_q=2 heads_kv=1 dim_qk=72 bias=post_scale alibi=slopes | "
        "lens_q=1,1,0,1 lens_kv=1,1,0,1 max_q=1 max_kv=8 gap=3 seed=5798 values=negative",
        // Subnormal values, which the unit takes as zero, times 1 / (1 - 0.9).
        "dtype=bf16 training=1 deterministic=1 heads_q=16 heads_kv=2 dim_qk=96 batch=2 "
        "seqlen_q=12 "
        "seqlen_kv=9 causal=1 bottom_right=1 window_left=1 bias=post_scale dropout=0.9 scale=1 "
        "has_scale=1 | seed=5198 values=denormal layout=interleaved2 omit_optional=1",
        // Subnormal O, taken as zero in delta and so in dsink.
        "dtype=bf16 bias_dtype=fp32 training=1 q_form=ragged kv_form=ragged heads_q=4 heads_kv=4 "
        "dim_qk=512 dim_v=80 window_left=20 bias=post_scale bias_broadcast=batch+col "
        "softmax=learnable dropout=0.1 scale=0.37 has_scale=1 alignment=16 | lens_q=7,7,0,7 "
        "lens_kv=1,2,7,7 max_q=8 max_kv=15 tail=1 seed=9002555 bias_mean=-100 origin=2,3,13,1 "
        "origin_in_memory=1",
        // Subnormal dS, which the unit takes as zero: the oracle did not know it of that operand.
        "dtype=bf16 training=1 deterministic=1 outputs=lse+sum_exp lse_gradient=1 heads_q=32 "
        "heads_kv=4 dim_qk=256 dim_v=80 batch=1 seqlen_q=7 seqlen_kv=7 causal=1 bottom_right=1 "
        "window_left=46 window_right=1 softmax=learnable softcap=30 scale=0.37 has_scale=1 | "
        "seed=8003742 values=negative layout=packed2 sink_mean=50",
        "dtype=bf16 training=1 deterministic=1 outputs=lse+sum_exp lse_gradient=1 q_form=ragged "
        "kv_form=ragged gaps=1 heads_q=3 heads_kv=1 dim_qk=80 causal=1 bottom_right=1 "
        "window_right=1 softmax=learnable softcap=30 scale=0.37 has_scale=1 | lens_q=22,9,22,22 "
        "lens_kv=22,9,22,22 gap=1 seed=8003745 values=extreme sink_mean=50",
        // dS times a slope of 1e-5 of the soft cap is subnormal; times a key of 100, which came in
        // after it was taken as zero, it is not.
        "dtype=fp32 training=1 lse_gradient=1 q_form=ragged kv_form=ragged gaps=1 heads_q=3 "
        "heads_kv=3 dim_qk=32 bottom_right=1 window_left=20 bias=post_scale softmax=learnable "
        "softcap=30 | lens_q=3 lens_kv=3 gap=1 tail=2 seed=71004985 values=extreme sink_mean=50 "
        "origin=0,1,12,32"}) {
    const kit::Report report = kit::check(kit::Case::parse(line), engine());
    EXPECT_TRUE(report.ok()) << report.text();
  }
}

// The library runs on threads that it was lent; what runs there between two pieces of its work
// may be another call, which finds the packed keys of the first in memory that the thread keeps.
TEST_P(Walks, ALentThreadMayMakeOtherCalls) {
  struct Call {
    explicit Call(const char* line) : inputs(kit::Case::parse(line)) {
      inputs.fill(kit::Poison::kNan);
    }
    void operator()(tea_parallel_for lent, Call* other) {
      tea_run run = inputs.run(0);
      run.parallel_for = lent, run.parallel_context = other;
      forward(*plan, &run);
      backward(*plan, &run);
    }
    kit::Inputs inputs;
    const PlanRef plan = planner().plan(inputs.problem(), kHost, Walks::engine());
  };
  const char* const line =
      "dtype=bf16 training=1 heads_q=2 heads_kv=2 dim_qk=64 batch=1 seqlen_q=100 seqlen_kv=300 | "
      "seed=9 values=randn";
  const auto lent = [](void* other, int64_t count, void (*body)(void*, int64_t), void* argument) {
    for (int64_t i = 0; i < count; ++i) {
      body(argument, i);
      (*static_cast<Call*>(other))(nullptr, nullptr);
    }
  };
  const auto gradients = [](Call& call) {
    std::vector<uint8_t> out = call.inputs.output_bytes(kit::Written::kForward);
    for (const uint8_t byte : call.inputs.output_bytes(kit::Written::kBackward))
      out.push_back(byte);
    return out;
  };
  Call alone(line), outer(line);
  alone(nullptr, nullptr);
  for (const char* other : {"batch=1 seqlen_q=100 seqlen_kv=300", "batch=1 seqlen_q=9 seqlen_kv=9",
                            "batch=3 seqlen_q=200 seqlen_kv=900"}) {
    Call nested(("dtype=bf16 training=1 heads_q=2 heads_kv=2 dim_qk=64 " + std::string(other) +
                 " | seed=10 values=randn")
                    .c_str());
    outer(lent, &nested);
    EXPECT_EQ(gradients(outer), gradients(alone)) << other;
  }
}

INSTANTIATE_TEST_SUITE_P(Sets, Walks, testing::Values(&kAmx, &kAvx512Bf16),
                         [](const auto& set) { return set.param == &kAmx ? "Amx" : "Avx512Bf16"; });

}  // namespace
}  // namespace tea::cpu
