// The oracle's bounds from both sides: a correct engine stays within them on any input, and an
// engine with one mistake, or one option read wrongly, does not.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include "kit/approx.h"
#include "kit/naive.h"
#include "kit/oracle_draws.h"

namespace tea::oracle {
namespace {

struct Engine {
  const char* name;
  Type type;  // of the inputs
  Precision precision;
  bool in_double = false;
};

Precision with_outputs(Precision p, Type o, Type dqkv) {
  p.o = rounding(o), p.dqkv = rounding(dqkv);
  return p;
}

const Rounding kBf16 = rounding(Type::kBf16), kFp32 = rounding(Type::kFp32);
const Precision kExactP{0x1p-53, {}, kBf16, kBf16, kBf16, 0, kFp32};
const Precision kRunning{0x1p-24, rounding(Type::kE4m3), kBf16, kBf16, kFp32, 0, kFp32};
const Engine kEngines[] = {
    {"fp16", Type::kFp16, precision(Type::kFp16)},
    {"bf16", Type::kBf16, precision(Type::kBf16)},
    {"fp32", Type::kFp32, precision(Type::kFp32)},
    {"fp64", Type::kFp64, precision(Type::kFp64), true},
    {"bf16_in_double", Type::kBf16, kExactP, true},
    {"e4m3", Type::kE4m3, precision(Type::kE4m3)},
    {"e5m2_to_fp8", Type::kE5m2, with_outputs(precision(Type::kE5m2), Type::kE4m3, Type::kE5m2)},
    {"e4m3_running_maximum", Type::kE4m3, kRunning}};

Result run(const Case& c, const Engine& engine, Mistake mistake = Mistake::kNone) {
  if (engine.in_double) return Naive<double>(c, engine.precision, mistake).out;
  return Naive<float>(c, engine.precision, mistake).out;
}

using Worst = std::map<std::string, double>;

Result expected(const Case& c, const Engine& engine) {
  Result want = solve(c, engine.precision);
  if (!c.bias.empty()) want.dbias = reduce(c, want.dbias, {}, engine.precision);
  // With a running maximum the largest exp(x - maximum) is another number.
  if (engine.precision.p.unit > 0) want.s_amax = {};
  return want;
}

// The largest error of each output, as a multiple of its bound.
Worst compare(const Result& want, const Result& got) {
  Worst worst;
  const auto add = [&worst](const char* name, const Tensor& w, const Tensor& g) {
    double& high = worst[name];
    for (size_t i = 0; i < w.value.size(); ++i) high = std::max(high, w.error(i, g.value[i]));
  };
  add("o", want.o, got.o), add("o_amax", want.o_amax, got.o_amax);
  add("lse", want.lse, got.lse), add("max", want.max, got.max);
  add("sum_exp", want.sum_exp, got.sum_exp);
  add("dq", want.dq, got.dq), add("dq_amax", want.dq_amax, got.dq_amax);
  add("dk", want.dk, got.dk), add("dk_amax", want.dk_amax, got.dk_amax);
  add("dv", want.dv, got.dv), add("dv_amax", want.dv_amax, got.dv_amax);
  add("dsink", want.dsink, got.dsink), add("dbias", want.dbias, got.dbias);
  add("dp_amax", want.dp_amax, got.dp_amax);
  add("s_amax", want.s_amax, got.s_amax);
  return worst;
}

class CorrectEngine
    : public testing::TestWithParam<std::tuple<Engine, std::pair<const char*, Inputs>>> {};

TEST_P(CorrectEngine, StaysWithinTheBounds) {
  const auto& [engine, inputs] = GetParam();
  Draws draws(17);
  Worst worst;
  for (int n = 0; n < 100; ++n) {
    const Case c = draws.draw(n % 20 == 0 ? 150 : 24, inputs.second, engine.type);
    for (const auto& [name, error] : compare(expected(c, engine), run(c, engine))) {
      ASSERT_LE(error, 2) << name << " in draw " << n;
      worst[name] = std::max(worst[name], error);
    }
  }
  if (inputs.second == Inputs::kTiny || inputs.second == Inputs::kHuge) return;
  for (const char* name : {"o", "lse", "dq", "dk", "dv"})
    EXPECT_GT(worst[name], 0.02) << name << ": the bound is so wide that it says nothing";
}

const std::pair<const char*, Inputs> kInputs[] = {
    {"normal", Inputs::kNormal},     {"large_logits", Inputs::kLargeLogits},
    {"one_hot", Inputs::kOneHot},    {"constant", Inputs::kConstant},
    {"outliers", Inputs::kOutliers}, {"tiny", Inputs::kTiny},
    {"huge", Inputs::kHuge}};

std::string name_of(const testing::TestParamInfo<CorrectEngine::ParamType>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + std::get<1>(info.param).first;
}

INSTANTIATE_TEST_SUITE_P(All, CorrectEngine,
                         testing::Combine(testing::ValuesIn(kEngines), testing::ValuesIn(kInputs)),
                         name_of);

// One problem in which every option matters to some element.
Case rich(Type type, bool other) {
  Draws draws(other ? 5 : 4);
  Case c;
  c.batch = 2, c.heads_q = 4, c.heads_kv = 2, c.dim_qk = 16, c.dim_v = 24, c.max_q = 70,
  c.max_kv = 100;
  c.length_q = {70, 61}, c.length_kv = {93, 100};
  c.scale = 0.25, c.softcap = 6, c.dropout = 0.25;
  c.causal = !other, c.bottom_right = true;
  c.window_left = 20, c.window_right = other ? 7 : -1;
  c.bias_kind = other ? Bias::kPreScale : Bias::kPostScale;
  c.slopes.assign(8, 0.0625), c.sink = {0.5, 1, 1.5, 2};
  for (int64_t& origin : c.origin) origin = 1;
  draws.fill(c, Inputs::kNormal, type);
  c.dlse.assign(c.batch * c.heads_q * c.max_q, 0.5);
  return c;
}

bool within(const Result& want, const Result& got) {
  for (const auto& [name, error] : compare(want, got))
    if (error > 2) return false;
  return true;
}

class WrongEngine : public testing::TestWithParam<Engine> {};

TEST_P(WrongEngine, IsNoticedWhereItReadsAnOptionWrongly) {
  const std::pair<const char*, void (*)(Case&)> misreadings[] = {
      {"causal", [](Case& c) { c.causal = !c.causal; }},
      {"bottom_right", [](Case& c) { c.bottom_right = false; }},
      {"left edge too far", [](Case& c) { ++c.window_left; }},
      {"left edge too near", [](Case& c) { --c.window_left; }},
      {"no left edge", [](Case& c) { c.window_left = -1; }},
      {"right edge",
       [](Case& c) { c.causal ? c.causal = false, c.window_right = 1 : --c.window_right; }},
      {"key length", [](Case& c) { --c.length_kv[0]; }},
      {"row origin", [](Case& c) { ++c.origin[2]; }},
      {"column origin", [](Case& c) { ++c.origin[3]; }},
      {"batch origin", [](Case& c) { ++c.origin[0]; }},
      {"head origin", [](Case& c) { ++c.origin[1]; }},
      {"no bias", [](Case& c) { c.bias.assign(c.bias.size(), 0.0); }},
      {"bias shifted",
       [](Case& c) { std::rotate(c.bias.begin(), c.bias.begin() + 1, c.bias.end()); }},
      {"no ALiBi", [](Case& c) { c.slopes.clear(); }},
      {"slope of another head", [](Case& c) { c.slopes[5] *= 1.1; }},
      {"no sink", [](Case& c) { c.sink.assign(4, -1e4); }},
      {"sink of another head", [](Case& c) { std::swap(c.sink[0], c.sink[1]); }},
      {"no softcap", [](Case& c) { c.softcap = 0; }},
      {"softcap", [](Case& c) { c.softcap = 7; }},
      {"scale", [](Case& c) { c.scale *= 1.02; }},
      {"no dropout", [](Case& c) { c.dropout = 0; }},
      {"dropout", [](Case& c) { c.dropout += 0.01; }},
      {"seed", [](Case& c) { ++c.seed; }},
      {"offset", [](Case& c) { ++c.offset; }},
      {"high offset", [](Case& c) { c.offset += uint64_t{1} << 40; }},
      {"no dlse", [](Case& c) { c.dlse.clear(); }},
      {"one wrong element", [](Case& c) { c.v[40 * 24] += 0.25; }}};
  for (const bool other : {false, true}) {
    const Case c = rich(GetParam().type, other);
    const Result want = expected(c, GetParam());
    EXPECT_TRUE(within(want, run(c, GetParam())));
    for (const auto& [name, misread] : misreadings) {
      Case read = c;
      misread(read);
      EXPECT_FALSE(within(want, run(read, GetParam())))
          << name << (other ? ", second problem" : "");
    }
  }
}

TEST_P(WrongEngine, IsNoticedByItsMistake) {
  for (const bool other : {false, true}) {
    const Case c = rich(GetParam().type, other);
    const Result want = expected(c, GetParam());
    for (const Mistake mistake : kMistakes)
      EXPECT_FALSE(within(want, run(c, GetParam(), mistake))) << static_cast<int>(mistake);
  }
}

std::string engine_name(const testing::TestParamInfo<Engine>& of) { return of.param.name; }

INSTANTIATE_TEST_SUITE_P(All, WrongEngine, testing::ValuesIn(kEngines), engine_name);

TEST(Bounds, ReduceSumsOverWhatABiasLacks) {
  Draws draws(7);
  Case c = draws.draw(5, Inputs::kNormal, Type::kFp64);
  while (c.bias_kind == Bias::kNone || c.batch < 2) c = draws.draw(5, Inputs::kNormal, Type::kFp64);
  const Tensor full = solve(c, precision(Type::kFp64)).dbias;
  const Tensor sum = reduce(c, full, {true, false, true, false}, precision(Type::kFp64));
  ASSERT_EQ(sum.value.size(), static_cast<size_t>(c.heads_q * c.max_kv));
  for (int64_t h = 0; h < c.heads_q; ++h)
    for (int64_t j = 0; j < c.max_kv; ++j) {
      double want = 0;
      for (int64_t b = 0; b < c.batch; ++b)
        for (int64_t i = 0; i < c.max_q; ++i)
          want += full.value[((b * c.heads_q + h) * c.max_q + i) * c.max_kv + j];
      EXPECT_NEAR(sum.value[h * c.max_kv + j], want, 1e-13);
    }
  EXPECT_EQ(reduce(c, full, {}, precision(Type::kFp64)).value, full.value);
}

TEST(Bounds, JudgesByTheBound) {
  Tensor t{{1, 0, NAN, -kInfinity, 65500, 2}, {0.1, 0, 0, 0, 8, kInfinity}, rounding(Type::kFp16)};
  EXPECT_DOUBLE_EQ(t.error(0, 1.15), 1.5);
  EXPECT_TRUE(t.accepts(0, 0.81) && !t.accepts(0, 0.79));
  EXPECT_TRUE(!t.accepts(0, NAN) && !t.accepts(0, kInfinity));
  EXPECT_TRUE(t.accepts(1, -0.0) && !t.accepts(1, 1e-300));
  EXPECT_TRUE(t.accepts(2, NAN) && t.accepts(2, kInfinity) && !t.accepts(2, 0));
  EXPECT_TRUE(t.accepts(3, -kInfinity) && !t.accepts(3, kInfinity) && !t.accepts(3, NAN));
  EXPECT_FALSE(t.accepts(3, -1e30));
  EXPECT_TRUE(t.accepts(4, kInfinity) && !t.accepts(4, -kInfinity));
  EXPECT_TRUE(t.accepts(5, NAN));
}

// AMX treats subnormal operands as zero, and flushes subnormal sums.
TEST(Bounds, AnOperandThatMayCountAsZeroIsItsError) {
  constexpr double kLeast = 0x1p-126;
  const auto bound = [](Approx a, double x, double least = 0x1p-126) {
    double sum = 0;
    add_error(a, 0, &x, 1, least, &sum);
    return sum;
  };
  EXPECT_EQ(bound({0.5, 0}, 2), kLeast);
  EXPECT_EQ(bound({0x1p-127, 0}, -8), 0x1p-124 + kLeast);
  EXPECT_EQ(bound({-0x1p-127, 0}, 8), 0x1p-124 + kLeast);
  EXPECT_EQ(bound({8, 0}, 0x1p-127), 0x1p-124 + kLeast);
  EXPECT_EQ(bound({0x1p-125, 0x1p-125}, 8), 0x1p-122 + 0x1p-123 + kLeast);  // may be subnormal
  EXPECT_EQ(bound({0x1p-125, 0}, 8), kLeast);
  EXPECT_EQ(bound({0, 0}, 8), 0);
  EXPECT_EQ(bound({1, 0}, 0), 0);
  EXPECT_EQ(bound({0.5, 0.75}, 2, 0), 1.5);  // an engine that keeps every number has its error only
}

// A value that is smaller than its error is no operand that may be flushed where nothing is.
TEST(Bounds, WithoutAMatrixUnitOperandsAreWhatTheyAre) {
  const double x = 2;
  double sum = 0;
  add_error({1, 3}, 0, &x, 1, 0, &sum);
  EXPECT_EQ(sum, 6);
}

}  // namespace
}  // namespace tea::oracle
