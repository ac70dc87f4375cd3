// plan_amx: the kernels for the matrix unit against the oracle, with every option, and at sizes
// that the random cases do not reach.
#include <array>
#include <cmath>

#include "core/plan.h"
#include "cpu/flash.h"
#include "cpu/fuzz.h"
#include "kit/inputs.h"
#include "kit/random.h"

namespace tea::cpu {
namespace {

constexpr const char* kLacks = "cpu-amx: this processor lacks the instructions";
const std::string kTypes[] = {"dtype=bf16 ", "dtype=fp32 "};  // what the unit multiplies

TEST(FlashAmx, RandomCasesAgreeWithTheOracle) {
  expect_set_agrees("cpu-amx", kAmx.available(), 400000);
}

TEST(FlashAmx, RefusesDevices) {
  EXPECT_TRUE(std::holds_alternative<Refusal>(plan_amx(Problem{}, Device{0, 90})));
}

// More than one panel of keys, whose edges and masks fall everywhere.
TEST(FlashAmx, ManyPanels) {
  if (!kAmx.available()) GTEST_SKIP() << kLacks;
  for (const char* options :
       {"", "causal=1", "causal=1 bottom_right=1", "window_left=300 window_right=3",
        "causal=1 window_left=270 bias=post_scale alibi=standard softcap=20 softmax=learnable",
        "dropout=0.2 causal=1 lse_gradient=1", "has_scale=1 scale=-0.25", "has_scale=1 scale=0",
        "has_scale=1 scale=2", "has_scale=1 scale=2 outputs=max+sum_exp", "dropout=0.3",
        "softcap=2 dropout=0.4", "bias=pre_scale bias_broadcast=batch+row has_scale=1 scale=-1"})
    for (const char* sizes :
         {"batch=1 seqlen_q=80 seqlen_kv=1200 heads_q=3 heads_kv=1 dim_qk=40 dim_v=72",
          "batch=1 seqlen_q=300 seqlen_kv=270 heads_q=1 heads_kv=1 dim_qk=96 dim_v=32"})
      for (const std::string& type : kTypes) {
        const kit::Report report =
            kit::check(kit::Case::parse(type + "training=1 " + std::string(sizes) + " " + options +
                                        " | seed=3 values=randn"),
                       "cpu-amx");
        EXPECT_TRUE(report.ok()) << report.text();
      }
}

// Rows whose later keys are far above the first ones, so that exponentials which trusted the base
// of the first keys are computed again; a NaN and an infinity among them.
TEST(FlashAmx, TrustsABaseOnlyWhileItHolds) {
  if (!kAmx.available()) GTEST_SKIP() << kLacks;
  for (const char* values : {"randn", "extreme", "negative"})
    for (const char* scale : {"1", "8"})
      for (const char* dims : {"16", "64 dim_v=512", "256 dim_v=24"})
        for (const std::string& type : kTypes) {
          const kit::Report report = kit::check(
              kit::Case::parse(type + "training=1 has_scale=1 scale=" + scale +
                               " batch=1 seqlen_q=128 seqlen_kv=700 heads_q=1 heads_kv=1 dim_qk=" +
                               dims + " | seed=12 values=" + values),
              "cpu-amx");
          EXPECT_TRUE(report.ok()) << report.text();
        }
}

// What shifts logits, or the sum, far from where the exponentials of the keys are.
TEST(FlashAmx, FarSinksAndBiases) {
  if (!kAmx.available()) GTEST_SKIP() << kLacks;
  for (const char* options :
       {"softmax=learnable softcap=30 | sink_mean=50",
        "softmax=learnable softcap=5 | sink_mean=-50",
        "softmax=learnable dropout=0.3 | sink_mean=5", "bias=post_scale | bias_mean=100",
        "bias=post_scale softmax=learnable causal=1 | bias_mean=-100 sink_mean=-50",
        "bias=pre_scale softcap=60 softmax=off_by_one | bias_mean=-100"})
    for (const std::string& type : kTypes) {
      const kit::Report report =
          kit::check(kit::Case::parse(type +
                                      "training=1 batch=2 seqlen_q=70 seqlen_kv=300 "
                                      "heads_q=4 heads_kv=2 dim_qk=64 " +
                                      options + " seed=11"),
                     "cpu-amx");
      EXPECT_TRUE(report.ok()) << report.text();
    }
}

// Each was wrong once.
TEST(FlashAmx, Regressions) {
  if (!kAmx.available()) GTEST_SKIP() << kLacks;
  for (const char* line :
       {// No key to pack, so no memory to pack it in.
        "dtype=bf16 training=1 q_form=ragged kv_form=ragged heads_q=2 heads_kv=2 dim_qk=64 | "
        "lens_q=3 lens_kv=0 max_q=3 max_kv=8 seed=1 values=randn",
        // Lanes without a row read a bias that nobody wrote.
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
        "lens_kv=22,9,22,22 gap=1 seed=8003745 values=extreme sink_mean=50"}) {
    const kit::Report report = kit::check(kit::Case::parse(line), "cpu-amx");
    EXPECT_TRUE(report.ok()) << report.text();
  }
}

// The library runs on threads that it was lent; what runs there between two pieces of its work
// may be another call, which finds the packed keys of the first in memory that the thread keeps.
TEST(FlashAmx, ALentThreadMayMakeOtherCalls) {
  if (!kAmx.available()) GTEST_SKIP() << kLacks;
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
    const PlanRef plan = planner().plan(inputs.problem(), kHost, "cpu-amx");
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

// What the two engines write of one problem.
struct Written {
  std::vector<uint8_t> amx, avx512;
};
Written written(const std::string& options) {
  const auto by = [&](const char* engine) {
    kit::Inputs inputs(kit::Case::parse(
        "training=1 heads_q=2 heads_kv=2 dim_qk=64 batch=1 seqlen_q=70 seqlen_kv=300 " + options));
    inputs.fill(kit::Poison::kNan);
    const PlanRef plan = planner().plan(inputs.problem(), kHost, engine);
    const tea_run run = inputs.run(0);
    forward(*plan, &run);
    backward(*plan, &run);
    std::vector<uint8_t> out = inputs.output_bytes(kit::Written::kForward);
    for (const uint8_t byte : inputs.output_bytes(kit::Written::kBackward)) out.push_back(byte);
    return out;
  };
  return {by("cpu-amx"), by("cpu-avx512")};
}

// Types that the unit does not multiply run on AVX-512, with its bits; so does fp32 where
// three terms hold neither Q nor K. (Where they do, the unit makes the scores, whatever V holds.)
TEST(FlashAmx, LeavesTheRestToAvx512) {
  if (!kAmx.available()) GTEST_SKIP() << kLacks;
  for (const char* theirs :
       {"dtype=fp16 | seed=8 values=randn", "dtype=fp64 | seed=8 values=randn",
        "dtype=e4m3 | seed=8 values=randn", "dtype=fp32 | seed=8 values=denormal"}) {
    const Written both = written(theirs);
    EXPECT_EQ(both.amx, both.avx512) << theirs;
  }
  for (const char* own : {"dtype=bf16 | seed=8 values=randn", "dtype=fp32 | seed=8 values=randn"}) {
    const Written both = written(own);
    EXPECT_NE(both.amx, both.avx512) << own;
  }
}

// Training on numbers of our own: one head of 70 rows of 32 in fp32.
struct Numbers {
  static constexpr int kRowsOfAll = 70, kDim = 32, kSize = kRowsOfAll * kDim;
  using Values = std::vector<float>;

  // q and k are normal numbers times `size`.
  explicit Numbers(float size) {
    kit::Random random(5, 1);
    for (Values* x : {&q, &k, &v, &dout})
      for (float& one : *x) one = static_cast<float>(random.normal());
    for (Values* x : {&q, &k})
      for (float& one : *x) one *= size;
  }

  // O, dQ, dK and dV one after the other.
  Values train(const char* engine, const std::string& options = "") {
    const Problem problem = Problem::parse(
        "dtype=fp32 training=1 heads_q=1 heads_kv=1 dim_qk=32 batch=1 seqlen_q=70 seqlen_kv=70 "
        "lse_gradient=1 " +
        options);
    Values out(4 * kSize), lse(kRowsOfAll);
    void* tensors[TEA_TENSOR_COUNT] = {};
    tensors[TEA_Q] = q.data(), tensors[TEA_K] = k.data(), tensors[TEA_V] = v.data();
    tensors[TEA_DOUT] = dout.data(), tensors[TEA_LSE] = lse.data(), tensors[TEA_DLSE] = dlse.data();
    int at = 0;
    for (const tea_tensor t : {TEA_O, TEA_DQ, TEA_DK, TEA_DV})
      tensors[t] = out.data() + at++ * kSize;
    tea_run run{};
    run.struct_size = sizeof run, run.tensor_count = TEA_TENSOR_COUNT, run.tensors = tensors;
    const PlanRef plan = planner().plan(problem, kHost, engine);
    forward(*plan, &run);
    backward(*plan, &run);
    return out;
  }

  // How far the unit's results are from AVX-512's, by the norm of O, dQ, dK and dV.
  std::array<double, 4> differences(const std::string& options = "") {
    const Values amx = train("cpu-amx", options), avx512 = train("cpu-avx512", options);
    std::array<double, 4> out;
    for (size_t tensor = 0; tensor < out.size(); ++tensor) {
      double off = 0, size = 0;
      for (size_t i = tensor * kSize; i < (tensor + 1) * kSize; ++i) {
        off += std::pow(double{amx[i]} - double{avx512[i]}, 2);
        size += std::pow(double{avx512[i]}, 2);
      }
      out[tensor] = off == 0 ? 0 : std::sqrt(off / size);
    }
    return out;
  }
  // Sums, so that a NaN stays one.
  double difference(const std::string& options = "") {
    const std::array<double, 4> each = differences(options);
    return each[0] + each[1] + each[2] + each[3];
  }
  // Of O and dV only: where one key has all of a row, dQ and dK are rounding errors.
  double difference_of_p(const std::string& options = "") {
    const std::array<double, 4> each = differences(options);
    return each[0] + each[3];
  }

  Values q = Values(kSize), k = q, v = q, dout = q, dlse = Values(kRowsOfAll);
};

// Both passes must round a logit alike: at 1e6 its last bit is a sixteenth.
TEST(FlashAmx, LargeLogitsAreTheSameInBothPasses) {
  if (!kAmx.available()) GTEST_SKIP() << kLacks;
  for (const float size : {1.0f, 10.0f, 100.0f, 1000.0f, 1e4f})
    EXPECT_LE(Numbers(size).difference_of_p(), 1e-3) << size;
}

// A number that three terms do not hold, in one operand only, at logits where scores of the other
// set would not do.
TEST(FlashAmx, BothPassesTakeTheSameScores) {
  if (!kAmx.available()) GTEST_SKIP() << kLacks;
  for (auto operand : {&Numbers::q, &Numbers::k, &Numbers::v, &Numbers::dout})
    for (const float odd : {1e-20f, 0x1.8p-46f, 0x1.8p-45f, 0x1.8p20f, 0x1.8p-130f})
      for (const char* options : {"", "causal=1 window_left=40"}) {
        Numbers all(300);
        (all.*operand)[45 * Numbers::kDim + 3] = odd;
        EXPECT_LE(all.difference_of_p(options), 1e-3) << odd << " " << options;
      }
}

// dS times 2^30 must not overflow.
TEST(FlashAmx, LargeScalesAndGradientsOfLse) {
  if (!kAmx.available()) GTEST_SKIP() << kLacks;
  for (const char* scale : {"7.3786976e19", "1000", "2000", "-1e-30"}) {
    Numbers all(std::string(scale) == "7.3786976e19" ? 1e-10f : 1e-2f);
    EXPECT_LE(all.difference("has_scale=1 scale=" + std::string(scale)), 1e-3) << scale;
  }
  for (const float dlse : {1.0f, 0x1p60f, 0x1p79f, 0x1p81f, 0x1p105f}) {
    Numbers all(1);
    std::fill(all.dlse.begin(), all.dlse.end(), dlse);
    EXPECT_LE(all.difference(), 1e-3) << dlse;
  }
}

// Where products of lesser terms would be subnormal.
TEST(FlashAmx, SmallNumbersKeepTheirPrecision) {
  if (!kAmx.available()) GTEST_SKIP() << kLacks;
  for (const float size : {0x1p-30f, 0x1p-40f, 0x1p-44f, 0x1p-50f, 0x1p-57f}) {
    Numbers all(1);
    for (Numbers::Values* x : {&all.v, &all.dout})
      for (float& one : *x) one *= size;
    EXPECT_LE(all.difference(), 1e-5) << size;
  }
}

}  // namespace
}  // namespace tea::cpu
