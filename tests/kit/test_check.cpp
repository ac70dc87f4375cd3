// The kit itself: what a faulty engine might do is noticed, each fault by its own sentence.
#include <gtest/gtest.h>

#include <algorithm>

#include "kit/check.h"
#include "kit/codec.h"
#include "kit/values.h"

namespace tea::kit {
namespace {

// Padded, with holes between rows and every output there is.
constexpr const char* kCase =
    "dtype=bf16 training=1 outputs=lse+max+sum_exp q_form=padded kv_form=padded heads_q=2 "
    "heads_kv=1 dim_qk=16 batch=2 seqlen_q=6 seqlen_kv=7 bias=post_scale softmax=learnable | "
    "lens_q=6,3 lens_kv=7,4 layout=odd seed=3";

void expect_noticed(const Tamper& tamper, const std::string& fragment) {
  const Report report = check(Case::parse(kCase), "reference", {.tamper = tamper});
  EXPECT_FALSE(report.ok()) << "not noticed: " << fragment;
  EXPECT_NE(report.text().find(fragment), std::string::npos) << report.text();
  EXPECT_NE(report.text().find(Case::parse(kCase).text()), std::string::npos);
}

// In one direction only, under both poisons.
Tamper in(Written direction, const std::function<void(Inputs&)>& change) {
  return [=](Inputs& inputs, Written d, Poison) {
    if (d == direction) change(inputs);
  };
}

TEST(Check, PassesWhatIsRight) {
  const Report report = check(Case::parse(kCase), "reference");
  EXPECT_TRUE(report.ok()) << report.text();
  EXPECT_EQ(report.tensors.size(), 9u) << "O LSE MAX SUM_EXP dQ dK dV dsink dbias";
  for (const Closeness& c : report.tensors) {
    EXPECT_GT(c.elements, 0) << c.tensor;
    EXPECT_LE(c.ratio, 2) << c.tensor;
  }
}

TEST(Check, PoisonsWithOrdinaryNumbersOnlyForTheEngineThatNeedsThem) {
  EXPECT_TRUE(needs_finite_padding("cudnn"));
  for (const char* engine : {"reference", "cpu", "portable", "hopper"})
    EXPECT_FALSE(needs_finite_padding(engine));
  Inputs inputs(Case::parse(kCase));
  for (const auto& [poison, value] : {std::pair{Poison::kThree, 3.0}, {Poison::kMinusTwo, -2.0}}) {
    inputs.fill(poison);
    EXPECT_EQ(inputs.value(TEA_O, {0, 0, 0, 0}), value);
    EXPECT_EQ(inputs.value(TEA_LSE, {0, 0, 0, 0}), value);
  }
}

TEST(Check, DemandsTheSameBitsOfForwardButForOneQueryByCudnn) {
  const std::string line = "dtype=bf16 heads_q=8 heads_kv=1 dim_qk=64 batch=1 seqlen_kv=99 ";
  const Problem one = Problem::parse(line + "seqlen_q=1"),
                two = Problem::parse(line + "seqlen_q=2");
  EXPECT_FALSE(repeats_forward("cudnn", one));
  EXPECT_TRUE(repeats_forward("cudnn", two));
  for (const char* engine : {"portable", "hopper", "hopper-cudnn"})
    EXPECT_TRUE(repeats_forward(engine, one));
}

TEST(Check, NoticesEveryOutputThatIsOff) {
  constexpr tea_tensor kForward[] = {TEA_O, TEA_LSE, TEA_MAX, TEA_SUM_EXP};
  constexpr tea_tensor kBackward[] = {TEA_DQ, TEA_DK, TEA_DV, TEA_DSINK, TEA_DBIAS};
  const auto off = [](tea_tensor t) {
    return [t](Inputs& inputs) {
      const int32_t dtype = inputs.place(t).dtype;
      const double x = load(inputs.memory(t), dtype, 0);
      store(inputs.memory(t), dtype, 0, x + 0.05 + 0.05 * std::abs(x));
    };
  };
  for (const tea_tensor t : kForward)
    expect_noticed(in(Written::kForward, off(t)), std::string(tensor_name(t)) + " at batch 0");
  for (const tea_tensor t : kBackward)
    expect_noticed(in(Written::kBackward, off(t)), std::string(tensor_name(t)) + " at batch 0");
}

TEST(Check, NoticesMemoryThatIsNotTheEngines) {
  expect_noticed(in(Written::kForward, [](Inputs& i) { i.memory(TEA_O)[-1] ^= 1; }),
                 "redzone of O was written at byte -1");
  expect_noticed(in(Written::kBackward, [](Inputs& i) { i.memory(TEA_DK)[-4000] ^= 1; }),
                 "redzone of dK");
  expect_noticed(in(Written::kForward, [](Inputs& i) { i.memory(TEA_K)[2] ^= 1; }),
                 "K is not an output here");
  expect_noticed(in(Written::kBackward, [](Inputs& i) { i.memory(TEA_O)[2] ^= 1; }),
                 "O is not an output here");
  // Element 16 is the first of the hole behind a row of 16.
  expect_noticed(in(Written::kForward, [](Inputs& i) { i.memory(TEA_O)[2 * 16] ^= 1; }),
                 "between the elements of an output");
}

TEST(Check, NoticesPaddingThatIsNotAsTheContractSays) {
  const auto pad = [](tea_tensor t) {
    return [t](Inputs& inputs) {
      const Place& place = inputs.place(t);
      const bool bias = t == TEA_DBIAS;
      const int64_t last = bias ? place.stride[0] + 5 * place.stride[2]
                                : place.stride[0] + (place.shape[1] - 1) * place.stride[1];
      store(inputs.memory(t), place.dtype, last, 0.5);
    };
  };
  for (const tea_tensor t : {TEA_O, TEA_LSE, TEA_MAX, TEA_SUM_EXP})
    expect_noticed(in(Written::kForward, pad(t)), std::string(tensor_name(t)) + " padding");
  for (const tea_tensor t : {TEA_DQ, TEA_DK, TEA_DV, TEA_DBIAS})
    expect_noticed(in(Written::kBackward, pad(t)), std::string(tensor_name(t)) + " padding");
}

TEST(Check, NoticesAResultThatDependsOnOldMemory) {
  // One unit in the last place: far inside every bound, and yet not reproducible.
  const Tamper tamper = [](Inputs& inputs, Written d, Poison poison) {
    if (d == Written::kForward && poison == Poison::kLarge) inputs.memory(TEA_LSE)[0] ^= 1;
  };
  expect_noticed(tamper, "forward depends on what the memory held before");
}

// Engines share a result of the oracle only where it must be the same: the gradients are those of
// the O that the engine stored.
TEST(Check, SolvesAgainForAnotherRoundingOrAnotherO) {
  static int solved = 0, written = 0;
  const auto solves = [](const std::vector<std::string>& engines, const Tamper& tamper = {}) {
    solved = written = 0;
    const Solve solve = [](const oracle::Case& c, const oracle::Precision& precision) {
      ++solved;
      return oracle::solve(c, precision);
    };
    for (const Report& report :
         check(Case::parse(kCase), engines, {.tamper = tamper, .solve = solve}))
      EXPECT_TRUE(report.ok()) << report.text();
    return solved;
  };
  EXPECT_EQ(solves({"reference", "reference"}), 1);
  EXPECT_EQ(solves({"reference", "cpu-generic"}), 2);
  // The second engine's O is a bit off, which is within the bounds.
  const Tamper tamper = [](Inputs& inputs, Written d, Poison) {
    if (d == Written::kForward && ++written > 2) inputs.memory(TEA_O)[0] ^= 1;
  };
  EXPECT_EQ(solves({"reference", "reference"}, tamper), 2);
}

TEST(Check, KnowsTheEnginesOfTheHost) {
  const std::vector<std::string> names = host_engines();
  EXPECT_EQ(std::count(names.begin(), names.end(), "reference"), 1);
}

TEST(Check, PretendsForAnEngineByItsNameOnly) {
  const Case c =
      Case::parse("dtype=bf16 heads_q=1 heads_kv=1 dim_qk=8 batch=1 seqlen_q=3 seqlen_kv=3");
  EXPECT_TRUE(check(c, "reference", {.shared_bytes = 1024}).ok());
  const Report report = check(c, "", {.shared_bytes = 1024});
  EXPECT_FALSE(report.ok());
  EXPECT_NE(report.text().find("shared_bytes needs the name of an engine"), std::string::npos);
}

TEST(Check, ReportsARefusalInsteadOfPassing) {
  const Case c = Case::parse("dtype=bf16 heads_q=3 heads_kv=2 dim_qk=16 batch=1 seqlen_q=1");
  const Report report = check(c, "reference");
  EXPECT_FALSE(report.ok());
  EXPECT_NE(report.text().find("heads_q"), std::string::npos) << report.text();
  EXPECT_FALSE(check(Case::parse(kCase), "no_such_engine").ok());
}

}  // namespace
}  // namespace tea::kit
