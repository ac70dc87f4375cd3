// plan_amx: the AMX kernels against the oracle, with every option, and the precision of fp32 in
// three terms. (test_walks.cpp tests the parts that bf16 shares with AVX-512's products of pairs.)
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
TEST(FlashAmx, RandomCasesAgreeWithTheOracle) {
  expect_set_agrees("cpu-amx", kAmx.available(), 400000);
}

TEST(FlashAmx, RefusesDevices) {
  EXPECT_TRUE(std::holds_alternative<Refusal>(plan_amx(Problem{}, Device{0, 90})));
}

// The outputs of the two engines for one problem.
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
