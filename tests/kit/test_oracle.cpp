// The oracle against what is known without it: published vectors, cases with closed answers, and
// finite differences of its own forward.
#include <gtest/gtest.h>

#include <numeric>
#include <string>

#include "kit/bounds.h"
#include "kit/oracle_draws.h"

namespace tea::oracle {
namespace {

const Precision kDouble = precision(Type::kFp64);

Case plain(int64_t rows, int64_t cols, uint64_t seed = 1) {
  Draws draws(seed);
  Case c;
  c.dim_qk = c.dim_v = 8;
  c.max_q = rows, c.max_kv = cols;
  c.length_q = {rows}, c.length_kv = {cols};
  const auto fill = [&](int64_t n) {
    std::vector<double> x(n * 8);
    for (double& element : x) element = draws.normal();
    return x;
  };
  c.q = fill(rows), c.k = fill(cols), c.v = fill(cols), c.dout = fill(rows);
  return c;
}

// The visible columns of each row, as text: a line per row, # where visible.
std::string picture(const Case& c) {
  std::string text;
  for (int64_t i = 0; i < c.max_q; ++i) {
    for (int64_t j = 0; j < c.max_kv; ++j) text += visible(c, 0, i, j) ? '#' : '.';
    text += ' ';
  }
  return text;
}

TEST(OracleDropout, PhiloxGivesThePublishedVectors) {
  struct Known {
    uint32_t counter[4];
    uint64_t key;
    uint32_t want[4];
  };
  const Known known[] = {
      {{0, 0, 0, 0}, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{~0u, ~0u, ~0u, ~0u}, ~uint64_t{0}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       0x299f31d0a4093822,
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
  for (Known k : known) {
    philox(k.counter, k.key);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(k.counter[i], k.want[i]);
  }
}

// The rows below come from a separate implementation in Python.
TEST(OracleDropout, DecisionsAreTheSpecifiedOnes) {
  Case c;
  c.seed = 0x123456789abcdef0, c.offset = 0x0000000300000007, c.dropout = 0.25;
  const auto row = [&c](int64_t b, int64_t h, int64_t i, int64_t j) {
    std::string text;
    for (int64_t n = 0; n < 24; ++n) text += keeps(c, b, h, i, j + n) ? '#' : '.';
    return text;
  };
  EXPECT_EQ(row(0, 0, 0, 0), "####.#########.#.###..##");
  EXPECT_EQ(row(0, 0, 1, 0), "########.###..####..###.");
  EXPECT_EQ(row(0, 0, 8, 0), "#..###.#########..####.#");
  EXPECT_EQ(row(0, 0, 19, 0), "#.###.########.########.");
  EXPECT_EQ(row(2, 3, 100, 1000), "##.###.####.#.######..#.");
  EXPECT_EQ(row(2, 3, 119, 1000), "#####.#####.#.##########");
  c.origin[0] = 2, c.origin[1] = 3, c.origin[2] = 100, c.origin[3] = 1000;
  EXPECT_EQ(row(0, 0, 0, 0), "##.###.####.#.######..#.");
}

TEST(OracleMask, BandsLookAsTheyShould) {
  Case c;
  c.max_q = 3, c.max_kv = 5;
  c.length_q = {3}, c.length_kv = {5};
  EXPECT_EQ(picture(c), "##### ##### ##### ");
  c.causal = true;
  EXPECT_EQ(picture(c), "#.... ##... ###.. ");
  c.window_right = 3;  // causal wins
  EXPECT_EQ(picture(c), "#.... ##... ###.. ");
  c.bottom_right = true;
  EXPECT_EQ(picture(c), "###.. ####. ##### ");
  c.length_kv = {4};  // the corner is that of the actual lengths
  EXPECT_EQ(picture(c), "##... ###.. ####. ");
  c.window_left = 1;
  EXPECT_EQ(picture(c), "##... .##.. ..##. ");
  c.causal = false, c.bottom_right = false, c.window_left = 0, c.window_right = 1;
  EXPECT_EQ(picture(c), "##... .##.. ..##. ");
  c.origin[2] = 2, c.origin[3] = 1;
  EXPECT_EQ(picture(c), ".##.. ..##. ...#. ");
  c.length_q = {1};
  EXPECT_EQ(picture(c), ".##.. ..... ..... ");
}

TEST(Oracle, EqualScoresGiveTheMean) {
  Case c = plain(2, 4);
  c.q.assign(c.q.size(), 0.0);
  const Result r = solve(c, kDouble);
  for (int d = 0; d < 8; ++d) {
    const double mean = (c.v[d] + c.v[8 + d] + c.v[16 + d] + c.v[24 + d]) / 4;
    EXPECT_NEAR(r.o.value[d], mean, 1e-15);
    EXPECT_NEAR(r.dv.value[d], (c.dout[d] + c.dout[8 + d]) / 4, 1e-15);
  }
  EXPECT_NEAR(r.lse.value[0], std::log(4.0), 1e-15);
  EXPECT_EQ(r.max.value[0], 0);
  EXPECT_NEAR(r.sum_exp.value[0], 4, 1e-14);
}

TEST(Oracle, OneKeyIsCopied) {
  const Case c = plain(3, 1);
  const Result r = solve(c, kDouble);
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t d = 0; d < 8; ++d) {
      EXPECT_NEAR(r.o.value[i * 8 + d], c.v[d], 1e-15);
      EXPECT_NEAR(r.dq.value[i * 8 + d], 0, 1e-14);
    }
  for (int64_t d = 0; d < 8; ++d)
    EXPECT_NEAR(r.dv.value[d], c.dout[d] + c.dout[8 + d] + c.dout[16 + d], 1e-14);
}

TEST(Oracle, FirstCausalRowSeesTheFirstKey) {
  Case c = plain(4, 4);
  c.causal = true;
  const Result r = solve(c, kDouble);
  const double score = c.scale * std::inner_product(&c.q[0], &c.q[8], &c.k[0], 0.0);
  EXPECT_NEAR(r.lse.value[0], score, 1e-14);
  EXPECT_NEAR(r.max.value[0], score, 1e-14);
  for (int d = 0; d < 8; ++d) EXPECT_NEAR(r.o.value[d], c.v[d], 1e-15);
}

TEST(Oracle, ScoreIsBuiltInOrder) {
  Case c = plain(1, 1);
  const double dot = std::inner_product(c.q.begin(), c.q.end(), c.k.begin(), 0.0);
  c.scale = 0.25, c.softcap = 2, c.bias = {0.75}, c.bias_kind = Bias::kPreScale;
  EXPECT_NEAR(solve(c, kDouble).max.value[0], 2 * std::tanh(0.25 * (dot + 0.75) / 2), 1e-15);
  c.bias_kind = Bias::kPostScale, c.slopes = {0.5}, c.origin[2] = 7;
  const double score = 2 * std::tanh(0.25 * dot / 2) + 0.75;
  EXPECT_NEAR(solve(c, kDouble).max.value[0], score - 3.5, 1e-15);
  c.origin[3] = 10;
  EXPECT_NEAR(solve(c, kDouble).max.value[0], score - 1.5, 1e-15);
  c.sink = {1.5};
  const Result r = solve(c, kDouble);
  const double p = 1 / (1 + std::exp(1.5 - (score - 1.5)));
  EXPECT_NEAR(r.max.value[0], score - 1.5, 1e-15);
  EXPECT_NEAR(r.lse.value[0], std::log(std::exp(1.5) + std::exp(score - 1.5)), 1e-15);
  EXPECT_NEAR(r.sum_exp.value[0], std::exp(r.lse.value[0] - (score - 1.5)), 1e-15);
  EXPECT_NEAR(r.o.value[0], p * c.v[0], 1e-15);
}

TEST(Oracle, DropoutScalesWhatItKeeps) {
  Case c = plain(1, 4);
  c.q.assign(8, 0.0), c.dropout = 0.5;
  std::string kept;
  while (kept != "#.#.") {
    ++c.seed, kept.clear();
    for (int j = 0; j < 4; ++j) kept += keeps(c, 0, 0, 0, j) ? '#' : '.';
  }
  const Result r = solve(c, kDouble);
  for (int d = 0; d < 8; ++d) EXPECT_NEAR(r.o.value[d], (c.v[d] + c.v[16 + d]) / 2, 1e-15);
  EXPECT_NEAR(r.lse.value[0], std::log(4.0), 1e-15);
}

TEST(Oracle, TakesAGivenDropoutMask) {
  Case c = plain(1, 4);
  c.q.assign(8, 0.0), c.dropout = 0.5, c.kept = {0, 1, 1, 0};
  const Result r = solve(c, kDouble);
  for (int d = 0; d < 8; ++d) EXPECT_NEAR(r.o.value[d], (c.v[8 + d] + c.v[16 + d]) / 2, 1e-15);
}

// Codes and their factors give the same as the products of both, and every kv head has its own.
TEST(Oracle, FactorsOfACacheMultiplyItsKeysAndValues) {
  Case c = plain(1, 3);
  c.heads_q = 4, c.heads_kv = 2;
  c.q.resize(4 * 8), c.k.resize(2 * 24), c.v.resize(2 * 24), c.dout.clear();
  for (std::vector<double>* x : {&c.q, &c.k, &c.v})
    for (size_t i = 0; i < x->size(); ++i) (*x)[i] = static_cast<double>(i * 7 % 11) / 8 - 0.5;
  Case scaled = c;
  c.k_factors = {0.5, 2}, c.v_factors = {4, 0.25};
  for (size_t i = 0; i < c.k.size(); ++i)
    scaled.k[i] *= c.k_factors[i / 24], scaled.v[i] *= c.v_factors[i / 24];
  const Result codes = solve(c, kDouble), want = solve(scaled, kDouble);
  for (size_t i = 0; i < want.o.value.size(); ++i)
    EXPECT_NEAR(codes.o.value[i], want.o.value[i], 1e-14) << i;
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(codes.lse.value[i], want.lse.value[i], 1e-14);
}

// Three equal keys.
TEST(Oracle, RecordsFp8sProbabilitiesBeforeOrAfterTheDivision) {
  Case c = plain(1, 3);
  c.q.assign(8, 0.0), c.fp8.s = Type::kE4m3, c.fp8.dp = Type::kE5m2;
  const Result before = solve(c, precision(Type::kE4m3));
  EXPECT_EQ(before.s_amax.value[0], 1);
  c.fp8.divided = true;
  const Result after = solve(c, precision(Type::kE4m3));
  EXPECT_NEAR(after.s_amax.value[0], 1.0 / 3, 1e-15);
  EXPECT_EQ(after.o.value, before.o.value);
}

// One key: P = 1. In E4M3, 300 becomes 288.
TEST(Oracle, Fp8CastsWhereSpecified) {
  Case c = plain(1, 1);
  for (std::vector<double>* x : {&c.q, &c.k, &c.v, &c.dout}) x->assign(8, 1.0);
  c.o_stored.assign(8, 0.5);
  c.scale = 0.25;
  c.fp8.s = Type::kE4m3, c.fp8.dp = Type::kE5m2;
  c.fp8.s_scale = 300, c.fp8.s_scale_inv = 0.0078125, c.fp8.v_scale_inv = 2, c.fp8.o_scale = 4;
  c.fp8.q_scale_inv = 0.5, c.fp8.k_scale_inv = 8, c.fp8.dout_scale_inv = 0.25;
  c.fp8.o_scale_inv = 2, c.fp8.dp_scale = 5.25, c.fp8.dp_scale_inv = 0.125;
  const Result r = solve(c, precision(Type::kE4m3));
  EXPECT_EQ(r.lse.value[0], 0.25 * 0.5 * 8 * 8);
  EXPECT_EQ(r.s_amax.value[0], 1);
  EXPECT_EQ(r.o_amax.value[0], 288 * 0.0078125 * 2);
  EXPECT_EQ(r.o.value[0], 288 * 0.0078125 * 2 * 4);
  EXPECT_EQ(r.dv.value[0], 288 * 0.0078125 * 0.25);
  // dP = 8 * 0.25 * 2 = 4, delta = 8 * 0.5 * 0.25 * 2 = 2, scale * dS = 0.5, cast(2.625) = 2.5.
  EXPECT_EQ(r.dp_amax.value[0], 0.5);
  EXPECT_EQ(r.dq.value[0], 2.5 * 0.125 * 8);
  EXPECT_EQ(r.dk.value[0], 2.5 * 0.125 * 0.5);
}

TEST(Oracle, RowsWithNothingToAttendAreZero) {
  Case c = plain(3, 1);
  c.causal = c.bottom_right = true;  // rows 0 and 1 lie above the diagonal
  c.dlse = {1, 2, 4};
  for (bool with_sink : {false, true}) {
    if (with_sink) c.sink = {0.5};
    const Result r = solve(c, kDouble);
    for (int64_t n = 0; n < 16; ++n) {
      EXPECT_TRUE(r.o.value[n] == 0 && r.o.bound[n] == 0);
      EXPECT_TRUE(r.dq.value[n] == 0 && r.dq.bound[n] == 0);
    }
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(r.lse.value[i], with_sink ? 0.5 : -kInfinity);
      EXPECT_EQ(r.max.value[i], -kInfinity);
      EXPECT_EQ(r.sum_exp.value[i], 0);
    }
    EXPECT_TRUE(std::isfinite(r.lse.value[2]));
  }
}

TEST(Oracle, OnlyAttendedNansMatter) {
  Case c = plain(3, 4);
  c.causal = true;  // column 3 is never attended, column 2 by row 2 only
  const Result clean = solve(c, kDouble);
  c.k[3 * 8] = c.v[3 * 8] = NAN;
  const Result same = solve(c, kDouble);
  EXPECT_EQ(clean.o.value, same.o.value);
  EXPECT_EQ(clean.dq.value, same.dq.value);
  EXPECT_EQ(clean.dk.value, same.dk.value);
  c.k[2 * 8] = NAN;
  const Result spread = solve(c, kDouble);
  for (int64_t n = 0; n < 24; ++n) EXPECT_EQ(std::isnan(spread.o.value[n]), n >= 16);
  EXPECT_TRUE(std::isnan(spread.lse.value[2]) && std::isnan(spread.dq.value[16]));
}

// 0 times NaN or nothing at all: dV of a dropped weight that is not a number is either.
TEST(Oracle, DroppedNansMayCountAsZero) {
  Case c = plain(1, 2);
  c.k[0] = NAN;
  const Result all = solve(c, kDouble);
  EXPECT_FALSE(all.dv.accepts(0, 0));
  c.dropout = 0.99999;
  ASSERT_FALSE(keeps(c, 0, 0, 0, 0) || keeps(c, 0, 0, 0, 1));
  const Result dropped = solve(c, kDouble);
  EXPECT_TRUE(dropped.dv.accepts(0, 0) && dropped.dv.accepts(0, NAN));
  EXPECT_FALSE(dropped.lse.accepts(0, 0));
}

TEST(Oracle, KeptNansStayNextToDroppedOnes) {
  Case c = plain(2, 2);
  c.k[0] = NAN;
  c.dropout = 0.5;
  while (keeps(c, 0, 0, 0, 0) || !keeps(c, 0, 0, 1, 0)) ++c.seed;
  const Result r = solve(c, kDouble);
  EXPECT_TRUE(r.dv.accepts(0, NAN));
  EXPECT_FALSE(r.dv.accepts(0, 0));
}

TEST(Oracle, MinusInfinityInTheBiasHidesAKey) {
  Case c = plain(2, 3), fewer = plain(2, 3);
  c.bias_kind = Bias::kPostScale;
  c.bias = {0, 0, -kInfinity, -kInfinity, -kInfinity, -kInfinity};
  fewer.length_kv = {2};
  const Result r = solve(c, precision(Type::kBf16)), want = solve(fewer, kDouble);
  for (int64_t d = 0; d < 8; ++d) {
    EXPECT_EQ(r.o.value[d], want.o.value[d]);
    EXPECT_LT(r.o.bound[d], 1);
    EXPECT_EQ(r.o.value[8 + d], 0);
  }
  EXPECT_EQ(r.lse.value[1], -kInfinity);
}

TEST(Oracle, HeadsOfAGroupShareAKey) {
  Draws draws(3);
  Case c = draws.draw(6, Inputs::kNormal, Type::kFp64);
  while (c.heads_kv != 2 || c.heads_q != 6) c = draws.draw(6, Inputs::kNormal, Type::kFp64);
  Case wide = c;
  wide.heads_kv = 6;
  const auto repeat = [&](const std::vector<double>& x) {
    std::vector<double> y;
    const int64_t n = static_cast<int64_t>(x.size()) / (c.batch * 2);
    for (int64_t head = 0; head < c.batch * 6; ++head)
      y.insert(y.end(), &x[head / 3 * n], &x[head / 3 * n] + n);
    return y;
  };
  wide.k = repeat(c.k), wide.v = repeat(c.v);
  const Result r = solve(c, kDouble), w = solve(wide, kDouble);
  EXPECT_EQ(r.o.value, w.o.value);
  const int64_t n = static_cast<int64_t>(r.dk.value.size()) / (c.batch * 2);
  for (int64_t i = 0; i < n; ++i)
    EXPECT_NEAR(r.dk.value[i], w.dk.value[i] + w.dk.value[n + i] + w.dk.value[2 * n + i], 1e-12);
}

// A shard of the rows equals those rows; shards of the columns merge by their LSE.
TEST(Oracle, OriginPlacesAShard) {
  Case c = plain(6, 9);
  c.causal = true, c.window_left = 4, c.dropout = 0.5, c.slopes = {0.25};
  const Result whole = solve(c, kDouble);
  Case rows = c;
  rows.max_q = 4, rows.length_q = {4}, rows.origin[2] = 2;
  rows.q.erase(rows.q.begin(), rows.q.begin() + 16), rows.dout.clear();
  const Result part = solve(rows, kDouble);
  for (size_t n = 0; n < part.o.value.size(); ++n)
    EXPECT_EQ(part.o.value[n], whole.o.value[16 + n]);
  Case left = c, right = c;
  left.length_kv = {3};
  right.max_kv = 6, right.length_kv = {6}, right.origin[3] = 3;
  right.k.erase(right.k.begin(), right.k.begin() + 24);
  right.v.erase(right.v.begin(), right.v.begin() + 24);
  const Result a = solve(left, kDouble), b = solve(right, kDouble);
  for (size_t n = 0; n < whole.o.value.size(); ++n) {
    const double la = std::exp(a.lse.value[n / 8]), lb = std::exp(b.lse.value[n / 8]);
    EXPECT_NEAR(whole.lse.value[n / 8], std::log(la + lb), 1e-14);
    EXPECT_NEAR(whole.o.value[n], (la * a.o.value[n] + lb * b.o.value[n]) / (la + lb), 1e-14);
  }
}

double loss(const Case& with) {
  Case c = with;
  c.dout.clear();
  const Result r = solve(c, kDouble);
  double sum = 0;
  for (size_t i = 0; i < r.o.value.size(); ++i)
    if (r.o.value[i] != 0) sum += with.dout[i] * r.o.value[i];
  for (size_t i = 0; i < with.dlse.size(); ++i)
    if (std::isfinite(r.lse.value[i])) sum += with.dlse[i] * r.lse.value[i];
  return sum;
}

void expect_derivative(Case c, std::vector<double> Case::*input, const Tensor& gradient) {
  ASSERT_EQ((c.*input).size(), gradient.value.size());
  for (size_t i = 0; i < gradient.value.size(); ++i) {
    const double at = (c.*input)[i], step = 1e-4;
    if (std::isnan(at)) {
      EXPECT_TRUE(gradient.value[i] == 0 && gradient.bound[i] == 0);
      continue;
    }
    const auto slope = [&](double h) {
      (c.*input)[i] = at + h;
      const double up = loss(c);
      (c.*input)[i] = at - h;
      const double down = loss(c);
      (c.*input)[i] = at;
      return (up - down) / (2 * h);
    };
    const double want = (4 * slope(step) - slope(2 * step)) / 3;
    ASSERT_NEAR(gradient.value[i], want, 1e-8 * (1 + std::abs(want)));
  }
}

TEST(Oracle, GradientsAreDerivativesOfTheLoss) {
  Draws draws(2024);
  for (int n = 0; n < 80; ++n) {
    SCOPED_TRACE(n);
    const Case c = draws.draw(5, Inputs::kNormal, Type::kFp64);
    const Result r = solve(c, kDouble);
    expect_derivative(c, &Case::q, r.dq);
    expect_derivative(c, &Case::k, r.dk);
    expect_derivative(c, &Case::v, r.dv);
    if (c.bias_kind != Bias::kNone) expect_derivative(c, &Case::bias, r.dbias);
    if (!c.sink.empty()) expect_derivative(c, &Case::sink, r.dsink);
    if (HasFatalFailure()) return;
  }
}

TEST(Oracle, RoundsLikeTheType) {
  Draws draws(5);
  for (int n = 0; n < 10000; ++n) {
    const double x = draws.normal() * std::exp2(static_cast<double>(draws.below(60) - 40));
    EXPECT_EQ(nearest(x, rounding(Type::kFp32)), static_cast<float>(x));
    const double half = std::clamp(x, -65504.0, 65504.0);
    EXPECT_EQ(nearest(half, rounding(Type::kFp16)), static_cast<_Float16>(half));
  }
  struct Known {
    Type type;
    double x, want;
  };
  const Known known[] = {{Type::kE4m3, 0.3, 0.3125},
                         {Type::kE4m3, 17, 16},
                         {Type::kE4m3, 19, 20},
                         {Type::kE4m3, -1e9, -448},
                         {Type::kE4m3, 0x1p-10, 0},
                         {Type::kE4m3, 0x3p-10, 0x1p-8},
                         {Type::kE4m3, 0x1.9p-10, 0x1p-9},
                         {Type::kE5m2, 9, 8},
                         {Type::kE5m2, 11, 12},
                         {Type::kE5m2, kInfinity, 57344},
                         {Type::kE5m2, 0x1.1p-17, 0x1p-16},
                         {Type::kBf16, 1 + 0x1p-8, 1},
                         {Type::kBf16, 1 + 0x1.8p-8, 1 + 0x1p-7}};
  for (const Known& k : known) EXPECT_EQ(nearest(k.x, rounding(k.type)), k.want) << k.x;
}

}  // namespace
}  // namespace tea::oracle
